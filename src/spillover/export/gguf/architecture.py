"""Hyperparameters of the families that llama.cpp computes, and one line for what it would compute otherwise.

The keys are those of the GGUF specification. What llama.cpp assumes in silence (how scores are scaled, which
layers attend to a window, what becomes of the experts' probabilities) is checked here, since a file that says
otherwise would be read without an error and answer differently.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spillover.errors import ModelError

if TYPE_CHECKING:
    from spillover.export.rounding import Floats
    from spillover.models import ModelConfig
    from spillover.models.rope import Rope

__all__ = ["BY_FAMILY", "Architecture", "add_hyperparameters", "architecture", "context_of", "rope_tensors"]


@dataclass(frozen=True)
class Architecture:
    """What llama.cpp makes of a family.

    `interleaved` means that it rotates neighbouring pairs of a head's dimensions instead of its two halves,
    so that the rows of queries and keys change places; `windows` that it knows sliding windows, in all layers
    but each `period`-th.
    """

    name: str
    interleaved: bool = False
    windows: bool = False
    period: int = 0


BY_FAMILY = {
    "llama": Architecture("llama", interleaved=True),
    "mistral": Architecture("llama", interleaved=True),
    "mixtral": Architecture("llama", interleaved=True),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    "qwen3_moe": Architecture("qwen3moe"),
    "phi3": Architecture("phi3"),
    "gemma2": Architecture("gemma2", windows=True, period=2),
    "gemma3": Architecture("gemma3", windows=True, period=6),
}
"""By family; `architecture` also looks at what a model says beyond that."""
_WIDE = {"gemma2": 46, "gemma3": 62}
"""Layers of the largest model of a family, by which llama.cpp tells that its scores are scaled
differently."""


def architecture(config: ModelConfig) -> Architecture:
    """What llama.cpp calls the model; `ModelError` says what of it llama.cpp would compute otherwise."""
    found = BY_FAMILY.get(config.family)
    why = "its family" if found is None else _misread(config, found)
    if found is None or why:
        raise ModelError(
            f"this {config.architecture} model cannot be written as GGUF: llama.cpp does not know {why}",
            hint="--format safetensors",
        )
    return found


def context_of(config: ModelConfig, found: Architecture) -> int:
    """The longest sequence of which llama.cpp computes what the model computes.

    A sliding window that llama.cpp does not know makes no difference to sequences that are no longer.
    """
    if found.windows:
        return config.max_positions
    return min([config.max_positions, *(window for window in config.windows if window is not None)])


def add_hyperparameters(writer: Any, config: ModelConfig, found: Architecture) -> None:
    """Write what defines the model into a ``gguf.GGUFWriter``."""
    writer.add_block_count(config.layers)
    writer.add_context_length(context_of(config, found))
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_eps)
    writer.add_vocab_size(config.vocab_size)
    _add_positions(writer, config)
    if config.experts is not None:
        writer.add_expert_count(config.experts.count)
        writer.add_expert_used_count(config.experts.per_token)
        if found.name == "qwen3moe":
            writer.add_expert_feed_forward_length(config.experts.intermediate_size)
    if found.windows:
        writer.add_sliding_window(_window(config))
        writer.add_sliding_window_pattern(found.period)
    if config.attention_softcap is not None:
        writer.add_attn_logit_softcapping(config.attention_softcap)
    if config.logit_softcap is not None:
        writer.add_final_logit_softcapping(config.logit_softcap)


def rope_tensors(config: ModelConfig) -> dict[str, Floats]:
    """What the angles of each pair of dimensions are divided by, where a rule says so pair by pair."""
    import numpy as np

    rope = _everywhere(config)
    rule = rope.scaling or {}
    if rule.get("rope_type") == "llama3":
        return {"rope_freqs.weight": np.array(_llama3(rope), np.float32)}
    if rule.get("rope_type") == "longrope":
        return {
            f"rope_factors_{kind}.weight": np.array(rule[f"{kind}_factor"], np.float32)
            for kind in ("long", "short")
        }
    return {}


def _add_positions(writer: Any, config: ModelConfig) -> None:
    from gguf import RopeScalingType

    rope = _everywhere(config)
    writer.add_rope_dimension_count(rope.dim)
    writer.add_rope_freq_base(rope.theta)
    if config.family == "gemma3":
        writer.add_rope_freq_base_swa(_local(config).theta)
    rule = rope.scaling or {}
    kind = rule.get("rope_type")
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(RopeScalingType.LINEAR if kind == "linear" else RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rule["factor"])
    if kind in ("yarn", "longrope"):
        writer.add_rope_scaling_orig_ctx_len(rule["original_max_position_embeddings"])
    if kind == "longrope":
        writer.add_rope_scaling_attn_factors(rule["attention_factor"])


def _everywhere(config: ModelConfig) -> Rope:
    """The rotary embedding of the layers that see everything."""
    return config.ropes[-1] if config.family != "gemma3" else config.ropes[_of_pattern(config, 6, full=True)]


def _local(config: ModelConfig) -> Rope:
    """The rotary embedding of Gemma 3's layers with a window."""
    return config.ropes[_of_pattern(config, 6, full=False)]


