"""Matrices laid out for the kernels, and the memory that the kernels' structures point into."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import CDLL

import torch
from torch import Tensor

from spillover.engine.torch.native.library import KINDS, PANEL, AdapterPair, Matrix, Parts

_KINDS = {torch.bfloat16: KINDS["BF16"], torch.float32: KINDS["F32"], torch.float16: KINDS["F16"]}


def whole(outputs: int) -> int:
    """`outputs` rounded up to whole panels."""
    return -(-outputs // PANEL) * PANEL


def parts_of(pieces: Sequence[tuple[int, int]], kind: int, apart: bool) -> Parts:
    """The matrices at (address, rows), below one another."""
    parts = Parts(count=len(pieces), kind=kind, apart=apart)
    for place, (address, rows) in enumerate(pieces):
        parts.data[place], parts.rows[place] = address, rows
    return parts


class Packer:
    """Lays matrices out for the kernels and keeps them alive."""

    def __init__(self, native: CDLL, dtype: torch.dtype, workspace: int) -> None:
        self.wide = int(dtype == torch.float32)
        self._native = native
        self._dtype = dtype
        self._workspace = workspace
        self._kept: list[object] = []

    def matrix(self, *parts: Tensor, bias: Tensor | None = None) -> Matrix:
        """`parts`, ``[n, k]`` each, below one another; of several, each begins a panel of its own."""
        sources = [part.contiguous() for part in parts]
        apart, columns = len(parts) > 1, sources[0].shape[1]
        outputs = sum(whole(len(part)) for part in parts) if apart else len(parts[0])
        width = columns if self.wide else columns + columns % 2
        packed = torch.empty(whole(outputs) * width, dtype=self._dtype)
        source = parts_of([(part.data_ptr(), len(part)) for part in sources], _KINDS[sources[0].dtype], apart)
        self._native.spill_pack(*(self.wide, source, outputs, columns, packed.data_ptr(), self._workspace))
        self._kept.append(packed)
        return Matrix(packed.data_ptr(), self.bias(bias, outputs), outputs, columns)

    def bias(self, values: Tensor | None, outputs: int) -> int | None:
        """The address of a bias in float32, padded to whole panels; None for None."""
        if values is None:
            return None
        return self.vector(torch.nn.functional.pad(values.float(), (0, whole(outputs) - len(values))))

    def vector(self, values: Tensor | None) -> int | None:
        """The address of `values` in float32; None for None."""
        if values is None:
            return None
        kept = values.float().contiguous()
        self._kept.append(kept)
        return kept.data_ptr()

    def pairs(self, pairs: Sequence[AdapterPair]) -> int:
        """The address of an array of `pairs`."""
        array = (AdapterPair * len(pairs))(*pairs)
        self._kept.append(array)
        return ctypes.addressof(array)
