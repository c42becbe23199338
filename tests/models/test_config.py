"""Configurations that transformers writes are read as transformers reads them; others are refused by name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from spillover.errors import ModelError
from spillover.models import ModelConfig

PLAIN: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def read(folder: Path, raw: dict[str, Any], generation: dict[str, Any] | None = None) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(raw))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return ModelConfig.read(folder)


@pytest.mark.parametrize(
    ("kind", "family"),
    [(LlamaConfig, "llama"), (MistralConfig, "mistral"), (Qwen2Config, "qwen2"), (Qwen3Config, "qwen3")],
)
def test_every_family_reads_what_transformers_wrote(kind, family, tmp_path) -> None:
    written = kind(
        vocab_size=100, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=8,
        num_key_value_heads=2, rms_norm_eps=1e-5, max_position_embeddings=512, tie_word_embeddings=True,
    )  # fmt: skip
    written.architectures = [
        {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}[family] + "ForCausalLM"
    ]
    written.save_pretrained(tmp_path)
    config = ModelConfig.read(tmp_path)
    assert config.family == family
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (100, 64, 96)
    assert (config.layers, config.heads, config.kv_heads) == (3, 8, 2)
    assert config.head_dim == (getattr(written, "head_dim", None) or 8)
    assert (config.rms_eps, config.max_positions, config.tied) == (1e-5, 512, True)
    assert config.rope_theta == written.rope_parameters["rope_theta"]
    assert config.rope_scaling is None
    assert config.attention_bias == (family == "qwen2")
    assert config.qk_norm == (family == "qwen3")
    assert config.sliding_window == (4096 if family == "mistral" else None)


@pytest.mark.parametrize("spelling", ["old", "new"])
def test_llama3_positions_in_both_spellings(spelling, tmp_path) -> None:
    if spelling == "old":
        raw = PLAIN | {"rope_theta": 500000.0, "rope_scaling": LLAMA3}
    else:
        raw = PLAIN | {"rope_parameters": LLAMA3 | {"rope_theta": 500000.0}}
    config = read(tmp_path, raw)
    assert (config.rope_theta, config.rope_scaling) == (500000.0, LLAMA3)


def test_ends_are_the_union_and_silence_means_the_familys_defaults(tmp_path) -> None:
    config = read(tmp_path, PLAIN | {"eos_token_id": [5, 6]}, {"eos_token_id": 7})
    assert config.eos_ids == (7, 5, 6)
    assert (config.kv_heads, config.tied, config.dtype, config.rope_theta) == (8, False, "float32", 10000.0)
    assert read(tmp_path, PLAIN | {"torch_dtype": "bfloat16"}).dtype == "bfloat16"
    assert read(tmp_path, PLAIN | {"dtype": "torch.float16"}).dtype == "float16"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "architecture MambaForCausalLM is not supported"),
        ({"architectures": None, "model_type": "t5"}, "architecture of type t5 is not supported"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantized (gptq)"),
        ({"hidden_act": "gelu"}, "activation is gelu"),
        ({"attention_bias": True}, "attention has biases"),
        ({"mlp_bias": True}, "feed-forward layers have biases"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, "rule 'dynamic'"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2}}, "rule 'yarn'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "no key 'rope_scaling.low_freq_factor'"),
        ({"hidden_size": "wide"}, "value of the wrong kind"),
        ({"num_attention_heads": 0}, "value of the wrong kind"),
    ],
)
def test_refusals_name_the_reason(change, message, tmp_path) -> None:
    with pytest.raises(ModelError, match=re.escape(message)):
        read(tmp_path, PLAIN | change)


def test_mixed_windows_are_refused(tmp_path) -> None:
    qwen = PLAIN | {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 4096}
    assert read(tmp_path, qwen | {"use_sliding_window": False}).sliding_window is None
    with pytest.raises(ModelError, match="some of its layers attend to a window"):
        read(tmp_path, qwen | {"use_sliding_window": True, "max_window_layers": 1})


@pytest.mark.parametrize("text", ["", "{", "[]", "\xff\xfe"])
def test_damaged_files(text, tmp_path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"config\.json"):
        ModelConfig.read(tmp_path)


def test_missing_key_and_file(tmp_path) -> None:
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        ModelConfig.read(tmp_path)
    with pytest.raises(ModelError, match="no key 'vocab_size'"):
        read(tmp_path, {key: value for key, value in PLAIN.items() if key != "vocab_size"})
