"""Tiny random models of the families that llama.cpp knows, each with a tokenizer, and adapters for them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, processors, trainers

from engine import tiny
from models.folders import CHATML, CORPUS, write_tokenizer
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


def write_sentencepiece(folder: Path, *, prefix: bool = True) -> Path:
    """A SentencePiece-like tokenizer: characters, and bytes to fall back on."""
    source = Tokenizer(models.BPE())
    source.normalizer = normalizers.Replace(" ", "▁")
    source.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=140, show_progress=False))
    trained = json.loads(source.to_str())["model"]
    merged = ["".join(pair if isinstance(pair, list) else pair.split(" ")) for pair in trained["merges"]]
    single = [token for token in trained["vocab"] if token not in merged]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *merged, *single]
    vocab = {token: i for i, token in enumerate(dict.fromkeys(tokens))}
    merges = [
        (token[:cut], token[cut:])
        for token in dict.fromkeys(merged)
        for cut in range(1, len(token))
        if token[:cut] in vocab and token[cut:] in vocab
    ]
    inner = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    steps: list[Any] = [normalizers.Replace(" ", "▁")]
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), *steps] if prefix else steps)
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    special = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
    inner.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    folder.mkdir(parents=True, exist_ok=True)
    inner.save(str(folder / "tokenizer.json"))
    document = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "chat_template": CHATML}
    (folder / "tokenizer_config.json").write_text(json.dumps(document))
    return folder
