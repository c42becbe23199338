"""Where a pass gets its layers from: all of them packed in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from spillover.engine.torch.lora import adapter_matrices, fuse, present
from spillover.engine.torch.native.library import AdapterPair, Layer, Matrix, Routing
from spillover.engine.torch.native.packing import Packer
from spillover.engine.torch.rotary import tables
from spillover.engine.torch.weights import ExpertWeights, LayerWeights, Weights

if TYPE_CHECKING:
    from spillover.models import Adapter, ModelConfig
    from spillover.models.lora import LoraConfig

PRODUCTS = ("qkv", "out", "gate_up", "down")


class Experts(Protocol):
    """The feed-forward experts of one layer."""

    routing: Routing
    router: Matrix
    inner: int

    def chosen(self, experts: Sequence[int]) -> Iterator[tuple[int, Matrix, Matrix]]:
        """Number, gate and up, and down of each of `experts`, good until the next is asked for."""
        ...


@dataclass(frozen=True)
class Placed:
    """A layer ready for the kernels; `experts` follow it where it is sparse."""

    layer: Layer
    experts: Experts | None


class Layers(Protocol):
    """All layers of a model, once per pass."""

    def __iter__(self) -> Iterator[Placed]:
        """From the first to the last; a layer is good until the next is asked for."""
        ...


class Beside:
    """What adapters put beside the products of a model."""

    def __init__(self, weights: Weights, packer: Packer, adapters: Sequence[Adapter]) -> None:
        self._config = weights.config
        self._dtype = weights.dtype
        self._packer = packer
        self._adapters = [(one.config, _tensors(one)) for one in adapters]
        self.count = len(adapters)
        self.widest = 1  # columns of the widest x A

    def product(self, layer: int, name: str, outputs: int) -> int | None:
        """The address of a pair per adapter; None when none has anything there."""
        pairs = [self._pair(layer, name, outputs, *one) for one in self._adapters]
        return self._packer.pairs(pairs) if any(pair.a.data for pair in pairs) else None

    def _pair(
        self, layer: int, name: str, outputs: int, lora: LoraConfig, tensors: dict[str, Tensor]
    ) -> AdapterPair:
        pair = AdapterPair()
        columns = present(self._config, layer, name, lora, tensors)
        if columns:
            matrices = adapter_matrices(tensors, layer, columns)
            a, b = fuse(*matrices, columns, outputs, lora.scale, self._dtype)
            pair.a = self._packer.matrix(a.t())
            pair.b = self._packer.matrix(*halves(name, b.t()))
            self.widest = max(self.widest, a.shape[1])
        return pair


class Rotations:
    """The rotation tables of each layer for sequences of up to `length` tokens."""

    def __init__(self, config: ModelConfig, packer: Packer, length: int) -> None:
        made: dict[int, tuple[int | None, int | None]] = {}
        self._of = [
            made.setdefault(id(pair[0]), (packer.vector(pair[0]), packer.vector(pair[1])))
            for pair in tables(config, length)
        ]

    def turn(self, layer: Layer, number: int) -> None:
        """Give `layer` its tables."""
        layer.cos, layer.sin = self._of[number]


class Resident:
    """Every layer packed."""

    def __init__(self, weights: Weights, packer: Packer, beside: Beside, rotations: Rotations) -> None:
        self._layers = [
            _placed(weights, number, packer, beside, rotations) for number in range(weights.config.layers)
        ]

    def __iter__(self) -> Iterator[Placed]:
        return iter(self._layers)


def _placed(weights: Weights, number: int, packer: Packer, beside: Beside, rotations: Rotations) -> Placed:
    own, config = weights.layer(number), weights.config
    layer = Layer(window=config.windows[number] or 0, sparse=config.sparse(number))
    for name in PRODUCTS:
        if name in own.matrices:
            matrix = own.matrices.pop(name)
            setattr(layer, name, packer.matrix(*halves(name, matrix), bias=own.biases.get(name)))
            setattr(layer, f"{name}_adapters", beside.product(number, name, len(matrix)))
    for name, norm in norms(own).items():
        setattr(layer, name, packer.vector(norm))
    rotations.turn(layer, number)
    return Placed(layer, None if own.experts is None else _ResidentExperts(own.experts, config, packer))


class _ResidentExperts:
    """See `Experts`."""

    def __init__(self, own: ExpertWeights, config: ModelConfig, packer: Packer) -> None:
        assert config.experts is not None
        self.routing = routing(config)
        self.router = packer.matrix(own.router)
        self.inner = config.experts.intermediate_size
        gate_up = [packer.matrix(*halves("gate_up", own.gate_up.pop(0))) for _ in range(config.experts.count)]
        self._matrices = [(one, packer.matrix(own.down.pop(0))) for one in gate_up]

    def chosen(self, experts: Sequence[int]) -> Iterator[tuple[int, Matrix, Matrix]]:
        for number in experts:
            yield (number, *self._matrices[number])


def routing(config: ModelConfig) -> Routing:
    """How tokens are routed."""
    assert config.experts is not None
    return Routing(config.experts.count, config.experts.per_token, config.experts.normalized)


def halves(name: str, matrix: Tensor) -> tuple[Tensor, ...]:
    """The parts of a product that each begin a panel of their own."""
    return tuple(matrix.chunk(2)) if name == "gate_up" else (matrix,)


def norms(own: LayerWeights) -> dict[str, Tensor | None]:
    """A layer's norms by the kernels' names."""
    return {
        "input_norm": own.input_norm,
        "q_norm": own.q_norm,
        "k_norm": own.k_norm,
        "post_attention_norm": own.attention_output_norm,
        "feed_norm": own.post_norm,
        "post_feed_norm": own.feedforward_output_norm,
    }


def _tensors(adapter: Adapter) -> dict[str, Tensor]:
    return {key: torch.from_numpy(value) for key, value in adapter.tensors.items()}
