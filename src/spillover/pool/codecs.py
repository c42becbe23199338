"""Values as bytes and back: raw bytes, JSON, and tensors of every dtype that models use.

Tensors are row-major and little-endian. Neither NumPy nor PyTorch is imported unless a value of theirs
is passed or asked for, and stored bytes are never unpickled.
"""

from __future__ import annotations

import contextlib
import json
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from spillover.errors import InputError

if TYPE_CHECKING:
    import numpy as np
    import torch

__all__ = ["BYTES", "JSON", "TENSOR", "DType", "dtype_named", "dtype_numbered", "encode", "writable"]

BYTES, JSON, TENSOR = 1, 2, 3
"""Codec numbers of the format."""


class DType(NamedTuple):
    """A dtype of the format.

    Attributes:
        number: its number in an index entry.
        name: its name in PyTorch.
        size: bytes an element.
        numpy: its name in NumPy; None where only PyTorch and ``ml_dtypes`` have it.
    """

    number: int
    name: str
    size: int
    numpy: str | None


_DTYPES = [
    DType(1, "uint8", 1, "uint8"),
    DType(2, "int8", 1, "int8"),
    DType(3, "uint16", 2, "uint16"),
    DType(4, "int16", 2, "int16"),
    DType(5, "uint32", 4, "uint32"),
    DType(6, "int32", 4, "int32"),
    DType(7, "uint64", 8, "uint64"),
    DType(8, "int64", 8, "int64"),
    DType(9, "float16", 2, "float16"),
    DType(10, "bfloat16", 2, None),
    DType(11, "float32", 4, "float32"),
    DType(12, "float64", 8, "float64"),
    DType(13, "bool", 1, "bool"),
    DType(14, "complex64", 8, "complex64"),
    DType(15, "complex128", 16, "complex128"),
    DType(16, "float8_e4m3fn", 1, None),
    DType(17, "float8_e5m2", 1, None),
    DType(18, "float8_e4m3fnuz", 1, None),
    DType(19, "float8_e5m2fnuz", 1, None),
    DType(20, "float8_e8m0fnu", 1, None),
    DType(21, "complex32", 4, None),
]
_BY_NUMBER = {dtype.number: dtype for dtype in _DTYPES}
_BY_NAME = {dtype.name: dtype for dtype in _DTYPES}


class Encoded(NamedTuple):
    """A value as bytes.

    Attributes:
        codec: `BYTES`, `JSON` or `TENSOR`.
        dtype: number of the dtype; 0 for what is no tensor.
        shape: of the tensor.
        data: the payload, one-dimensional and contiguous; may share memory with the value.
    """

    codec: int
    dtype: int
    shape: tuple[int, ...]
    data: bytes | memoryview


def dtype_numbered(number: int) -> DType | None:
    """The dtype with this number in the format, if there is one."""
    return _BY_NUMBER.get(number)


def dtype_named(name: str) -> DType:
    """The dtype called ``name``.

    Raises:
        InputError: the format has no such dtype.
    """
    if (dtype := _BY_NAME.get(name)) is None:
        raise InputError(f"the pool has no dtype {name}", hint=f"one of {', '.join(sorted(_BY_NAME))}")
    return dtype


def encode(value: Any) -> Encoded:
    """Turn a value into bytes, without a copy where its memory already has the right layout.

    Raises:
        InputError: a type or dtype that the pool does not store.
    """
    if isinstance(value, bytes):
        return Encoded(BYTES, 0, (), value)
    if isinstance(value, (bytearray, memoryview)):
        return Encoded(BYTES, 0, (), _flat(value))
    if _is_torch(value):
        return _encode_torch(sys.modules["torch"], value)
    if _is_numpy(value, "ndarray") or _is_numpy(value, "generic"):
        return _encode_numpy(sys.modules["numpy"], value)
    return Encoded(JSON, 0, (), encode_json(value))


def writable(buffer: Any, size: int) -> memoryview:
    """The first ``size`` bytes of a caller's buffer: of anything with the buffer protocol, or a CPU tensor.

    Raises:
        InputError: it is smaller, not contiguous, cannot be written, or is no buffer.
    """
    try:
        if _is_torch(buffer):
            view = _torch_bytes(sys.modules["torch"], buffer)
        elif _is_numpy(buffer, "ndarray"):  # dtypes of ml_dtypes have no buffer protocol
            view = memoryview(buffer.view("uint8") if buffer.ndim else buffer.reshape(1).view("uint8"))
        else:
            view = memoryview(buffer)
        if not view.c_contiguous or view.readonly:
            raise InputError("the buffer is not contiguous, or it cannot be written")
        flat = view.cast("B") if view.nbytes else memoryview(bytearray())
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"a {type(buffer).__name__} is no buffer to read into: {error}") from None
    if len(flat) < size:
        raise InputError(f"{size} bytes do not fit a buffer of {len(flat)} bytes")
    return flat[:size]


def _torch_bytes(torch: Any, tensor: torch.Tensor) -> memoryview:
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        raise InputError("the tensor to read into is not contiguous", hint="read into a new one and copy it")
    if tensor.device.type != "cpu":
        raise InputError(
            f"a tensor on {tensor.device} cannot be read into", hint="read into a pinned one on the CPU"
        )
    found: memoryview = tensor.detach().reshape(-1).view(torch.uint8).numpy().data
    return found


def _is_torch(value: Any) -> bool:
    """Whether this is a PyTorch tensor. Another thread may be importing PyTorch at this moment."""
    return isinstance(value, getattr(sys.modules.get("torch"), "Tensor", ()))


def _is_numpy(value: Any, kind: str) -> bool:
    return isinstance(value, getattr(sys.modules.get("numpy"), kind, ()))


def decode_json(data: bytes | bytearray) -> Any:
    """The value of JSON text."""
    return json.loads(data)


def encode_json(value: Any) -> bytes:
    """Compact JSON text; refuses what JSON has not, NaN included."""
    try:
        text = json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
        return text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"a {type(value).__name__} cannot be stored as JSON: {error}") from None


def _flat(value: bytearray | memoryview) -> memoryview:
    view = memoryview(value)
    if view.nbytes and view.c_contiguous:
        with contextlib.suppress(ValueError):  # of a format that memoryview cannot cast
            return view.cast("B")
    return memoryview(view.tobytes())


def _encode_numpy(numpy: Any, value: Any) -> Encoded:
    array: np.ndarray[Any, Any] = numpy.asarray(value)
    dtype = _BY_NAME.get(array.dtype.name)
    if dtype is None or array.dtype.fields or isinstance(value, numpy.ma.MaskedArray):
        raise InputError(
            f"an array of dtype {array.dtype} cannot be stored", hint="convert it to numbers first"
        )
    if not array.flags.c_contiguous or array.dtype.byteorder == ">":
        array = array.astype(array.dtype.newbyteorder("<"), order="C")
    return Encoded(TENSOR, dtype.number, array.shape, array.reshape(-1).view(numpy.uint8).data)


def _encode_torch(torch: Any, value: torch.Tensor) -> Encoded:
    name = str(value.dtype).removeprefix("torch.")
    dtype = _BY_NAME.get(name)
    dense = value.layout == torch.strided and not value.is_nested and value.device.type != "meta"
    if dtype is None or not dense or value.is_quantized:
        raise InputError(
            f"a {name} tensor of layout {value.layout} on {value.device} cannot be stored",
            hint="make it dense first",
        )
    plain = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return Encoded(TENSOR, dtype.number, tuple(value.shape), plain.reshape(-1).view(torch.uint8).numpy().data)
