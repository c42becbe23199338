"""Named arrays as a safetensors file, streamed out and in without a second copy in memory.

Format: https://huggingface.co/docs/safetensors - a little-endian uint64 with the length of a JSON header,
the header (name -> dtype, shape, offsets), then the arrays one after the other.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from spillover.state import Payload

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float32]

__all__ = ["read_tensors", "tensor_file"]


def tensor_file(arrays: Mapping[str, Floats]) -> Callable[[], Iterator[bytes | memoryview]]:
    """A source for `spillover.store.Store.write` that yields the file; arrays are float32, any shape."""
    header: dict[str, object] = {}
    start = 0
    for name, array in arrays.items():
        stop = start + array.nbytes
        header[name] = {"dtype": "F32", "shape": list(array.shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # arrays start aligned to 8 bytes

    def pieces() -> Iterator[bytes | memoryview]:
        yield len(text).to_bytes(8, "little") + text
        for array in arrays.values():
            if array.nbytes:
                yield np.ascontiguousarray(array, np.float32).data.cast("B")

    return pieces


def read_tensors(payload: Payload, name: str) -> dict[str, Floats]:
    """The arrays of a payload's file, verified; raises `Corrupt` if the bytes are not those committed."""
    from safetensors import safe_open

    with tempfile.TemporaryDirectory(prefix="spill-") as folder:
        path = Path(folder, name)
        payload.fetch(name, path)
        with safe_open(path, framework="numpy") as file:
            return {key: np.array(file.get_tensor(key), np.float32) for key in file.keys()}  # noqa: SIM118
