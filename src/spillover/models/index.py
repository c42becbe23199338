"""The safetensors headers of a model folder: what is where, checked, with no tensor read.

Format: https://huggingface.co/docs/safetensors (8 bytes little-endian header length, JSON header, tensor
bytes).
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spillover.errors import ModelError
from spillover.models.config import ModelConfig, read_json

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_WIDTHS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
_HEADER_LIMIT = 100 << 20  # what the reference implementation accepts
_AGAIN = "delete the model's folder and get it again"


@dataclass(frozen=True)
class TensorSlice:
    """One tensor on disk: bytes ``[start, stop)`` of `file`, row-major; `dtype` as safetensors spells it."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class WeightIndex:
    """Every tensor of a model folder by name.

    Raises `ModelError` for a missing or truncated shard, an index that names a tensor or shard that is not
    there, or a header that is not one.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = weight_files(folder)
        self.tensors: Mapping[str, TensorSlice] = {
            name: part for file in self.files for name, part in read_header(file).items()
        }
        stale = next((name for name in _weight_map(folder) if name not in self.tensors), None)
        if stale is not None:
            raise ModelError(f"{folder / INDEX} names tensor {stale}, which no shard holds", hint=_AGAIN)

    @property
    def bytes(self) -> int:
        """Size of all tensors in bytes."""
        return sum(part.stop - part.start for part in self.tensors.values())

    def check(self, config: ModelConfig) -> None:
        """Compare names and shapes with what `config` needs; `ModelError` names the first difference."""
        embedding = self.tensors.get(f"{config.prefix}embed_tokens.weight")
        if embedding is not None and embedding.shape[0] < config.vocab_size:
            raise ModelError(
                f"the vocabulary has {config.vocab_size} tokens, the embedding {embedding.shape[0]} rows",
                hint=f"correct vocab_size in {self.folder / 'config.json'}, or get the model again",
            )
        for name, shape in expected(config):
            found = self.tensors.get(name)
            if found is None:
                raise ModelError(
                    f"{self.folder} has no tensor {name}, which {config.architecture} needs", hint=_AGAIN
                )
            if found.shape != shape:
                raise ModelError(
                    f"tensor {name} in {found.file} is {found.shape}, but config.json makes it {shape}",
                    hint=_AGAIN,
                )


def weight_files(folder: Path) -> list[Path]:
    """The weight files of a model folder, sorted by name; `ModelError` when one is missing."""
    names = sorted(set(_weight_map(folder).values())) or [SINGLE]
    for name in names:
        if not (folder / name).is_file():
            named = f", named by {INDEX}," if (folder / INDEX).exists() else ""
            raise ModelError(f"{folder / name}{named} is missing", hint=_AGAIN)
    return [folder / name for name in names]


def read_header(path: Path) -> dict[str, TensorSlice]:
    """Parse one safetensors file's header and check it against the file's size."""
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else _HEADER_LIMIT + 1
        if length > _HEADER_LIMIT:
            raise ModelError(f"{path} is not a safetensors file", hint=_AGAIN)
        header = file.read(length)
    if len(header) < length:
        raise ModelError(f"{path} is truncated inside its header: {size:,} bytes", hint=_AGAIN)
    try:
        entries = json.loads(header)
        entries.pop("__metadata__", None)
        tensors = {name: _slice(path, 8 + length, entry) for name, entry in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ModelError(f"{path} has a damaged safetensors header", hint=_AGAIN) from None
    end = max((part.stop for part in tensors.values()), default=8 + length)
    if size < end:
        raise ModelError(f"{path} is truncated: {size:,} of {end:,} bytes", hint=_AGAIN)
    return tensors


def expected(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the tensors that a model of `config` has, in the order they are used."""
    hidden = config.hidden_size
    yield f"{config.prefix}embed_tokens.weight", (config.vocab_size, hidden)
    for layer in range(config.layers):
        for name, shape in layer_tensors(config, layer).items():
            yield f"{config.prefix}layers.{layer}.{name}", shape
    yield f"{config.prefix}norm.weight", (hidden,)
    if not config.tied:
        yield head_name(config), (config.vocab_size, hidden)


