"""Values as bytes and back: raw bytes, JSON, and tensors of every dtype that models use.

Tensors are row-major and little-endian. Neither NumPy nor PyTorch is imported unless a value of theirs
is passed or asked for, and stored bytes are never unpickled.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from spillover.errors import InputError

if TYPE_CHECKING:
    import numpy as np
    import torch

__all__ = ["BYTES", "JSON", "TENSOR", "DType", "dtype_named", "dtype_numbered", "encode"]

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
    if (torch := sys.modules.get("torch")) is not None and isinstance(value, torch.Tensor):
        return _encode_torch(torch, value)
    if (numpy := sys.modules.get("numpy")) is not None and isinstance(value, (numpy.ndarray, numpy.generic)):
        return _encode_numpy(numpy, value)
    return Encoded(JSON, 0, (), encode_json(value))


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
    return view.cast("B") if view.c_contiguous else memoryview(view.tobytes())


def _encode_numpy(numpy: Any, value: Any) -> Encoded:
    array: np.ndarray[Any, Any] = numpy.asarray(value)
    dtype = _BY_NAME.get(array.dtype.name)
    if dtype is None or array.dtype.fields:
        raise InputError(
            f"an array of dtype {array.dtype} cannot be stored", hint="convert it to numbers first"
        )
    if not array.flags.c_contiguous or array.dtype.byteorder == ">":
        array = array.astype(array.dtype.newbyteorder("<"), order="C")
    return Encoded(TENSOR, dtype.number, array.shape, array.reshape(-1).view(numpy.uint8).data)


def _encode_torch(torch: Any, value: torch.Tensor) -> Encoded:
    name = str(value.dtype).removeprefix("torch.")
    dtype = _BY_NAME.get(name)
    if dtype is None or value.layout != torch.strided or value.is_quantized:
        raise InputError(
            f"a {name} tensor of layout {value.layout} cannot be stored", hint="make it dense first"
        )
    plain = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return Encoded(TENSOR, dtype.number, tuple(value.shape), plain.reshape(-1).view(torch.uint8).numpy().data)
