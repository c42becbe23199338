"""Norm, rotation and gate: short functions of one tensor, each with its own backward.

Their autograd formulas are written out because a chain of elementwise operators would save and read several
times the memory, and where kernels can be compiled each is one of them. Frozen parameters (norm weights) get
no gradient.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from spillover.engine.torch.native.training import kernels

if TYPE_CHECKING:
    from spillover.models.config import Activation


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension, the statistics in float32.

    A float32 weight multiplies before the result is rounded to the dtype of ``x``, one of that dtype after;
    in the compiled kernels both before.
    """
    if x.requires_grad:
        return _RmsNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call, no-any-return]
    if (native := kernels(x)) is not None:  # the same bits as with a gradient: a layer may run twice
        return native.rms_norm(x, weight.float(), eps)[0]
    wide = x.float()
    return _weighted(wide * _inverse_size(wide, eps), weight, x.dtype)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor, count: int) -> Tensor:
    """Rotate the first `count` of ``[N, heads, D]`` by the tables of `Rotary`, ``[N, 1, dim]``.

    The first ``dim`` dimensions of each head turn. Without a gradient this may happen in place.
    """
    if heads.requires_grad:
        return _Rotate.apply(heads, cos, sin, count)  # type: ignore[no-untyped-call, no-any-return]
    if (native := kernels(heads)) is not None:
        return native.rotate(heads, cos, sin, count, 1.0)
    x = heads[:, :count, : cos.shape[-1]]
    swapped = x.roll(x.shape[-1] // 2, -1)
    x.mul_(cos).addcmul_(swapped, sin)
    return heads


def gated(gate_up: Tensor, activation: Activation) -> Tensor:
    """``activation(gate) * up`` (Shazeer, arXiv 2002.05202) of ``[N, 2 I]``, gate first."""
    if gate_up.requires_grad:
        return _Gated.apply(gate_up, activation)  # type: ignore[no-untyped-call, no-any-return]
    if (native := kernels(gate_up)) is not None:
        return native.gated(gate_up, activation)
    gate, up = gate_up.chunk(2, dim=-1)
    return _activate(gate, activation).mul_(up)


def capped(x: Tensor, cap: float | None) -> Tensor:
    """``cap tanh(x / cap)``, a soft limit on the size of ``x`` (Gemma 2, arXiv 2408.00118), in place."""
    return x if cap is None else x.div_(cap).tanh_().mul_(cap)


def _activate(gate: Tensor, activation: Activation) -> Tensor:
    return F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")


def _weighted(normed: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    if weight.dtype == torch.float32:
        return normed.mul_(weight).to(dtype)
    return normed.to(dtype).mul_(weight)


def _inverse_size(wide: Tensor, eps: float) -> Tensor:
    """``1 / sqrt(mean(x^2) + eps)``, ``[..., 1]``; through the norm, which reads ``x`` once."""
    size = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    scale: Tensor = size.square_().mul_(1 / wide.shape[-1]).add_(eps).rsqrt_()
    return scale


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if (native := kernels(x)) is not None:
            weight = weight.float()
            out, scale = native.rms_norm(x, weight, eps)
            ctx.save_for_backward(x, weight, scale)
            return out
        wide = x.float()
        scale = _inverse_size(wide, eps)
        ctx.save_for_backward(x, weight, scale)
        normed = wide * scale if wide is x else wide.mul_(scale)
        return _weighted(normed, weight, x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        x, weight, scale = ctx.saved_tensors
        if (native := kernels(x)) is not None:
            return native.rms_norm_back(grad, x, weight, scale), None, None
        wide = x.float()
        by_wide = (grad * weight.float()).mul_(scale)
        shared = (by_wide * wide).mean(-1, keepdim=True).mul_(scale).mul_(scale)
        return by_wide.addcmul_(wide, shared, value=-1).to(x.dtype), None, None


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, heads: Tensor, cos: Tensor, sin: Tensor, count: int) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.count = count
        return _turned(heads, cos, sin, count)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        return _turned(grad, cos, sin, ctx.count, -1.0), None, None, None


def _turned(heads: Tensor, cos: Tensor, sin: Tensor, count: int, direction: float = 1.0) -> Tensor:
    """Rotated by the tables, or with `direction` -1 back."""
    if (native := kernels(heads)) is not None:
        return native.rotate(heads, cos, sin, count, direction)
    if direction < 0:
        sin = -sin  # the halves of it have opposite signs
    out = torch.empty_like(heads, memory_format=torch.contiguous_format)
    dim = cos.shape[-1]
    x, turned = heads[:, :count, :dim], out[:, :count, :dim]
    torch.mul(x, cos, out=turned).addcmul_(x.roll(dim // 2, -1), sin)
    out[:, :count, dim:] = heads[:, :count, dim:]
    out[:, count:] = heads[:, count:]
    return out


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, activation: Activation) -> Tensor:
        ctx.activation = activation
        if (native := kernels(gate_up)) is not None:
            ctx.save_for_backward(gate_up)
            return native.gated(gate_up, activation)
        gate, up = gate_up.chunk(2, dim=-1)
        active = _activate(gate, activation)
        ctx.save_for_backward(gate_up, active)
        return active * up

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        gate_up, *kept = ctx.saved_tensors
        if (native := kernels(gate_up)) is not None:
            return native.gated_back(grad, gate_up, ctx.activation), None
        (active,) = kept
        gate, up = gate_up.chunk(2, dim=-1)
        result = torch.empty_like(gate_up)
        by_gate, by_up = result.chunk(2, dim=-1)
        torch.mul(active, grad, out=by_up)
        by_active = grad * up
        if ctx.activation == "silu":
            torch.ops.aten.silu_backward.grad_input(by_active, gate, grad_input=by_gate)
        else:
            torch.ops.aten.gelu_backward.grad_input(by_active, gate, approximate="tanh", grad_input=by_gate)
        return result, None
