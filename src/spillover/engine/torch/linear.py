"""Frozen linear layers for inference: plain, packed for oneDNN, and with an adapter on top.

A decode step is a long row of small operators, so what surrounds a product goes into it where the kernel
allows: the residual, the gate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from spillover.engine.torch.pointwise import gated

if TYPE_CHECKING:
    from spillover.models.config import Activation


ROWS = 16
"""How many rows a layout is made for where a pass has one a sequence."""


class Linear(Protocol):
    """A linear layer with frozen weights, ``[N, in]`` to ``[N, out]``."""

    def __call__(self, x: Tensor) -> Tensor:
        """The product, and the bias if there is one."""
        ...

    def onto(self, residual: Tensor, x: Tensor) -> Tensor:
        """``residual + self(x)``."""
        ...


class Gate(Protocol):
    """``activation(gate(x)) * up(x)``: ``[N, H]`` to ``[N, I]``."""

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
    number of rows but takes any. With `rows` None the weight is used as it lies, a transposed view too: the
    same bits, a little later.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, rows: int | None = ROWS) -> None:
        reorder = torch.ops.mkldnn._reorder_linear_weight
        self._weight = weight if rows is None else reorder(weight.contiguous(), rows)
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return self._unary(x, "none", "")

    def onto(self, residual: Tensor, x: Tensor) -> Tensor:
        return self._binary(x, residual, "add")

    def activated(self, x: Tensor, activation: Activation) -> Tensor:
        """``activation(self(x))`` in one kernel."""
        return self._unary(x, "swish", "") if activation == "silu" else self._unary(x, "gelu", "tanh")

    def times(self, other: Tensor, x: Tensor) -> Tensor:
        """``other * self(x)`` in one kernel."""
        return self._binary(x, other, "mul")

    def _unary(self, x: Tensor, after: str, algorithm: str) -> Tensor:
        product = torch.ops.mkldnn._linear_pointwise
        y: Tensor = product(_two(x), self._weight, self._bias, after, [], algorithm)
        return y[: len(x)]

    def _binary(self, x: Tensor, other: Tensor, after: str) -> Tensor:
        product = torch.ops.mkldnn._linear_pointwise
        y: Tensor = product(_two(x), _two(other), self._weight, self._bias, after)
        return y[: len(x)]

    @staticmethod
    def available() -> bool:
        """Whether this build of torch has oneDNN's linear operators."""
        built = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        return bool(built) and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _two(x: Tensor) -> Tensor:
    """At least two rows: a single one has a kernel that sums in an order of its own, by the layout."""
    return x.expand(2, -1) if len(x) == 1 else x


class Frozen:
    """A frozen weight for training: the product forward, and the one that takes a gradient back.

    With `packed`, oneDNN's layout of either direction is made once; both together take twice the weight's
    bytes, and the products a tenth less time, for the same bits. `rows` is the number of rows that they are
    laid out for.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, *, packed: bool, rows: int = 512) -> None:
        self.outputs = len(weight)
        self._forward: Packed | Dense = Dense(weight, bias)
        self._back: Packed | Dense = Dense(weight.t())
        if weight.device.type == "cpu" and Packed.available():
            wanted = rows if packed else None
            self._forward, self._back = Packed(weight, bias, wanted), Packed(weight.t(), None, wanted)

    def product(self, x: Tensor) -> Tensor:
        """``x @ weight.T + bias``, ``[N, in]`` to ``[N, out]``; not part of a gradient's graph."""
        return self._forward(x)

    def back(self, grad: Tensor) -> Tensor:
        """``grad @ weight``, ``[N, out]`` to ``[N, in]``."""
        return self._back(grad)

    def __call__(self, x: Tensor) -> Tensor:
        return _FrozenProduct.apply(x, self)  # type: ignore[no-untyped-call, no-any-return]

    def onto(self, residual: Tensor, x: Tensor) -> Tensor:
        return residual + self(x)


class _FrozenProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, frozen: Frozen) -> Tensor:
        ctx.frozen = frozen
        return frozen.product(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        frozen: Frozen = ctx.frozen
        return frozen.back(grad), None


class Worn:
    """Which tokens of a pass wear which adapter; all of them the first until `wear` says otherwise."""

    def __init__(self, adapters: int) -> None:
        self._adapters = adapters
        # per adapter: None for every token, the places of some, or as bool [N, 1] those that do without it
        self.rows: list[Tensor | None] = [None] * adapters

    def wear(self, adapters: Sequence[int], lengths: Sequence[int], device: torch.device) -> None:
        """Row i of a pass, of ``lengths[i]`` tokens, wears ``adapters[i]``; padding may follow."""
        worn = adapters or [0] * len(lengths)
        if not self.differ(worn):
            self.rows = [None] * self._adapters
            return
        tokens = torch.repeat_interleave(torch.tensor(worn), torch.tensor(lengths))
        self.rows = [(tokens == one).nonzero().flatten().to(device) for one in range(self._adapters)]

    def differ(self, adapters: Sequence[int]) -> bool:
        """Whether it matters which of `adapters` a row wears: all wear the only one, or there is none."""
        return self._adapters > 1 or (self._adapters == 1 and any(adapters))

    def choose(self, adapters: Tensor | None) -> None:
        """Token i of a pass wears ``adapters[i]``, int64 ``[N]``; None: they do not `differ`.

        What is computed has the same shape whatever they wear: each adapter of every token.
        """
        self.rows = [
            None if adapters is None else (adapters != one).unsqueeze(1) for one in range(self._adapters)
        ]


@dataclass(frozen=True)
class Adapted:
    """A linear layer with LoRA adapters applied beside it, unmerged: ``base(x) + x @ a @ b``.

    `pairs` has one ``a`` ``[in, R]`` and scaled ``b`` ``[R, out]`` per adapter, None where it has nothing.
    """

    base: Linear
    pairs: Sequence[tuple[Tensor, Tensor] | None]
    worn: Worn

    def __call__(self, x: Tensor) -> Tensor:
        return self._beside(self.base(x), x)

    def onto(self, residual: Tensor, x: Tensor) -> Tensor:
        return self._beside(self.base.onto(residual, x), x)

    def _beside(self, y: Tensor, x: Tensor) -> Tensor:
        for pair, rows in zip(self.pairs, self.worn.rows, strict=True):
            if pair is None:
                continue
            a, b = pair
            if rows is None:
                y.addmm_(x @ a, b)
            elif rows.dtype == torch.bool:
                y.addmm_((x @ a).masked_fill_(rows, 0), b)
            elif len(rows):
                y.index_add_(0, rows, (x[rows] @ a) @ b)
        return y


@dataclass(frozen=True)
class FusedGate:
    """Gate and up as one product, then the elementwise part."""

    gate_up: Linear
    activation: Activation

    def __call__(self, x: Tensor) -> Tensor:
        return gated(self.gate_up(x), self.activation)


@dataclass(frozen=True)
class PackedGate:
    """Gate and up as two products that do the elementwise part themselves."""

    gate: Packed
    up: Packed
    activation: Activation

    def __call__(self, x: Tensor) -> Tensor:
        return self.up.times(self.gate.activated(x, self.activation), x)
