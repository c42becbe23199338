"""Activation checkpointing (Chen et al., arXiv 1604.06174): a layer runs again in the backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def recomputed(run: Callable[[Tensor], Tensor], x: Tensor, anchor: Tensor | None) -> Tensor:
    """``run(x)``, which must give the same bits twice and may reach parameters on ways of its own.

    `anchor` requires a gradient where ``x`` does not but something inside `run` has a backward.
    """
    return _Recomputed.apply(x, run, anchor)  # type: ignore[no-untyped-call, no-any-return]


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, run: Callable[[Tensor], Tensor], anchor: Tensor | None) -> Tensor:
        ctx.run = run
        ctx.save_for_backward(x)
        return run(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None]:
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_(ctx.needs_input_grad[0])
        with torch.enable_grad():
            y = ctx.run(x)
        if y.requires_grad:
            torch.autograd.backward(y, grad)
        return x.grad, None, None
