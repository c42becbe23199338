"""Write a model with random weights of a given size, so that a large one exists without a download.

    python benchmarks/random_model.py FOLDER --family llama --gigabytes 4 [--dtype bfloat16] [--layers N]

The folder is like one from a model hub: ``config.json``, safetensors shards of at most 2 GB and their index,
tensors in the order in which checkpoints are usually saved, and the ``demo`` model's tokenizer and chat
template, so that every command takes it. It answers nonsense. Matrices are normal with a standard deviation
of one over the root of their inputs, which keeps activations near one; norms do nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from spillover.models import ModelConfig, resolve
from spillover.models.folders import check_disk
from spillover.models.index import INDEX, expected

SHARD = 2_000_000_000
POOL = 1 << 24  # values that are drawn; matrices are windows of them
WIDTHS = {"bfloat16": ("BF16", 2), "float16": ("F16", 2), "float32": ("F32", 4)}
# (weights in GB from which it is used, hidden size, feed-forward size, heads, key heads)
SHAPES = (
    (0.0, 256, 768, 4, 2),
    (0.2, 1024, 2816, 16, 8),
    (1.5, 2048, 8192, 32, 8),
    (8.0, 4096, 14336, 32, 8),
    (60.0, 8192, 28672, 64, 8),
)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "mistral": ("MistralForCausalLM", {"sliding_window": None}),
    "mixtral": ("MixtralForCausalLM", {"num_local_experts": 8, "num_experts_per_tok": 2}),
    "phi3": ("Phi3ForCausalLM", {"original_max_position_embeddings": 8192}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3ForCausalLM", {}),
    "qwen3-moe": (
        "Qwen3MoeForCausalLM",
        {"num_experts": 64, "num_experts_per_tok": 4, "norm_topk_prob": True},
    ),
    "gemma2": ("Gemma2ForCausalLM", {}),
    "gemma3": ("Gemma3ForCausalLM", {"sliding_window_pattern": 6}),
}


def write_model(
    folder: Path,
    family: str = "llama",
    size: int = 4_000_000_000,
    dtype: str = "bfloat16",
    *,
    layers: int | None = None,
    seed: int = 0,
) -> ModelConfig:
    """Write a model of about `size` bytes, or of `layers` layers of the shape that suits the size."""
    folder.mkdir(parents=True, exist_ok=True)
    demo = resolve("demo").path
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copyfile(demo / name, folder / name)
    raw = configuration(family, size, dtype, layers, json.loads((demo / "config.json").read_text()))
    config = ModelConfig.parse(raw, {})
    check_disk(bytes_of(config), folder)
    (folder / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
    values, weight_map = Values(config, seed), {}
    shards = list(divide(config))
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        write_shard(folder / name, shard, values)
        weight_map |= dict.fromkeys(shard, name)
    index = {"metadata": {"total_size": bytes_of(config)}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return config


def configuration(
    family: str, size: int, dtype: str, layers: int | None, demo: dict[str, Any]
) -> dict[str, Any]:
    """``config.json`` of the model of `family` whose size is nearest to `size` bytes."""
    architecture, extra = FAMILIES[family]
    elements = size / WIDTHS[dtype][1]
    _, hidden, inner, heads, keys = [shape for shape in SHAPES if elements * 2 >= shape[0] * 1e9][-1]
    raw = {
        "architectures": [architecture],
        "model_type": family.replace("-", "_"),
        "vocab_size": demo["vocab_size"],
        "bos_token_id": demo["bos_token_id"],
        "eos_token_id": demo["eos_token_id"],
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": keys,
        "head_dim": hidden // heads,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        **({"moe_intermediate_size": inner // 8} if family == "qwen3-moe" else {}),
        **({"query_pre_attn_scalar": hidden // heads} if family.startswith("gemma") else {}),
        **extra,
    }
    one, two = (bytes_of(ModelConfig.parse({**raw, "num_hidden_layers": count}, {})) for count in (1, 2))
    fitting = round((size - (2 * one - two)) / (two - one))
    return raw | {"num_hidden_layers": layers or max(fitting, 1)}


def bytes_of(config: ModelConfig) -> int:
    return sum(math.prod(shape) for _, shape in expected(config)) * WIDTHS[config.dtype][1]


def divide(config: ModelConfig) -> Iterator[dict[str, tuple[int, ...]]]:
    """The tensors of each shard, by name as they are saved: a layer after another, names sorted within."""
    width, shard, filled = WIDTHS[config.dtype][1], {}, 0
    for name, shape in sorted(expected(config), key=lambda one: place(one[0])):
        size = width * math.prod(shape)
        if filled + size > SHARD and shard:
            yield shard
            shard, filled = {}, 0
        shard[name] = shape
        filled += size
    yield shard


def place(name: str) -> tuple[int, str]:
    """Where a tensor is saved: the embedding, the layers by number, the rest."""
    if "embed_tokens" in name:
        return -1, name
    head, _, rest = name.partition(".layers.")
    return (int(rest.partition(".")[0]), name) if rest else (1 << 30, head)


class Values:
    """Bytes of random tensors: windows of a few million values that are drawn once for each spread."""

    def __init__(self, config: ModelConfig, seed: int) -> None:
        self._config = config
        self._source = np.random.default_rng(seed)
        self._normal = self._source.standard_normal(POOL, dtype=np.float32)
        self._pools: dict[float, np.ndarray] = {}

    def of(self, name: str, shape: tuple[int, ...]) -> Iterator[memoryview]:
        """The bytes of a tensor, in pieces."""
        left = math.prod(shape)
        if "norm" in name:
            yield self._encode(np.full(left, 1 - self._config.norm_offset, np.float32)).data.cast("B")
            return
        spread = 0.02 if len(shape) == 1 or "embed_tokens" in name else shape[-1] ** -0.5
        if spread not in self._pools:
            self._pools[spread] = self._encode(self._normal * np.float32(spread))
        pool = self._pools[spread]
        while left:
            start = int(self._source.integers(POOL // 2))
            count = min(left, POOL - start)
            yield pool[start : start + count].data.cast("B")
            left -= count

    def _encode(self, values: np.ndarray) -> np.ndarray:
        if self._config.dtype == "bfloat16":
            bits = values.view(np.uint32)
            return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)  # to the nearest even
        return values.astype(self._config.dtype)


def write_shard(path: Path, tensors: dict[str, tuple[int, ...]], values: Values) -> None:
    """One safetensors file."""
    entries, offset = {}, 0
    kind, width = WIDTHS[values._config.dtype]
    for name, shape in tensors.items():
        end = offset + width * math.prod(shape)
        entries[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    header = json.dumps({"__metadata__": {"format": "pt"}, **entries}, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        for name, shape in tensors.items():
            for piece in values.of(name, shape):
                file.write(piece)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--family", choices=FAMILIES, default="llama")
    parser.add_argument("--gigabytes", type=float, default=4.0, help="bytes of all weights, in 10^9")
    parser.add_argument("--dtype", choices=WIDTHS, default="bfloat16")
    parser.add_argument("--layers", type=int, help="instead of as many as the size asks for")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    begin = time.perf_counter()
    config = write_model(
        args.folder, args.family, int(args.gigabytes * 1e9), args.dtype, layers=args.layers, seed=args.seed
    )
    print(
        f"{args.folder}: {config.family}, {config.layers} layers of {config.hidden_size}, "
        f"{bytes_of(config) / 1e9:.2f} GB in {time.perf_counter() - begin:.0f} s"
    )


if __name__ == "__main__":
    main()
