"""Norm, rotation and gate: short functions of one tensor, each with its own backward.

Their autograd formulas are written out because a chain of elementwise operators would save and read several
times the memory. Frozen parameters (norm weights) get no gradient.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension, the statistics in float32."""
    if x.requires_grad:
        return _RmsNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call, no-any-return]
    wide = x.float()
    return (wide * _inverse_size(wide, eps)).to(x.dtype).mul_(weight)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor, count: int) -> Tensor:
    """Rotate the first `count` of ``[N, heads, D]`` by the tables of `Rotary`, ``[N, 1, D]``.

    Without a gradient this happens in place.
    """
    if heads.requires_grad:
        return _Rotate.apply(heads, cos, sin, count)  # type: ignore[no-untyped-call, no-any-return]
    x = heads[:, :count]
    swapped = x.roll(x.shape[-1] // 2, -1)
    x.mul_(cos).addcmul_(swapped, sin)
    return heads


def swiglu(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` (Shazeer, arXiv 2002.05202) of ``[N, 2 I]``, gate first."""
    if gate_up.requires_grad:
        return _SwiGlu.apply(gate_up)  # type: ignore[no-untyped-call, no-any-return]
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def _inverse_size(wide: Tensor, eps: float) -> Tensor:
    """``1 / sqrt(mean(x^2) + eps)``, ``[..., 1]``; through the norm, which reads ``x`` once."""
    size = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    scale: Tensor = size.square_().mul_(1 / wide.shape[-1]).add_(eps).rsqrt_()
    return scale


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        scale = _inverse_size(wide, eps)
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).to(x.dtype).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        x, weight, scale = ctx.saved_tensors
        normed = x.float() * scale
        wide = grad.float() * weight
        shared = (wide * normed).mean(-1, keepdim=True)
        return wide.addcmul_(normed, shared, value=-1).mul_(scale).to(x.dtype), None, None


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
        # the inverse rotation: the halves of sin have opposite signs
        return _turned(grad, cos, -sin, ctx.count), None, None, None


def _turned(heads: Tensor, cos: Tensor, sin: Tensor, count: int) -> Tensor:
    out = torch.empty_like(heads, memory_format=torch.contiguous_format)
    x, turned = heads[:, :count], out[:, :count]
    torch.mul(x, cos, out=turned).addcmul_(x.roll(x.shape[-1] // 2, -1), sin)
    out[:, count:] = heads[:, count:]
    return out


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        result = torch.empty_like(gate_up)
        by_gate, by_up = result.chunk(2, dim=-1)
        torch.mul(F.silu(gate), grad, out=by_up)
        by_gate.copy_(torch.ops.aten.silu_backward(grad * up, gate))
        return result
