"""The model families that are supported: how each differs from Llama, and what it assumes in silence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

Windows = Literal["never", "always", "by layer", "when used", "by layer when used"]


@dataclass(frozen=True)
class Family:
    """What the layers of a family are like.

    `defaults` is what the family's own configuration class assumes where ``config.json`` is silent.
    `windows` says which layers attend to a sliding window: those of ``layer_types`` (`by layer`), and only
    where ``use_sliding_window`` is true (`when used`). `offset_norms` multiply by one plus the stored weight;
    `output_norms` normalise what attention and feed-forward layers add to the residual. The language model of
    a `multimodal` one is described by ``text_config``.
    """

    name: str
    windows: Windows
    defaults: Mapping[str, Any]
    attention_bias: bool = False
    qk_norm: bool = False
    fused: bool = False
    partial_rotary: bool = False
    offset_norms: bool = False
    output_norms: bool = False
    scaled_embedding: bool = False
    softcaps: bool = False
    multimodal: bool = False


_QWEN: dict[str, Any] = {"rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "sliding_window": 4096}
_GEMMA: dict[str, Any] = {
    "vocab_size": 256000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
_GEMMA3 = Family(
    "gemma3",
    "by layer",
    _GEMMA
    | {
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "sliding_window_pattern": 6,
    },
    qk_norm=True,
    offset_norms=True,
    output_norms=True,
    scaled_embedding=True,
    softcaps=True,
)

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family("llama", "never", {"rms_norm_eps": 1e-6, "max_position_embeddings": 2048}),
    "MistralForCausalLM": Family(
        "mistral",
        "always",
        {
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "sliding_window": 4096,
        },
    ),
    "MixtralForCausalLM": Family(
        "mixtral",
        "always",
        {
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "rope_theta": 1e6,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
        },
    ),
    "Phi3ForCausalLM": Family(
        "phi3",
        "always",
        {
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
        },
        fused=True,
        partial_rotary=True,
    ),
    "Qwen2ForCausalLM": Family(
        "qwen2",
        "by layer when used",
        _QWEN | {"num_key_value_heads": 32, "max_window_layers": 28},
        attention_bias=True,
    ),
    "Qwen3ForCausalLM": Family(
        "qwen3",
        "by layer when used",
        _QWEN | {"num_key_value_heads": 32, "max_window_layers": 28, "head_dim": 128},
        qk_norm=True,
    ),
    "Qwen3MoeForCausalLM": Family(
        "qwen3_moe",
        "when used",
        _QWEN
        | {
            "num_key_value_heads": 4,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": False,
            "decoder_sparse_step": 1,
            "mlp_only_layers": (),
        },
        qk_norm=True,
    ),
    "Gemma2ForCausalLM": Family(
        "gemma2",
        "by layer",
        _GEMMA
        | {
            "max_position_embeddings": 8192,
            "sliding_window_pattern": 2,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        offset_norms=True,
        output_norms=True,
        scaled_embedding=True,
        softcaps=True,
    ),
    "Gemma3ForCausalLM": _GEMMA3,
    "Gemma3ForConditionalGeneration": replace(_GEMMA3, multimodal=True),
}
"""By the name in ``architectures``. Of a multimodal model the language model alone is used."""
