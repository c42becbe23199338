"""The layers of a model for torch: all built at the start, or one by one as a ring brings them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from spillover.engine.ring import Ring, forward, forward_backward
from spillover.engine.torch.experts import Mixture
from spillover.engine.torch.linear import Gate, Linear
from spillover.engine.torch.staging import Staging
from spillover.engine.torch.weights import LayerWeights, Weights
from spillover.errors import EngineError

if TYPE_CHECKING:
    from spillover.models import ModelConfig


class Linears(Protocol):
    """Makes a model's linear layers; `name` is a key of `FUSED`, or ``head`` with layer -1."""

    def linear(self, layer: int, name: str, weight: Tensor, bias: Tensor | None) -> Linear:
        """The layer that multiplies by `weight`, ``[out, in]``."""
        ...

    def gate(self, layer: int, weight: Tensor) -> Gate:
        """The gated unit of ``gate_up``, whose `weight` is ``[2 I, H]``, gate first."""
        ...


class FeedForward(Protocol):
    """What follows attention in a layer, ``[N, H]`` to ``[N, H]``."""

    def __call__(self, x: Tensor) -> Tensor: ...

    def onto(self, residual: Tensor, x: Tensor) -> Tensor:
        """``residual + self(x)``."""
        ...


@dataclass(frozen=True)
class Dense:
    """A gated unit and the product that brings it back to the residual's width."""

    gate: Gate
    down: Linear

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.gate(x))

    def onto(self, residual: Tensor, x: Tensor) -> Tensor:
        return self.down.onto(residual, self.gate(x))


@dataclass(frozen=True)
class Layer:
    """One transformer layer: its norms and its products."""

    norms: LayerWeights
    qkv: Linear
    out: Linear
    feedforward: FeedForward


class Layers(Protocol):
    """A model's layers, which a pass asks for in order, and its backward in the opposite one."""

    def begin(self, *, backward: bool) -> None:
        """A pass from the first layer begins; `backward` says whether it comes back."""
        ...

    def __getitem__(self, number: int) -> Layer: ...


class Resident:
    """All of them built."""

    def __init__(self, weights: Weights, linears: Linears) -> None:
        self._layers = [
            built(number, weights.layer(number), linears, weights.config)
            for number in range(weights.config.layers)
        ]

    def begin(self, *, backward: bool) -> None:
        """Nothing depends on it."""

    def __getitem__(self, number: int) -> Layer:
        return self._layers[number]


class Streamed:
    """Each is built when its turn comes, in memory that they share: only one is used at a time.

    A copy costs a tenth of what the products of a usual pass do; memory that is taken anew for each layer
    would cost as much as they.
    """

    def __init__(self, weights: Weights, linears: Linears, ring: Ring, staged: Staging) -> None:
        self._weights, self._linears, self._ring, self._staged = weights, linears, ring, staged
        self._backward = False
        self._expected: Iterator[int] = forward(weights.config.layers)
        self._left = 0  # layers that the pass under way has not asked for

    def begin(self, *, backward: bool) -> None:
        """Let the ring follow the order of this pass, if it does not do so already."""
        count = self._weights.config.layers
        if self._left or backward != self._backward:  # the pass before was given up, or of another kind
            order = forward_backward if backward else forward
            self._ring.follow(order(count))
            self._expected, self._backward = order(count), backward
        self._left = 2 * count if backward else count

    def __getitem__(self, number: int) -> Layer:
        held = self._ring.layer()
        if not next(self._expected) == number == held.number:
            held.release()
            raise EngineError(f"layer {number} was asked for out of order")
        weights = self._staged.put(held, self._weights.streamed)
        self._left -= 1  # not before: whatever is given up here, the next pass begins anew
        return built(number, weights, self._linears, self._weights.config)


def built(number: int, weights: LayerWeights, linears: Linears, config: ModelConfig) -> Layer:
    """A layer with the products that `linears` makes of its weights."""
    # popped: a packed layer holds a copy of its own
    qkv, out = (
        linears.linear(number, name, weights.matrices.pop(name), weights.biases[name])
        for name in ("qkv", "out")
    )
    return Layer(weights, qkv, out, _feedforward(number, weights, linears, config))


def _feedforward(number: int, weights: LayerWeights, linears: Linears, config: ModelConfig) -> FeedForward:
    if weights.experts is None or config.experts is None:
        gate = linears.gate(number, weights.matrices.pop("gate_up"))
        return Dense(gate, linears.linear(number, "down", weights.matrices.pop("down"), None))
    own = weights.experts
    count = config.experts.count
    gates = [linears.gate(number, own.gate_up.pop(0)) for _ in range(count)]
    downs = [linears.linear(number, "down", own.down.pop(0), None) for _ in range(count)]
    return Mixture(own.router, gates, downs, config.experts)
