"""Tensors in a pool: described at once, read in part or whole, written again by copy."""

from __future__ import annotations

import importlib
import math
from typing import TYPE_CHECKING, Any

from spillover.errors import InputError
from spillover.pool.codecs import DType, dtype_named, dtype_numbered, encode, writable

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor as TorchTensor

    from spillover.pool.reader import Stored

__all__ = ["Tensor", "patched"]


class Tensor:
    """An immutable tensor in a pool. Its pack stays on disk while this object lives.

    Attributes:
        ref: its record.
        name: its id in the publication.
        shape: number of elements along each dimension.
        nbytes: size in bytes.
    """

    def __init__(self, stored: Stored, name: str, dtype: DType, shape: tuple[int, ...]) -> None:
        self.ref = stored.ref
        self.name = name
        self.shape = shape
        self._stored = stored
        self._dtype = dtype
        self.nbytes = math.prod(shape) * dtype.size

    @property
    def dtype(self) -> str:
        """The dtype's name in PyTorch, as in ``bfloat16``."""
        return self._dtype.name

    @property
    def numpy_dtype(self) -> str | None:
        """The dtype's name in NumPy; None where NumPy lacks it."""
        return self._dtype.numpy

    def __len__(self) -> int:
        if not self.shape:
            raise InputError(f"tensor {self.name!r} has no dimensions")
        return self.shape[0]

    def __repr__(self) -> str:
        return f"Tensor({self.name!r}, {self.dtype}, {list(self.shape)})"

    def __getitem__(self, rows: slice) -> np.ndarray[Any, Any]:
        """Rows along the first dimension, step 1, as `rows` returns them."""
        if not isinstance(rows, slice) or rows.step not in (None, 1):
            raise InputError("a tensor in a pool is sliced along its first dimension, with step 1")
        start, stop, _ = rows.indices(len(self))
        return self.rows(start, max(start, stop))

    def rows(self, start: int, stop: int, out: Any = None) -> np.ndarray[Any, Any]:
        """Rows ``start`` to ``stop`` as a NumPy array; only the chunks they touch are read.

        Args:
            out: a writable buffer of at least that size to read into.

        Raises:
            InputError: no such rows, or a dtype that NumPy lacks (then see `torch_rows`).
        """
        data = self._row_bytes(start, stop, out)
        return self._as_numpy(data, (stop - start, *self.shape[1:]))

    def torch_rows(self, start: int, stop: int) -> TorchTensor:
        """Rows ``start`` to ``stop`` as a PyTorch tensor on the CPU."""
        return self._as_torch(self._row_bytes(start, stop, None), (stop - start, *self.shape[1:]))

    def numpy(self, out: Any = None) -> np.ndarray[Any, Any]:
        """The whole tensor as a NumPy array, in ``out`` if that is given."""
        return self._as_numpy(self._all_bytes(out), self.shape)

    def torch(self, out: Any = None) -> TorchTensor:
        """The whole tensor as a PyTorch tensor on the CPU, in ``out`` if that is given."""
        return self._as_torch(self._all_bytes(out), self.shape)

    def read_into(self, buffer: Any) -> int:
        """Read the elements, row-major and little-endian, into ``buffer``; returns their bytes."""
        self._all_bytes(buffer)
        return self.nbytes

    def _all_bytes(self, out: Any) -> np.ndarray[Any, Any]:
        view = _bytes(out, self.nbytes)
        self._stored.read(0, view.data)
        return view

    def _row_bytes(self, start: int, stop: int, out: Any) -> np.ndarray[Any, Any]:
        if not 0 <= start <= stop <= len(self):
            raise InputError(f"tensor {self.name!r} has {len(self)} rows, no rows {start} to {stop}")
        row = self.nbytes // max(1, len(self))
        view = _bytes(out, (stop - start) * row)
        self._stored.read(start * row, view.data)
        return view

    def _as_numpy(self, data: np.ndarray[Any, Any], shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
        found: np.ndarray[Any, Any] = data.view(self._dtype.numpy or _extended(self.dtype)).reshape(shape)
        return found

    def _as_torch(self, data: np.ndarray[Any, Any], shape: tuple[int, ...]) -> TorchTensor:
        import torch

        dtype = getattr(torch, self.dtype)
        if not data.size:  # has no stride that PyTorch could view
            return torch.empty(shape, dtype=dtype)
        found: TorchTensor = torch.from_numpy(data).view(dtype).reshape(shape)
        return found


def patched(tensor: Tensor, start: int, rows: Any) -> Any:
    """A copy of ``tensor`` in memory with rows from ``start`` on replaced.

    Raises:
        InputError: they do not fit it.
    """
    given = encode(rows)
    count = given.shape[0] if given.shape else 0
    fits = dtype_numbered(given.dtype) == dtype_named(tensor.dtype) and given.shape[1:] == tensor.shape[1:]
    if not fits or not 0 <= start <= start + count <= len(tensor):
        raise InputError(f"{count} rows from {start} on do not fit {tensor!r}")
    whole = tensor.torch() if tensor.numpy_dtype is None else tensor.numpy()
    flat = writable(whole, tensor.nbytes)
    row = tensor.nbytes // max(1, len(tensor))
    flat[start * row : (start + count) * row] = given.data
    return whole


def _bytes(out: Any, size: int) -> np.ndarray[Any, Any]:
    """``size`` bytes of memory: new, or the front of ``out``."""
    import numpy as np

    return np.empty(size, np.uint8) if out is None else np.asarray(writable(out, size))


def _extended(name: str) -> Any:
    """A dtype that NumPy has only with ``ml_dtypes``."""
    try:
        found = getattr(importlib.import_module("ml_dtypes"), name, None)
    except ImportError:
        found = None
    if found is None:
        raise InputError(f"NumPy has no {name}", hint="read it with .torch(), or pip install ml_dtypes")
    return found
