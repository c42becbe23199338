"""Configurations that transformers writes are read as transformers reads them; others are refused by name."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from spillover.errors import ModelError
from spillover.models import ModelConfig
from spillover.models.rope import Rope

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
    assert config.ropes == (Rope(written.rope_parameters["rope_theta"], config.head_dim),) * 3
    assert config.attention_bias == (family == "qwen2")
    assert config.qk_norm == (family == "qwen3")
    assert config.windows == (None,) * 3  # Mistral's is wider than the context


@pytest.mark.parametrize("spelling", ["old", "new"])
def test_llama3_positions_in_both_spellings(spelling, tmp_path) -> None:
    if spelling == "old":
        raw = PLAIN | {"rope_theta": 500000.0, "rope_scaling": LLAMA3}
    else:
        raw = PLAIN | {"rope_parameters": LLAMA3 | {"rope_theta": 500000.0}}
    config = read(tmp_path, raw)
    assert config.ropes == (Rope(500000.0, 8, LLAMA3),) * 2


LONGROPE = {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.5] * 48}
SHAPE = {
    "vocab_size": 1000, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 7,
    "num_attention_heads": 24, "num_key_value_heads": 8, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0, "torch_dtype": "bfloat16",
}  # fmt: skip
PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    # the spellings that files on the hub have; where they are silent, the family's own class decides
    "gemma-2": (
        "Gemma2",
        SHAPE | {"head_dim": 128, "sliding_window": 4096, "hidden_act": "gelu_pytorch_tanh"}),
    "gemma-2-27b": (
        "Gemma2",
        SHAPE | {"head_dim": 128, "query_pre_attn_scalar": 144, "final_logit_softcapping": 20.0}),
    "gemma-3-1b": (
        "Gemma3Text",
        SHAPE | {"head_dim": 256, "query_pre_attn_scalar": 256, "rope_theta": 1000000,
                 "rope_local_base_freq": 10000, "rope_scaling": None, "sliding_window": 512,
                 "sliding_window_pattern": 3},
    ),
    "gemma-3-4b": (
        "Gemma3Text",
        SHAPE | {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024},
    ),
    "phi-3-mini-4k": ("Phi3", SHAPE | {"sliding_window": 2047, "rope_theta": 10000.0, "rope_scaling": None}),
    "phi-3-mini-128k": (
        "Phi3",
        SHAPE | {"max_position_embeddings": 131072, "original_max_position_embeddings": 4096,
                 "sliding_window": 262144, "num_attention_heads": 32, "rope_scaling": LONGROPE},
    ),
    "phi-4-mini": (
        "Phi3",
        SHAPE | {"max_position_embeddings": 131072, "original_max_position_embeddings": 4096,
                 "tie_word_embeddings": True, "partial_rotary_factor": 0.75, "rope_scaling": LONGROPE},
    ),
    "mixtral": (
        "Mixtral", SHAPE | {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen3-moe": (
        "Qwen3Moe",
        SHAPE | {"head_dim": 128, "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 768,
                 "norm_topk_prob": True, "mlp_only_layers": [3], "max_window_layers": 7,
                 "use_sliding_window": False, "rope_theta": 1000000.0},
    ),
    "qwen3-moe-silent": ("Qwen3Moe", SHAPE),
    "qwen2.5-yarn": (
        "Qwen2",
        SHAPE | {"rope_theta": 1000000.0, "use_sliding_window": False, "rope_scaling": {
            "factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}},
    ),
    "qwen2-windows": (
        "Qwen2", SHAPE | {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 4}),
    "mistral": ("Mistral", SHAPE | {"sliding_window": 4096, "max_position_embeddings": 32768}),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_files_of_the_hub_are_read_as_transformers_reads_them(name, tmp_path) -> None:
    """What transformers makes of a file, written by it in full, says the same to us as the file."""
    kind, raw = PUBLISHED[name]
    theirs = getattr(transformers, f"{kind}Config")(**json.loads(json.dumps(raw)))
    theirs.architectures = [f"{kind.removesuffix('Text')}ForCausalLM"]
    theirs.save_pretrained(tmp_path)
    in_full = ModelConfig.read(tmp_path)
    as_published = read(tmp_path, raw | {"architectures": theirs.architectures})
    assert replace(as_published, raw={}) == replace(in_full, raw={})


@pytest.mark.parametrize("older", ["su", "yarn"])
def test_older_names_of_longrope(older, tmp_path) -> None:
    raw = PUBLISHED["phi-3-mini-128k"][1] | {"architectures": ["Phi3ForCausalLM"]}
    kinds = ("longrope", older)
    read_as = [read(tmp_path, raw | {"rope_scaling": LONGROPE | {"type": kind}}) for kind in kinds]
    assert read_as[0].ropes == read_as[1].ropes
    assert read_as[0].within(4096).ropes[0].scaling["factors"] == (1.0,) * 48
    assert read_as[0].within(4097).ropes[0].scaling["factors"] == (2.5,) * 48


def test_a_multimodal_file_is_its_language_model(tmp_path) -> None:
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "model_type": "gemma3_text"}  # fmt: skip
    raw = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": text,
        "vision_config": {"hidden_size": 1152},
        "torch_dtype": "bfloat16",
        "eos_token_id": [1, 106],
    }
    config = read(tmp_path, raw)
    assert (config.hidden_size, config.vocab_size, config.heads, config.kv_heads) == (2560, 262208, 8, 4)
    assert (config.prefix, config.tied, config.dtype) == ("language_model.model.", True, "bfloat16")
    assert config.eos_ids == (1, 106)
    assert config.windows[:7] == (1024,) * 5 + (None, 1024)
    assert config.ropes[0] == Rope(10000.0, 256)
    assert config.ropes[5] == Rope(1e6, 256, {"rope_type": "linear", "factor": 8.0})


def test_yarn_reaches_beyond_what_the_file_says_of_positions(tmp_path) -> None:
    scaling = {"factor": 4.0, "original_max_position_embeddings": 512, "type": "yarn"}
    config = read(tmp_path, PLAIN | {"max_position_embeddings": 512, "rope_scaling": scaling})
    assert config.max_positions == 2048


def test_a_window_of_one_layer_kind_and_of_none(tmp_path) -> None:
    qwen = PLAIN | {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 64}
    assert read(tmp_path, qwen).windows == (None, None)
    used = qwen | {"use_sliding_window": True}
    assert read(tmp_path, used | {"max_window_layers": 1}).windows == (None, 64)
    kinds = ["sliding_attention", "full_attention"]
    assert read(tmp_path, used | {"layer_types": kinds}).windows == (64, None)
    assert read(tmp_path, PLAIN | {"sliding_window": 64}).windows == (None, None)  # Llama has none


def test_ends_are_the_union_and_silence_means_the_familys_defaults(tmp_path) -> None:
    config = read(tmp_path, PLAIN | {"eos_token_id": [5, 6]}, {"eos_token_id": 7})
    assert config.eos_ids == (7, 5, 6)
    assert (config.kv_heads, config.tied, config.dtype) == (8, False, "float32")
    assert config.ropes == (Rope(10000.0, 8),) * 2
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
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, "no key 'rope_scaling.long_factor'"),
        ({"rope_scaling": {"type": "linear"}}, "no key 'rope_scaling.factor'"),
        ({"partial_rotary_factor": 0.5}, "only a part of each head is rotated"),
        ({"architectures": ["Phi3SmallForCausalLM"]}, "architecture Phi3SmallForCausalLM is not supported"),
        (
            {"architectures": ["Gemma3ForCausalLM"], "use_bidirectional_attention": True},
            "its tokens attend to later ones",
        ),
        (
            {"architectures": ["Gemma3ForCausalLM"], "layer_types": ["linear_attention", "full_attention"]},
            "its layers are of kind linear_attention",
        ),
        (
            {"architectures": ["Gemma3ForCausalLM"], "layer_types": ["full_attention"]},
            "1 layer_types for 2 layers",
        ),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "no key 'rope_scaling.low_freq_factor'"),
        ({"hidden_size": "wide"}, "value of the wrong kind"),
        ({"num_attention_heads": 0}, "value of the wrong kind"),
    ],
)
def test_refusals_name_the_reason(change, message, tmp_path) -> None:
    with pytest.raises(ModelError, match=re.escape(message)):
        read(tmp_path, PLAIN | change)


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
