"""Which bytes of a model folder belong to which layer, and where they lie in a buffer that was read at once.

Direct reads begin and end at multiples of `BLOCK` in the file and in memory. A part's extents are therefore
widened to such multiples; tensors keep their true place, and their address in an aligned buffer is theirs in
the file modulo `BLOCK`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from spillover.errors import ModelError
from spillover.models import ModelConfig, TensorSlice, WeightIndex
from spillover.models.index import expert_names, layer_tensors

BLOCK = 4096
GAP = 128 << 10  # reading this much for nothing costs less than one more request


@dataclass(frozen=True)
class RawTensor:
    """One tensor in memory: the bytes as they are in the file, row-major.

    ``dtype`` is spelled as in safetensors (``BF16``); ``data`` is a uint8 view of the buffer, ``[bytes]``,
    writable for libraries that insist, but not to be written to. Its address is aligned as the tensor's place
    in the file is: to the element's size in files that keep the format's rules, rarely to more.
    """

    dtype: str
    shape: tuple[int, ...]
    data: NDArray[np.uint8]


@dataclass(frozen=True)
class Extent:
    """Bytes ``[start, stop)`` of `file`, of which ``[start, needed)`` must exist, go to `offset`."""

    file: Path
    start: int
    stop: int
    needed: int
    offset: int


@dataclass(frozen=True)
class Part:
    """What is read together: a layer, or one of its experts. `size` bytes of a buffer hold it.

    `tensors` names, below ``<prefix>layers.<k>.``, where each tensor begins in the buffer.
    """

    layer: int
    expert: int | None
    extents: tuple[Extent, ...]
    tensors: Mapping[str, tuple[int, TensorSlice]]
    size: int

    @property
    def name(self) -> str:
        """``layer 3`` or ``layer 3, expert 7``."""
        return f"layer {self.layer}" + ("" if self.expert is None else f", expert {self.expert}")

    def views(self, buffer: NDArray[np.uint8]) -> dict[str, RawTensor]:
        """The tensors in a buffer that holds this part, without a copy."""
        return {
            name: RawTensor(one.dtype, one.shape, buffer[at : at + one.stop - one.start])
            for name, (at, one) in self.tensors.items()
        }


class LayerIndex:
    """The parts of every layer of a model; nothing is read.

    A layer with experts is divided: ``layers[k]`` is what every token goes through (attention, norms,
    router), ``experts[k][e]`` one expert. ``experts[k]`` is empty for a dense layer. Raises `ModelError` for
    a tensor that the model lacks.
    """

    def __init__(self, index: WeightIndex, config: ModelConfig) -> None:
        self.files = tuple(index.files)
        self.tensors = index.tensors
        layers, experts = [], []
        for number in range(config.layers):
            names = set(layer_tensors(config, number))
            owned = _experts(config, number)
            layers.append(self._part(config.prefix, number, None, names.difference(*owned)))
            experts.append(tuple(self._part(config.prefix, number, e, own) for e, own in enumerate(owned)))
        self.layers: tuple[Part, ...] = tuple(layers)
        self.experts: tuple[tuple[Part, ...], ...] = tuple(experts)

    @cached_property
    def expert_size(self) -> int:
        """Bytes of the largest expert, 0 without any."""
        return max((part.size for parts in self.experts for part in parts), default=0)

    def bytes(self, layer: int) -> int:
        """Bytes of a layer in memory, all its experts included."""
        return self.layers[layer].size + sum(part.size for part in self.experts[layer])

    def _part(self, prefix: str, layer: int, expert: int | None, names: Iterable[str]) -> Part:
        found: dict[str, TensorSlice] = {}
        for name in names:
            full = f"{prefix}layers.{layer}.{name}"
            if full not in self.tensors:
                raise ModelError(f"the model has no tensor {full}")
            found[name] = self.tensors[full]
        extents = _coalesce(found.values())
        places: dict[str, tuple[int, TensorSlice]] = {}
        for name, one in sorted(found.items(), key=lambda item: (item[1].file, item[1].start)):
            holder = next(
                e for e in extents if e.file == one.file and e.start <= one.start and one.stop <= e.needed
            )
            places[name] = holder.offset + one.start - holder.start, one
        last = extents[-1]
        return Part(layer, expert, extents, places, last.offset + last.stop - last.start)


def _experts(config: ModelConfig, layer: int) -> list[set[str]]:
    """The names of each expert's tensors."""
    if config.experts is None or not config.sparse(layer):
        return []
    names = expert_names(config)
    modules = (names.gate, names.up, names.down)
    return [{names.of(one, module) for module in modules} for one in range(config.experts.count)]


def _coalesce(slices: Iterable[TensorSlice]) -> tuple[Extent, ...]:
    """Few extents that cover `slices`: neighbours and those behind a small gap are read at once."""
    merged: list[tuple[Path, int, int]] = []
    for one in sorted(slices, key=lambda one: (one.file, one.start)):
        start = one.start // BLOCK * BLOCK
        if merged and merged[-1][0] == one.file and start <= merged[-1][2] + GAP:
            file, first, needed = merged.pop()
            merged.append((file, first, max(needed, one.stop)))
        else:
            merged.append((one.file, start, one.stop))
    extents, offset = [], 0
    for file, start, needed in merged:
        stop = -(-needed // BLOCK) * BLOCK
        extents.append(Extent(file, start, stop, needed, offset))
        offset += stop - start
    return tuple(extents)
