"""Tensors from bytes, and the rows of a matrix that stays in its file."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spillover.errors import ModelError

if TYPE_CHECKING:
    from spillover.models import TensorSlice

_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


def typed(data: Tensor, name: str, dtype: str, shape: Sequence[int]) -> Tensor:
    """The bytes of a tensor as what they are."""
    if dtype not in _DTYPES:
        raise ModelError(f"tensor {name} has dtype {dtype}; bf16, f16 and f32 can be loaded")
    if data.data_ptr() % 4:
        data = data.clone()  # a view needs elements at multiples of their size
    return data.view(_DTYPES[dtype]).view(*shape)


class Rows:
    """Rows of a matrix, read from its file as they are asked for: the page cache keeps what is used.

    A mapped file would count as the process's memory. `ModelError` for a file that cannot be opened or read.
    """

    def __init__(self, part: TensorSlice, name: str) -> None:
        self._part, self._name = part, name
        try:
            self._file = os.open(part.file, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise self._failed(error) from None
        weakref.finalize(self, os.close, self._file)

    def __call__(self, numbers: NDArray[np.int64]) -> Tensor:
        """Rows `numbers`, ``[N]``, in the file's dtype: ``[N, width]``."""
        part, (rows, width) = self._part, self._part.shape
        size = (part.stop - part.start) // rows
        distinct, places = np.unique(numbers, return_inverse=True)
        read = np.empty((len(distinct), size), np.uint8)
        try:
            for row, number in zip(read, distinct.tolist(), strict=True):
                if os.preadv(self._file, [row.data], part.start + number * size) != size:
                    raise ModelError(
                        f"{part.file} ends inside tensor {self._name}", hint="get the model again"
                    )
        except OSError as error:
            raise self._failed(error) from None
        return typed(torch.from_numpy(read.reshape(-1)), self._name, part.dtype, (len(read), width))[
            torch.from_numpy(places)
        ]

    def _failed(self, error: OSError) -> ModelError:
        return ModelError(f"{self._part.file} cannot be read for tensor {self._name}: {error.strerror}")