def _of_pattern(config: ModelConfig, period: int, *, full: bool) -> int:
    layers = [layer for layer in range(config.layers) if _slides(layer, period) != full]
    return layers[0] if layers else 0


def _slides(layer: int, period: int) -> bool:
    """Whether llama.cpp gives `layer` a window."""
    return layer % period < period - 1


def _window(config: ModelConfig) -> int:
    given = config.raw.get("text_config") or config.raw
    return next((window for window in config.windows if window is not None), None) or int(
        given.get("sliding_window") or config.max_positions
    )


def _llama3(rope: Rope) -> list[float]:
    """Divisors by Llama 3.1's rule: 1 for fast pairs, ``factor`` for slow ones, and a blend between."""
    rule = rope.scaling or {}
    low, high, factor = (float(rule[key]) for key in ("low_freq_factor", "high_freq_factor", "factor"))
    context = float(rule["original_max_position_embeddings"])
    divisors = []
    for pair in range(rope.dim // 2):
        turns = context / (2 * math.pi * rope.theta ** (2 * pair / rope.dim))  # within the original context
        share = min(1.0, max(0.0, (turns - low) / (high - low)))
        divisors.append(1 / ((1 - share) / factor + share))
    return divisors


def _misread(config: ModelConfig, found: Architecture) -> str:
    """What of the model llama.cpp would compute otherwise; empty: nothing."""
    return _positions(config) or _scores(config, found) or _experts(config) or _layers(config, found)


def _positions(config: ModelConfig) -> str:
    kinds = {(rope.scaling or {}).get("rope_type") for rope in config.ropes}
    rule = config.ropes[-1].scaling or {}
    if config.family != "gemma3" and len(set(map(repr, config.ropes))) > 1:
        return "positions that differ from layer to layer"
    if "longrope" in kinds and config.family != "phi3":
        return "longrope positions of this family"
    if "llama3" in kinds and config.family not in ("llama", "mistral"):
        return "llama3 positions of this family"
    if rule.get("rope_type") == "yarn":
        usual = 0.1 * math.log(rule["factor"]) + 1.0
        plain = (rule["beta_fast"], rule["beta_slow"], rule["truncate"]) == (32.0, 1.0, True)
        if not plain or not math.isclose(rule["attention_factor"], usual, rel_tol=1e-6):
            return "yarn positions with these settings"
    if config.family == "gemma3" and config.layers >= 6 and _local(config).scaling is not None:
        return "scaled positions within windows"
    return ""


def _scores(config: ModelConfig, found: Architecture) -> str:
    width = config.head_dim
    if _WIDE.get(config.family) == config.layers:
        width = config.hidden_size // config.heads
    if not math.isclose(config.attention_scale, width**-0.5, rel_tol=1e-6):
        return f"its scale of attention scores (query_pre_attn_scalar {config.attention_scale**-2:g})"
    if config.family == "gemma2" and None in (config.attention_softcap, config.logit_softcap):
        return "Gemma 2 without soft-caps"
    if config.family == "gemma3" and (config.attention_softcap, config.logit_softcap) != (None, None):
        return "Gemma 3 with soft-caps"
    if config.activation != ("gelu_tanh" if found.windows else "silu"):
        return f"its activation {config.activation}"
    return ""


def _experts(config: ModelConfig) -> str:
    if config.experts is None:
        return "Qwen3-MoE without experts" if config.family == "qwen3_moe" else ""
    if len(config.experts.layers) < config.layers:
        return "a model with experts in some layers only"
    if not config.experts.normalized:
        return "experts whose probabilities are not normalised (norm_topk_prob false)"
    return ""


def _layers(config: ModelConfig, found: Architecture) -> str:
    if config.family == "phi3" and config.heads * config.head_dim != config.hidden_size:
        return "heads that are not as wide as the model together"
    if not found.windows:
        return ""
    if not config.tied:
        return "an untied head of this family"
    sliding = [window is not None for window in config.windows]
    if any(sliding) and sliding != [_slides(layer, found.period) for layer in range(config.layers)]:
        return f"sliding windows in other layers than all but each {found.period}th"
    if config.family == "gemma3" and not any(sliding) and _local(config) != _everywhere(config):
        return "" if _by_pattern(config) else "other positions in other layers than all but each 6th"
    return ""


def _by_pattern(config: ModelConfig) -> bool:
    """Whether the rotary embeddings follow llama.cpp's pattern."""
    return all(
        rope == (_local(config) if _slides(layer, 6) else _everywhere(config))
        for layer, rope in enumerate(config.ropes)
    )
