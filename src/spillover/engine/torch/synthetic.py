"""Small models of random weights, to measure passes with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from spillover.models import Model, ModelConfig, parse
from spillover.models.index import expected

# its weights do not fit into caches near the cores, and its layers are of a usual shape
LARGE = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4, "vocab_size": 8192,
         "num_attention_heads": 16, "num_key_value_heads": 4}  # fmt: skip
# its products take next to no time: what is left is what every layer takes
SMALL = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 8, "vocab_size": 512,
         "num_attention_heads": 2, "num_key_value_heads": 1}  # fmt: skip
_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}


def synthetic(folder: Path, sizes: dict[str, int]) -> Model:
    """Write a Llama of `sizes` into `folder`, without a tokenizer."""
    folder.mkdir()
    written: dict[str, Any] = _LLAMA | sizes
    (folder / "config.json").write_text(json.dumps(written))
    config = ModelConfig.read(folder)
    source = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.ones(shape, dtype=torch.bfloat16)
        if len(shape) == 1
        else torch.empty(shape, dtype=torch.bfloat16).uniform_(-0.05, 0.05, generator=source)
        for name, shape in expected(config)
    }
    save_file(tensors, folder / "model.safetensors")
    return Model(parse(str(folder)), folder, config, fingerprint="", bytes=0)
