"""Frozen linear layers for inference: plain, packed for oneDNN, and with an adapter on top.

A decode step is a long row of small operators, so what surrounds a product goes into it where the kernel
allows: the residual, the gate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from spillover.engine.torch.pointwise import swiglu


class Linear(Protocol):
    """A linear layer with frozen weights, ``[N, in]`` to ``[N, out]``."""

    def __call__(self, x: Tensor) -> Tensor:
        """The product, and the bias if there is one."""
        ...

    def onto(self, residual: Tensor, x: Tensor) -> Tensor:
        """``residual + self(x)``."""
        ...


class Gate(Protocol):
    """``silu(gate(x)) * up(x)``: ``[N, H]`` to ``[N, I]``."""

    def __call__(self, x: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Dense:
    """``x @ weight.T + bias``."""

    weight: Tensor  # [out, in]
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def onto(self, residual: Tensor, x: Tensor) -> Tensor:
        return residual + self(x)


class Packed:
    """`Dense` with the weight laid out once the way oneDNN's kernels read it.

    torch uses the same operators when its compiler freezes a model for the CPU. The layout is chosen for a
    number of rows but takes any.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, rows: int = 16) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return self._unary(x, "none")

    def onto(self, residual: Tensor, x: Tensor) -> Tensor:
        return self._binary(x, residual, "add")

    def silu(self, x: Tensor) -> Tensor:
        """``silu(self(x))`` in one kernel."""
        return self._unary(x, "swish")

    def times(self, other: Tensor, x: Tensor) -> Tensor:
        """``other * self(x)`` in one kernel."""
        return self._binary(x, other, "mul")

    def _unary(self, x: Tensor, after: str) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, after, [], "")
        return y

    def _binary(self, x: Tensor, other: Tensor, after: str) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, other, self._weight, self._bias, after)
        return y

    @staticmethod
    def available() -> bool:
        """Whether this build of torch has oneDNN's linear operators."""
        built = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        return bool(built) and hasattr(torch.ops.mkldnn, "_linear_pointwise")


@dataclass(frozen=True)
class Adapted:
    """A linear layer with a LoRA adapter applied beside it, unmerged: ``base(x) + x @ a @ b``."""

    base: Linear
    a: Tensor  # [in, R]
    b: Tensor  # [R, out], scaled

    def __call__(self, x: Tensor) -> Tensor:
        return self.base(x).addmm_(x @ self.a, self.b)

    def onto(self, residual: Tensor, x: Tensor) -> Tensor:
        return self.base.onto(residual, x).addmm_(x @ self.a, self.b)


@dataclass(frozen=True)
class FusedGate:
    """Gate and up as one product, then the elementwise part."""

    gate_up: Linear

    def __call__(self, x: Tensor) -> Tensor:
        return swiglu(self.gate_up(x))


@dataclass(frozen=True)
class PackedGate:
    """Gate and up as two products that do the elementwise part themselves."""

    gate: Packed
    up: Packed

    def __call__(self, x: Tensor) -> Tensor:
        return self.up.times(self.gate.silu(x), x)
