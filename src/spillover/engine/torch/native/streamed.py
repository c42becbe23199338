"""Layers whose matrices pass through memory: the kernels read them as the files hold them.

Norms, biases, routers and adapters are small and stay. A panel is packed when it is multiplied, into the same
values as if the whole matrix had been packed at once: streamed equals resident to the bit.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from spillover.engine.ring import Layer as Held
from spillover.engine.ring import RawTensor, Ring, forward
from spillover.engine.torch.native.layers import PRODUCTS, Beside, Placed, Rotations, norms, routing
from spillover.engine.torch.native.library import KINDS, Layer, Matrix, Parts, Routing
from spillover.engine.torch.native.packing import Packer, parts_of, whole
from spillover.engine.torch.weights import FUSED, Weights
from spillover.models.index import ExpertNames, expert_names, linears


class Streamed:
    """Every layer in turn, as `ring` brings it."""

    def __init__(
        self, weights: Weights, packer: Packer, beside: Beside, rotations: Rotations, ring: Ring
    ) -> None:
        config = weights.config
        self._ring = ring
        self._whole = True
        self._layers = [
            _Template(weights, number, packer, beside, rotations) for number in range(config.layers)
        ]
        self._routed = [
            _Routed.of(weights, number, packer) if config.sparse(number) else None
            for number in range(config.layers)
        ]

    def __iter__(self) -> Iterator[Placed]:
        if not self._whole:  # a pass was given up in the middle
            self._ring.follow(forward(len(self._layers)))
        self._whole = False
        for template, routed in zip(self._layers, self._routed, strict=True):
            with self._ring.layer() as held:
                experts = None if routed is None else _StreamedExperts(routed, held)
                yield Placed(template.filled(held.tensors), experts)
        self._whole = True


class _Template:
    """What of a layer stays, with room for the addresses of what does not."""

    def __init__(
        self, weights: Weights, number: int, packer: Packer, beside: Beside, rotations: Rotations
    ) -> None:
        config = weights.config
        own = weights.layer(number, matrices=False)
        modules = linears(config, number)
        self._layer = Layer(window=config.windows[number] or 0, sparse=config.sparse(number))
        self._names: dict[str, list[str]] = {}
        for name in PRODUCTS:
            group = [one for one in FUSED[name] if one in modules]
            if group:
                outputs = sum(modules[one][1] for one in group)
                self._names[name] = [f"{one}.weight" for one in group]
                setattr(self._layer, f"{name}_adapters", beside.product(number, name, outputs))
        heads = (config.heads + 2 * config.kv_heads) * config.head_dim
        self._bias = packer.bias(own.biases.get("qkv"), heads)
        for name, norm in norms(own).items():
            setattr(self._layer, name, packer.vector(norm))
        rotations.turn(self._layer, number)
        self._parts: dict[str, Parts] = {}

    def filled(self, held: Mapping[str, RawTensor]) -> Layer:
        """The layer with its matrices where `held` has them."""
        for name, tensors in self._names.items():
            matrix, self._parts[name] = product(name, [held[one] for one in tensors])
            if name == "qkv":
                matrix.bias = self._bias
            setattr(self._layer, name, matrix)
        return self._layer


def product(name: str, pieces: Sequence[RawTensor]) -> tuple[Matrix, Parts]:
    """A product over matrices in memory, and what it points to."""
    rows, columns = pieces[0].shape
    places = [(piece.data.ctypes.data, piece.shape[0]) for piece in pieces]
    apart = name == "gate_up"
    if apart and len(places) == 1:  # stored as one: its halves are two parts
        address = places[0][0]
        places = [(address, rows // 2), (address + len(pieces[0].data) // 2, rows // 2)]
    outputs = sum(whole(count) if apart else count for _, count in places)
    parts = parts_of(places, KINDS[pieces[0].dtype], apart)
    return Matrix(None, None, outputs, columns, ctypes.pointer(parts)), parts


@dataclass(frozen=True)
class _Routed:
    """What of a layer's experts stays."""

    routing: Routing
    router: Matrix
    inner: int
    names: ExpertNames

    @classmethod
    def of(cls, weights: Weights, number: int, packer: Packer) -> _Routed:
        config = weights.config
        assert config.experts is not None
        router = packer.matrix(weights.router(number))
        return cls(routing(config), router, config.experts.intermediate_size, expert_names(config))


class _StreamedExperts:
    """See `spillover.engine.torch.native.layers.Experts`: only those that are chosen are read."""

    def __init__(self, routed: _Routed, held: Held) -> None:
        self.routing, self.router, self.inner = routed.routing, routed.router, routed.inner
        self._names, self._held = routed.names, held

    def chosen(self, experts: Sequence[int]) -> Iterator[tuple[int, Matrix, Matrix]]:
        """Number, gate and up, and down of each of `experts`, good until the next is asked for."""
        names = self._names
        for expert, tensors in self._held.experts(experts):
            gate, up, down = (tensors[names.of(expert, part)] for part in (names.gate, names.up, names.down))
            gate_up, first = product("gate_up", [gate, up])
            back, second = product("down", [down])
            yield expert, gate_up, back
            del first, second  # until here the kernels may read them
