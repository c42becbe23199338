"""A Hugging Face folder: safetensors in the base's own shards, and every document that the base has.

transformers, vLLM, mlx-lm and spillover load it as they load the base. Shards keep their names and the order
of their tensors; what the adapter does not change is copied byte for byte, unless another dtype is asked for.
"""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from spillover.errors import ModelError
from spillover.export.rounding import STORED, rounded
from spillover.models.config import read_json
from spillover.models.fingerprint import DOCUMENTS
from spillover.models.index import INDEX, read_header

if TYPE_CHECKING:
    from spillover.export.merge import Merged
    from spillover.models import TensorSlice

__all__ = ["size_of", "write_folder"]

Report = Callable[[int, int], None]

TYPES = {"f32": "F32", "f16": "F16", "bf16": "BF16"}
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_BESIDE = (
    *("tokenizer.model", "vocab.json", "merges.txt", "added_tokens.json", "chat_template.json"),
    *("preprocessor_config.json", "processor_config.json"),
    *("LICENSE", "LICENSE.txt", "LICENSE.md", "NOTICE", "Notice.txt", "USE_POLICY.md"),
)
"""What a folder may have beside the files that decide what the model computes: other readers want them."""


def size_of(merged: Merged, kind: str | None) -> int:
    """Bytes of the weights that `write_folder` writes."""
    return sum(_bytes(part, _kind(merged, name, kind)) for name, part in merged.index.tensors.items())


def write_folder(merged: Merged, folder: Path, kind: str | None, report: Report) -> None:
    """Write the model into the empty `folder`; `kind` (a key of `TYPES`) None keeps each tensor's dtype."""
    total, written = size_of(merged, kind), 0
    for path in merged.index.files:
        parts = dict(sorted(read_header(path).items(), key=lambda item: item[1].start))
        with (folder / path.name).open("wb") as file:
            file.write(_header({name: (_kind(merged, name, kind), part) for name, part in parts.items()}))
            for name in parts:
                for piece in _pieces(merged, name, _kind(merged, name, kind)):
                    written += _all(file, piece)
                    report(written, total)
    _write_index(merged, folder, total)
    _write_documents(merged.model.path, folder, kind)


def _kind(merged: Merged, name: str, kind: str | None) -> str:
    """The dtype that a tensor is written in, as safetensors spells it."""
    stored = merged.index.tensors[name].dtype
    return TYPES[kind] if kind is not None and stored in STORED else stored


def _bytes(part: TensorSlice, kind: str) -> int:
    size = part.stop - part.start
    return size if kind == part.dtype else size // STORED[part.dtype] * STORED[kind]


def _pieces(merged: Merged, name: str, kind: str) -> Iterator[bytes | memoryview]:
    if name not in merged.changed and merged.index.tensors[name].dtype == kind:
        yield from merged.raw(name)
        return
    for block in merged.blocks(name):
        try:
            yield rounded(block, kind).data.cast("B")
        except OverflowError as error:
            raise ModelError(f"tensor {name}: {error}", hint="use --type bf16") from None


def _all(file: BinaryIO, data: bytes | memoryview) -> int:
    file.write(data)
    return len(data)


def _header(parts: dict[str, tuple[str, TensorSlice]]) -> bytes:
    """The safetensors prefix for tensors laid out in this order."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (kind, part) in parts.items():
        end = offset + _bytes(part, kind)
        entries[name] = {"dtype": kind, "shape": list(part.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 64)  # the data begins aligned
    return struct.pack("<Q", len(text)) + text


def _write_index(merged: Merged, folder: Path, total: int) -> None:
    source = merged.model.path / INDEX
    if source.exists():
        index = read_json(source)
        index["metadata"] = {**(index.get("metadata") or {}), "total_size": total}
        _write_json(folder / INDEX, index)


def _write_documents(source: Path, folder: Path, kind: str | None) -> None:
    for name in (*DOCUMENTS, *_BESIDE):
        if name != INDEX and (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    if kind is not None:
        config = read_json(folder / "config.json")
        for part in (config, config.get("text_config") or {}):
            for key in ("dtype", "torch_dtype"):
                if key in part or (part is config and key == "dtype" and "torch_dtype" not in part):
                    part[key] = _DTYPES[TYPES[kind]]
        _write_json(folder / "config.json", config)


def _write_json(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
