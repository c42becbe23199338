"""``config.json`` of a supported model family as one frozen, engine-independent record."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spillover.errors import ModelError

# architecture -> family, and what the family's own configuration class assumes where config.json is silent
_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "LlamaForCausalLM": ("llama", {"rms_norm_eps": 1e-6, "max_position_embeddings": 2048}),
    "MistralForCausalLM": (
        "mistral",
        {
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "sliding_window": 4096,
        },
    ),
    "Qwen2ForCausalLM": (
        "qwen2",
        {"rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "num_key_value_heads": 32},
    ),
    "Qwen3ForCausalLM": (
        "qwen3",
        {"rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "num_key_value_heads": 32, "head_dim": 128},
    ),
}
_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


@dataclass(frozen=True)
class ModelConfig:
    """The numbers that define a decoder-only transformer of a supported family.

    ``attention_bias`` means that the query, key and value projections have a bias; ``qk_norm`` that queries
    and keys are RMS-normalised per head before the rotation. ``rope_scaling`` is None or the ``llama3`` rule
    with its four numbers. ``sliding_window`` counts tokens, in every layer. ``dtype`` is that of the stored
    weights: ``bfloat16``, ``float16`` or ``float32``.
    """

    family: str
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rms_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    max_positions: int
    tied: bool
    attention_bias: bool
    qk_norm: bool
    sliding_window: int | None
    dtype: str
    bos_id: int | None
    eos_ids: tuple[int, ...]
    raw: dict[str, Any] = field(repr=False)

    @classmethod
    def read(cls, folder: Path) -> ModelConfig:
        """Read ``config.json`` and, where there is one, ``generation_config.json`` of a model folder.

        Raises `ModelError` for a missing or damaged file and for a model that no engine supports, naming why.
        """
        path = folder / "config.json"
        generation = folder / "generation_config.json"
        raw = read_json(path)
        try:
            return cls.parse(raw, read_json(generation) if generation.exists() else {})
        except KeyError as error:
            raise ModelError(f"{path} has no key {error}", hint="get the model's folder again") from None
        except (TypeError, ValueError, ZeroDivisionError) as error:
            raise ModelError(f"{path} holds a value of the wrong kind: {error}") from None

    @classmethod
    def parse(cls, raw: dict[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
        """Build the record from parsed JSON; ``KeyError`` names a missing key."""
        architecture, family, given = _family(raw)
        _refuse(architecture, given)
        theta, scaling = _rope(architecture, given)
        heads = int(given["num_attention_heads"])
        return cls(
            family=family,
            architecture=architecture,
            vocab_size=int(given["vocab_size"]),
            hidden_size=int(given["hidden_size"]),
            intermediate_size=int(given["intermediate_size"]),
            layers=int(given["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(given.get("num_key_value_heads") or heads),
            head_dim=int(given.get("head_dim") or int(given["hidden_size"]) // heads),
            rms_eps=float(given["rms_norm_eps"]),
            rope_theta=theta,
            rope_scaling=scaling,
            max_positions=int(given["max_position_embeddings"]),
            tied=bool(given.get("tie_word_embeddings", False)),
            attention_bias=family == "qwen2",
            qk_norm=family == "qwen3",
            sliding_window=_window(architecture, family, given),
            dtype=str(given.get("dtype") or given.get("torch_dtype") or "float32").removeprefix("torch."),
            bos_id=given.get("bos_token_id"),
            eos_ids=_ids(generation.get("eos_token_id"), given.get("eos_token_id")),
            raw=raw,
        )


def read_json(path: Path) -> dict[str, Any]:
    """One JSON object from `path`; `ModelError` when it is missing, damaged or of another shape."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelError(
            f"{path} is missing", hint="point at a folder with config.json, tokenizer.json and safetensors"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not JSON: {error}", hint="get the file again") from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds {type(value).__name__}, not an object", hint="get the file again")
    return value


def _family(raw: dict[str, Any]) -> tuple[str, str, dict[str, Any]]:
    named = raw.get("architectures") or [f"of type {raw.get('model_type', 'unknown')}"]
    architecture = str(named[0])
    if architecture not in _FAMILIES:
        known = ", ".join(sorted(_FAMILIES))
        raise ModelError(
            f"architecture {architecture} is not supported: no engine has its layers",
            hint=f"use one of {known}",
        )
    family, defaults = _FAMILIES[architecture]
    return architecture, family, {**defaults, **raw}


def _refuse(architecture: str, given: dict[str, Any]) -> None:
    """Refuse what the four families may say in config.json and no engine computes."""
    why = None
    if given.get("quantization_config"):
        method = given["quantization_config"].get("quant_method", "unknown")
        why = f"its weights are quantized ({method})"
    elif given.get("hidden_act", "silu") not in ("silu", "swish"):
        why = f"its activation is {given['hidden_act']}, not silu"
    elif architecture != "Qwen2ForCausalLM" and given.get("attention_bias"):
        why = "its attention has biases"
    elif given.get("mlp_bias"):
        why = "its feed-forward layers have biases"
    elif given.get("partial_rotary_factor", 1.0) not in (1, None):
        why = "only a part of each head is rotated (partial_rotary_factor)"
    if why:
        raise ModelError(
            f"this {architecture} model is not supported: {why}", hint="use the family's plain bf16 release"
        )


def _rope(architecture: str, given: dict[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """Base and scaling of the rotary embedding, from either spelling.

    Older files have ``rope_theta`` beside ``rope_scaling``; transformers 5 writes both into
    ``rope_parameters``.
    """
    rule = {**(given.get("rope_scaling") or {}), **(given.get("rope_parameters") or {})}
    theta = float(rule.get("rope_theta") or given.get("rope_theta") or 10000.0)
    kind = rule.get("rope_type") or rule.get("type") or "default"
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise ModelError(
            f"this {architecture} model is not supported: its positions are scaled by the rule {kind!r}",
            hint="remove rope_scaling from config.json to use the model within its original context",
        )
    missing = [key for key in _LLAMA3 if key not in rule]
    if missing:
        raise KeyError(f"rope_scaling.{missing[0]}")
    return theta, {"rope_type": "llama3", **{key: rule[key] for key in _LLAMA3}}


def _window(architecture: str, family: str, given: dict[str, Any]) -> int | None:
    """The attention window in tokens when all layers share one; None for full attention."""
    kinds = set(given.get("layer_types") or ())
    window = given.get("sliding_window")
    if family == "llama" or window is None or kinds == {"full_attention"}:
        return None
    if family == "mistral" or kinds == {"sliding_attention"}:
        return int(window)
    if len(kinds) > 1 or given.get("use_sliding_window"):
        raise ModelError(
            f"this {architecture} model is not supported: some of its layers attend to a window only",
            hint="set use_sliding_window to false in config.json to attend to everything",
        )
    return None


def _ids(*values: Any) -> tuple[int, ...]:
    """The union, in order, of single ids, lists of ids and None."""
    found: dict[int, None] = {}
    for value in values:
        for one in value if isinstance(value, list) else [value]:
            if one is not None:
                found[int(one)] = None
    return tuple(found)
