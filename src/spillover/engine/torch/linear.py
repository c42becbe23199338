"""Frozen linear layers for inference: plain, packed for oneDNN, and with an adapter on top."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

Linear: TypeAlias = Callable[[Tensor], Tensor]  # [N, in] -> [N, out]


@dataclass(frozen=True)
class Dense:
    """``x @ weight.T + bias``."""

    weight: Tensor  # [out, in]
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class Packed:
    """`Dense` with the weight laid out once the way oneDNN's kernels read it.

    torch uses the same two operators when its compiler freezes a model for the CPU. The layout is chosen for a
    number of rows but takes any.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, rows: int = 16) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return y

    @staticmethod
    def available() -> bool:
        """Whether this build of torch has oneDNN's linear operators."""
        return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


@dataclass(frozen=True)
class Adapted:
    """A linear layer with a LoRA adapter applied beside it, unmerged: ``base(x) + x @ a @ b``."""

    base: Linear
    a: Tensor  # [in, R]
    b: Tensor  # [R, out], scaled

    def __call__(self, x: Tensor) -> Tensor:
        return self.base(x).addmm_(x @ self.a, self.b)
