"""Tiny random models of every family, saved as transformers saves them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import transformers

from spillover.engine import Completion, Request, Sampling, Scheduler, Work, engine
from spillover.models import Model, ModelConfig, parse

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SIZES = {
    "vocab_size": 211,
    "hidden_size": 96,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
FAMILIES = {
    "llama": ("Llama", {"tie_word_embeddings": True}),
    "llama-untied": ("Llama", {"tie_word_embeddings": False, "num_key_value_heads": 6}),
    "llama3": (
        "Llama",
        {"tie_word_embeddings": True, "rope_parameters": {"rope_theta": 500000.0, **LLAMA3}},
    ),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"tie_word_embeddings": False, "head_dim": 32}),
    "mistral": ("Mistral", {"tie_word_embeddings": False, "sliding_window": 24, "head_dim": 32}),
}


def build(folder: Path, family: str) -> tuple[Model, transformers.PreTrainedModel]:
    """A random float32 model of `family` in `folder`, as ours and as transformers' (eager attention)."""
    name, extra = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **extra})
    config._attn_implementation = "eager"
    torch.manual_seed(11)
    theirs = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    for key, value in theirs.named_parameters():
        if "norm" in key or key.endswith("bias"):
            torch.nn.init.normal_(value, mean=float("norm" in key), std=0.3)
    theirs.requires_grad_(False)
    theirs.save_pretrained(folder)
    theirs.generation_config.eos_token_id = None  # tests compare answers of one length
    return ours(folder), theirs


def ours(folder: Path) -> Model:
    """The model in `folder`, without its tokenizer."""
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    return Model(parse(str(folder)), folder, ModelConfig.read(folder), "tiny", size)


def loaded(model: Model, *, batch: int = 4, sequence: int = 256, adapters=(), numerics="float32"):
    """`model` ready to generate on the CPU."""
    torch_engine = engine("torch")
    plan = torch_engine.plan(model, Work("generate", batch, sequence, numerics=numerics, device="cpu"))
    return torch_engine.load(model, plan, adapters)


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    """Random token ids without the stop id."""
    return tuple(int(x) for x in np.random.default_rng(seed).integers(1, SIZES["vocab_size"], length))


def request(name: str, tokens: tuple[int, ...], count: int = 20, **more) -> Request:
    """A greedy request without stop ids unless `more` says otherwise."""
    return Request(**{
        "id": name,
        "tokens": tokens,
        "max_tokens": count,
        "sampling": Sampling(),
        "stop_ids": frozenset(),
        "logprobs": -1,
        **more,
    })  # fmt: skip


def answers(model, requests, **more) -> dict[str, Completion]:
    """Run everything and index it by id."""
    return {done.id: done for done in Scheduler(model, **more).run(iter(requests))}
