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
        return _RmsNorm.apply(x, weight, eps)  # type: ignore[no-any-return]
    return F.rms_norm(x, weight.shape, weight, eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate ``[N, heads, D]`` by the tables of `Rotary`, ``[N, 1, D]``."""
    if x.requires_grad:
        return _Rotate.apply(x, cos, sin)  # type: ignore[no-any-return]
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


def swiglu(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` (Shazeer, arXiv 2002.05202) of ``[N, 2 I]``, gate first."""
    if gate_up.requires_grad:
        return _SwiGlu.apply(gate_up)  # type: ignore[no-any-return]
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps))
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
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        # the inverse rotation: sin has opposite signs in its halves
        return torch.addcmul(grad * cos, grad.roll(grad.shape[-1] // 2, -1), sin, value=-1), None, None


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
