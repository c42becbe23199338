"""The weights of a model with an adapter merged in, in float32, a block of rows at a time.

A linear layer's merged weight is ``W + scale (A B)^T`` (Hu et al. 2021, https://arxiv.org/abs/2106.09685),
computed in float32 and rounded once, by whoever writes it. No tensor is ever whole in memory: blocks have at
most `BLOCK` bytes of float32, so that memory does not grow with the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from spillover.errors import ModelError
from spillover.export.rounding import STORED, floats
from spillover.models import WeightIndex

if TYPE_CHECKING:
    from spillover.export.rounding import Floats
    from spillover.models import Adapter, Model, TensorSlice

__all__ = ["BLOCK", "Merged"]

BLOCK = 32 << 20


@dataclass(frozen=True)
class Merged:
    """The tensors of `model`, those that `adapter` changes with its product added."""

    model: Model
    adapter: Adapter | None
    index: WeightIndex = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "index", self.model.index())
        for name, part in self.index.tensors.items():
            if part.dtype not in STORED and self.needs(name):
                raise ModelError(
                    f"tensor {name} in {part.file} is of kind {part.dtype}, which cannot be exported",
                    hint="use the model's bf16, f16 or float32 release",
                )

    @cached_property
    def changed(self) -> dict[str, str]:
        """The full names of tensors that the adapter changes, and its name for each."""
        if self.adapter is None:
            return {}
        stems = {key.removesuffix(".lora_a").removesuffix(".lora_b") for key in self.adapter.tensors}
        return {f"{self.model.config.prefix}{stem}.weight": stem for stem in sorted(stems)}

    def needs(self, name: str) -> bool:
        """Whether the decoder has this tensor; others are copied as they are."""
        config = self.model.config
        return name.startswith(config.prefix) or name.endswith("lm_head.weight")

    def blocks(self, name: str, *, rows: int | None = None) -> Iterator[Floats]:
        """The tensor `name` as blocks of whole rows, ``[rows, ...]``; vectors come as one block.

        Each block but the last has a multiple of `rows` rows, where a writer needs some together.
        """
        part = self.index.tensors[name]
        step = len(range(part.shape[0])) if len(part.shape) < 2 else _rows_of(part, rows or 1)
        for first in range(0, part.shape[0], max(1, step)):
            last = min(first + step, part.shape[0])
            yield self._block(name, part, first, last)

    def raw(self, name: str) -> Iterator[bytes]:
        """The bytes of a tensor as they are stored, for one that does not change."""
        part = self.index.tensors[name]
        with part.file.open("rb") as file:
            file.seek(part.start)
            left = part.stop - part.start
            while left:
                piece = file.read(min(left, BLOCK))
                if not piece:
                    raise ModelError(f"{part.file} is shorter than it was", hint="get the model again")
                left -= len(piece)
                yield piece

    def _block(self, name: str, part: TensorSlice, first: int, last: int) -> Floats:
        row = (part.stop - part.start) // part.shape[0]
        with part.file.open("rb") as file:
            file.seek(part.start + first * row)
            data = file.read((last - first) * row)
        if len(data) < (last - first) * row:
            raise ModelError(f"{part.file} is shorter than it was", hint="get the model again")
        values = floats(data, part.dtype).reshape(last - first, *part.shape[1:])
        stem = self.changed.get(name)
        return values if stem is None else values + self._product(stem, first, last)

    def _product(self, stem: str, first: int, last: int) -> Floats:
        """Rows of ``scale (A B)^T``."""
        import numpy as np

        assert self.adapter is not None
        a, b = (self.adapter.tensors[f"{stem}.lora_{side}"] for side in "ab")  # [in, r], [r, out]
        product: Floats = np.float32(self.adapter.config.scale) * (b[:, first:last].T @ a.T)
        return product


def _rows_of(part: TensorSlice, multiple: int) -> int:
    """Rows of a block: as many as `BLOCK` takes in float32, in multiples of `multiple`."""
    width = 4
    for size in part.shape[1:]:
        width *= size
    return max(1, BLOCK // max(1, width) // multiple) * multiple
