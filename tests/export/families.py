"""Tiny random models of the families that llama.cpp knows, each with a tokenizer, and adapters for them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine import tiny
from models.folders import write_tokenizer
from spillover.models import Adapter, LoraConfig, Model, ModelConfig, initial, resolve

VOCABULARY = {"vocab_size": 416}
WINDOW = {"sliding_window": tiny.WINDOW}
GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 32}

CHANGES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-untied": {},
    "llama3": {},
    "mistral": {},
    "qwen2": {},
    "qwen2-yarn": {},
    "qwen3": {},
    "phi3": {},
    "phi3-short": {},
    "phi3-long": {},
    "phi4": {},
    "gemma2": GEMMA,
    "gemma3": {**GEMMA, "num_hidden_layers": 7, "sliding_window_pattern": 6},
    "mixtral": {},
    "qwen3-moe": {"mlp_only_layers": []},
}
"""What is changed of a family's tiny model, so that llama.cpp computes it as it is."""


def build(folder: Path, name: str, **more: Any) -> Model:
    """A tiny float32 model of the family `name` with a tokenizer, in `folder`."""
    case = tiny.FAMILIES[name]
    extra = {**case.extra, **VOCABULARY, **CHANGES.get(name, {}), **more}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tiny.FAMILIES, name, replace(case, extra=extra))
        tiny.build(folder, name)
    write_tokenizer(folder)
    return resolve(str(folder))


def adapter_for(config: ModelConfig, targets: tuple[str, ...], scale: float = 0.05, **about: str) -> Adapter:
    """An adapter of rank 4 that changes what the model says."""
    lora = LoraConfig(4, 8.0, targets).on(config)
    source = np.random.default_rng(7)
    tensors = initial(lora, config, seed=3)
    for key in tensors:
        if key.endswith("_b"):
            tensors[key] = source.normal(0, scale, tensors[key].shape).astype(np.float32)
    return Adapter(lora, tensors, **about)


def rows(count: int, length: int, vocabulary: int = 400) -> list[list[int]]:
    """Random sequences of tokens."""
    source = np.random.default_rng(1)
    return [source.integers(1, vocabulary, length).tolist() for _ in range(count)]
