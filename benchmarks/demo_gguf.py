"""The demo model as a GGUF file of 16-bit weights, for llama.cpp: the numbers that all sides compute with."""

from __future__ import annotations

import tempfile
from pathlib import Path

import gguf
from peer import cache

from spillover.models import demo

KINDS = {
    "bf16": (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
    "f16": (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
}


def demo_gguf(kind: str) -> Path:
    """The file with matrices in ``bf16`` or ``f16`` and vectors in float32, written when it is not there."""
    path = cache() / f"demo-{demo.GGUF_SHA256[:12]}-{kind}.gguf"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder) / path.name
            with demo.source(Path(folder) / "wheel") as four_bit:
                _widen(four_bit, made, kind)
            made.replace(path)
    return path


def _widen(four_bit: Path, to: Path, kind: str) -> None:
    """The same metadata and tensors, each matrix expanded and rounded once."""
    reader = gguf.GGUFReader(four_bit)
    storage, file_type = KINDS[kind]
    writer = gguf.GGUFWriter(to, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), field.types[0], inner)
    writer.add_file_type(file_type)
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        if values.ndim == 1:
            writer.add_tensor(tensor.name, values)
        else:
            writer.add_tensor(tensor.name, gguf.quantize(values, storage), raw_dtype=storage)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