def head_name(config: ModelConfig) -> str:
    """The name of the output matrix, beside the decoder."""
    return f"{config.prefix.removesuffix('model.')}lm_head.weight"


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, tuple[int, ...]]:
    """Names (below ``<prefix>layers.<k>.``) and shapes of the tensors of `layer`."""
    hidden = config.hidden_size
    modules = linears(config, layer)
    shapes: dict[str, tuple[int, ...]] = {f"{norm}.weight": (hidden,) for norm in norm_names(config).values()}
    for module, (inputs, outputs) in modules.items():
        shapes[f"{module}.weight"] = (outputs, inputs)
    if config.attention_bias:
        for module in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"):
            shapes[f"{module}.bias"] = (modules[module][1],)
    if config.qk_norm:
        shapes |= {f"self_attn.{module}.weight": (config.head_dim,) for module in ("q_norm", "k_norm")}
    if config.experts is not None and config.sparse(layer):
        names, inner = expert_names(config), config.experts.intermediate_size
        shapes[f"{names.router}.weight"] = (config.experts.count, hidden)
        for expert in range(config.experts.count):
            for module in (names.gate, names.up):
                shapes[names.of(expert, module)] = (inner, hidden)
            shapes[names.of(expert, names.down)] = (hidden, inner)
    return shapes


def norm_names(config: ModelConfig) -> dict[str, str]:
    """What the files call a layer's norms, by what they normalise."""
    if config.output_norms:
        return {
            "attention_input": "input_layernorm",
            "attention_output": "post_attention_layernorm",
            "feedforward_input": "pre_feedforward_layernorm",
            "feedforward_output": "post_feedforward_layernorm",
        }
    return {"attention_input": "input_layernorm", "feedforward_input": "post_attention_layernorm"}


@dataclass(frozen=True)
class ExpertNames:
    """What a family calls the parts of a layer with experts; `gate`, `up` and `down` are modules of each."""

    router: str
    experts: str
    gate: str
    up: str
    down: str

    def of(self, expert: int, module: str) -> str:
        """The name of one matrix of one expert."""
        return f"{self.experts}.{expert}.{module}.weight"


def expert_names(config: ModelConfig) -> ExpertNames:
    """The names in the files of `config`'s family."""
    if config.family == "mixtral":
        block = "block_sparse_moe"
        return ExpertNames(f"{block}.gate", f"{block}.experts", "w1", "w3", "w2")
    return ExpertNames("mlp.gate", "mlp.experts", "gate_proj", "up_proj", "down_proj")


def linears(config: ModelConfig, layer: int) -> dict[str, tuple[int, int]]:
    """The linear modules of `layer` with their (inputs, outputs), without experts and their router."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    if config.fused:
        modules = {"self_attn.qkv_proj": (hidden, queries + 2 * keys)}
    else:
        modules = {
            "self_attn.q_proj": (hidden, queries),
            "self_attn.k_proj": (hidden, keys),
            "self_attn.v_proj": (hidden, keys),
        }
    modules["self_attn.o_proj"] = (queries, hidden)
    if config.sparse(layer):
        return modules
    if config.fused:
        modules["mlp.gate_up_proj"] = (hidden, 2 * inner)
    else:
        modules |= {"mlp.gate_proj": (hidden, inner), "mlp.up_proj": (hidden, inner)}
    modules["mlp.down_proj"] = (inner, hidden)
    return modules


def _weight_map(folder: Path) -> dict[str, str]:
    path = folder / INDEX
    if not path.exists():
        return {}
    weights = read_json(path).get("weight_map")
    if not isinstance(weights, dict) or not weights:
        raise ModelError(f"{path} has no weight_map", hint=_AGAIN)
    for name in weights.values():
        if not isinstance(name, str) or "/" in name or "\\" in name:
            raise ModelError(f"{path} names a shard outside its folder: {name!r}", hint=_AGAIN)
    return weights


def _slice(path: Path, base: int, entry: dict[str, Any]) -> TensorSlice:
    shape = tuple(int(size) for size in entry["shape"])
    start, stop = entry["data_offsets"]
    width = _WIDTHS.get(entry["dtype"])
    if start < 0 or stop < start or (width and stop - start != width * math.prod(shape)):
        raise ValueError("offsets do not match the shape")
    return TensorSlice(path, entry["dtype"], shape, base + start, base + stop)
