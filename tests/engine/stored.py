"""Small model folders of random bytes in the layouts that real ones have, written without an engine."""

from __future__ import annotations

import json
import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from spillover.engine.ring import Drive, LayerIndex
from spillover.models import ModelConfig, WeightIndex
from spillover.models.index import INDEX, expected

LAYERS = 6
PAGE = 4096
SMALL = Drive(threads=3, read_bytes=8 * PAGE)  # so that even a small layer is many reads
ARCHITECTURES = {"llama": "LlamaForCausalLM", "mixtral": "MixtralForCausalLM", "qwen3": "Qwen3ForCausalLM"}


@dataclass
class Stored:
    """A model folder and what the tests compare with: the bytes of its files."""

    folder: Path
    config: ModelConfig

    def __post_init__(self) -> None:
        self.index = WeightIndex(self.folder)
        self.layers = LayerIndex(self.index, self.config)
        self.content = {file: file.read_bytes() for file in self.index.files}

    @property
    def files(self) -> list[Path]:
        return self.index.files

    def bytes_of(self, layer: int, name: str) -> bytes:
        one = self.index.tensors[f"model.layers.{layer}.{name}"]
        return self.content[one.file][one.start : one.stop]

    def file_of(self, layer: int) -> Path:
        """The last of the files that hold a part of `layer`."""
        return self.layers.layers[layer].extents[-1].file


def store(
    folder: Path,
    family: str = "llama",
    *,
    shards: int = 3,
    gap: int = 0,
    layers: int = LAYERS,
    inner: int = 200,
) -> Stored:
    """Write a model; its tensors are `gap` bytes apart, and layers begin and end inside of shards."""
    config = ModelConfig.parse(configuration(family, layers, inner), {})
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config.raw))
    source, names = np.random.default_rng(7), [*expected(config)]
    step = -(-len(names) // shards)
    weight_map = {}
    for number in range(shards):
        part = names[number * step : (number + 1) * step]
        file = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        entries, data = {}, bytearray()
        for name, shape in part:
            size = 2 * math.prod(shape)
            entries[name] = {
                "dtype": "BF16", "shape": shape, "data_offsets": [len(data), len(data) + size],
            }  # fmt: skip
            data += source.bytes(size) + bytes(gap)
            weight_map[name] = file
        header = json.dumps(entries).encode()
        header += b" " * (-len(header) % 8)
        with (folder / file).open("wb") as opened:
            opened.write(struct.pack("<Q", len(header)) + header + data)
            os.fsync(opened.fileno())
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return Stored(folder, config)


def configuration(family: str, layers: int, inner: int) -> dict[str, Any]:
    return {
        "architectures": [ARCHITECTURES[family]],
        "vocab_size": 64,
        "hidden_size": 96,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "max_position_embeddings": 128,
        "num_local_experts": 5,
        "torch_dtype": "bfloat16",
    }
