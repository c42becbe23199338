"""One GGUF file: hyperparameters, tokenizer and merged weights, a block of rows at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spillover.errors import ModelError
from spillover.export.gguf.architecture import add_hyperparameters, architecture, rope_tensors
from spillover.export.gguf.tensors import interleaved, targets
from spillover.export.rounding import rounded

if TYPE_CHECKING:
    from spillover.export.gguf.tensors import Target
    from spillover.export.gguf.vocabulary import Vocabulary
    from spillover.export.merge import Merged
    from spillover.export.rounding import Array, Floats

__all__ = ["gguf_library", "size_of", "write_gguf"]

Report = Callable[[int, int], None]

_KINDS = {"f32": "F32", "f16": "F16", "bf16": "BF16", "q8_0": "Q8_0"}
_FILE_TYPES = {"f32": "ALL_F32", "f16": "MOSTLY_F16", "bf16": "MOSTLY_BF16", "q8_0": "MOSTLY_Q8_0"}
_QUANTIZED = 32
"""Numbers of a row that share a scale in Q8_0."""


def gguf_library() -> Any:
    """The package ``gguf``; `ModelError` says how to get it."""
    try:
        import gguf
    except ImportError:
        raise ModelError("GGUF needs the package gguf", hint='pip install "spillover[export]"') from None
    return gguf


def size_of(merged: Merged, kind: str) -> int:
    """Bytes of the tensors that `write_gguf` writes, about."""
    config = merged.model.config
    found = architecture(config)
    return sum(_bytes(target, _storage(target, kind)) for target in targets(config, found))


def write_gguf(merged: Merged, path: Path, kind: str, name: str, words: Vocabulary, report: Report) -> None:
    """Write the model into the new file `path`; `kind` is a key of `_KINDS`, `name` what the file calls
    it."""
    import numpy as np

    gguf = gguf_library()
    config = merged.model.config
    found = architecture(config)
    every = [*targets(config, found)]
    extra = rope_tensors(config)
    writer = gguf.GGUFWriter(path, found.name)
    writer.add_type("model")
    writer.add_name(name)
    writer.add_file_type(gguf.LlamaFileType[_FILE_TYPES[kind]])
    if kind == "q8_0":
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    add_hyperparameters(writer, config, found)
    words.add_to(writer)
    for factors, values in extra.items():
        writer.add_tensor_info(factors, values.shape, values.dtype, values.nbytes)
    for target in every:
        stored = gguf.GGMLQuantizationType[_storage(target, kind)]
        size = _bytes(target, stored.name)
        writer.add_tensor_info(target.name, target.shape, np.dtype(np.float32), size, raw_dtype=stored)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        _write_tensors(writer, merged, every, extra, kind, report)
    finally:
        writer.close()


def _write_tensors(
    writer: Any, merged: Merged, every: list[Target], extra: dict[str, Floats], kind: str, report: Report
) -> None:
    # Not the writer's own way, which holds whole tensors and does not say when the disk is full.
    file = writer.fout[0]
    writer.write_padding(file, file.tell())
    for values in extra.values():
        file.write(values.data.cast("B"))
        writer.write_padding(file, values.nbytes)
    total, done = size_of(merged, kind), 0
    for target in every:
        size = 0
        for piece in _pieces(merged, target, _storage(target, kind)):
            size += piece.nbytes
            file.write(piece.data.cast("B"))
            report(done + size, total)
        writer.write_padding(file, size)
        done += size


def _storage(target: Target, kind: str) -> str:
    """What a tensor is stored as, by GGUF's name; rows that cannot share scales are float16."""
    if target.exact:
        return "F32"
    return "F16" if kind == "q8_0" and target.shape[-1] % _QUANTIZED else _KINDS[kind]


def _bytes(target: Target, storage: str) -> int:
    numbers = 1
    for size in target.shape:
        numbers *= size
    return numbers // _QUANTIZED * 34 if storage == "Q8_0" else numbers * (4 if storage == "F32" else 2)


def _pieces(merged: Merged, target: Target, storage: str) -> Iterator[Array]:
    import numpy as np

    for source in target.sources:
        for block in merged.blocks(source, rows=target.head or None):
            values = interleaved(block, target.head) if target.head else block
            if target.offset:
                values = values + np.float32(target.offset)
            try:
                yield _encoded(values, storage)
            except OverflowError as error:
                raise ModelError(f"tensor {source}: {error}", hint="use --type bf16") from None


def _encoded(values: Floats, storage: str) -> Array:
    import numpy as np

    if storage != "Q8_0":
        return np.ascontiguousarray(rounded(values, storage))
    gguf = gguf_library()
    quantized: Array = np.ascontiguousarray(gguf.quantize(values, gguf.GGMLQuantizationType.Q8_0))
    return quantized
