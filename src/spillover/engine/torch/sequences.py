"""Causal attention of the sequences of a packed pass by compiled kernels, with their own backward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    from spillover.engine.torch.attention import Scoring
    from spillover.engine.torch.native.training import Kernels, Within


def attended(native: Kernels, heads: Tensor, within: Within, kv_heads: int, scoring: Scoring) -> Tensor:
    """``[N, heads + 2 kv_heads, D]`` to ``[N, heads * D]``; rows that belong to no sequence come out zero."""
    return _Attended.apply(heads, native, within, kv_heads, scoring)  # type: ignore[no-untyped-call, no-any-return]


class _Attended(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, heads: Tensor, native: Kernels, within: Within, kv_heads: int, scoring: Scoring
    ) -> Tensor:
        out, sums = native.attention(heads, within, kv_heads, scoring)
        ctx.save_for_backward(heads, out, sums)
        ctx.args = (native, within, scoring)
        return out.flatten(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        heads, out, sums = ctx.saved_tensors
        native, within, scoring = ctx.args
        by_heads = native.attention_back(grad, heads, out, sums, within, scoring)
        return by_heads, None, None, None, None
