"""float32 to the numbers that files store, each rounded once, to nearest even."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import numpy as np

    Floats: TypeAlias = np.ndarray[Any, np.dtype[np.float32]]
    Array: TypeAlias = np.ndarray[Any, Any]

__all__ = ["STORED", "floats", "rounded"]

STORED = {"F32": 4, "F16": 2, "BF16": 2}
"""Bytes of a number, by the names that safetensors has for the kinds that are written."""


def floats(data: bytes | memoryview, kind: str) -> Floats:
    """The numbers of `data`, which is of a kind of `STORED`, in float32, which holds each of them exactly."""
    import numpy as np

    if kind == "BF16":  # the upper half of a float32
        return (np.frombuffer(data, "<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)
    return np.frombuffer(data, {"F32": "<f4", "F16": "<f2"}[kind]).astype(np.float32)


def rounded(values: Floats, kind: str) -> Array:
    """`values` as they are stored: float32, float16, or the upper 16 bits of float32 as uint16.

    What is too large for float16 becomes infinite there, as everywhere; `OverflowError` says so.
    """
    import numpy as np

    if kind == "F32":
        return np.ascontiguousarray(values, "<f4")
    if kind == "F16":
        with np.errstate(over="ignore"):
            halves = values.astype("<f2")
        if not np.isfinite(halves).all() and np.isfinite(values).all():
            raise OverflowError(f"{float(np.abs(values).max()):g} is more than float16 can hold")
        return halves
    bits = np.ascontiguousarray(values, "<f4").view("<u4")
    nearest = bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
    # a NaN must stay one: its payload would carry over into the exponent
    return (np.where(np.isnan(values), bits, nearest) >> np.uint32(16)).astype("<u2")
