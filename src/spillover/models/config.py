"""``config.json`` of a supported model family as one frozen, engine-independent record."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

from spillover.errors import ModelError
from spillover.models.families import FAMILIES, Family
from spillover.models.rope import Rope, kind_of

Activation: TypeAlias = Literal["silu", "gelu_tanh"]
_ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_FULL, _SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class Experts:
    """Feed-forward experts (Shazeer et al., arXiv 1701.06538): a token goes through `per_token` of `count`.

    `normalized` means that the chosen experts' probabilities are scaled to sum to one. `layers` are the
    numbers of the layers that have experts; the others are dense.
    """

    count: int
    per_token: int
    intermediate_size: int
    normalized: bool
    layers: frozenset[int]


@dataclass(frozen=True)
class ModelConfig:
    """The numbers that define a decoder-only transformer of a supported family.

    Per layer: `windows` is how many tokens back attention reaches, itself included (None: all), `ropes` the
    rotary embedding. `attention_bias` means that the query, key and value projections have a bias; `qk_norm`
    that queries and keys are RMS-normalised per head before the rotation; `fused` that the file has one
    matrix for them and one for gate and up.

    `norm_offset` is added to every stored norm weight; `output_norms` are further norms, of what attention
    and feed-forward layers add to the residual. Embeddings are multiplied by `embedding_scale` and scores by
    `attention_scale`; a soft-cap ``c`` turns scores or logits ``x`` into ``c tanh(x / c)``.

    `prefix` is what the names of the decoder's tensors begin with. `dtype` is that of the stored weights:
    ``bfloat16``, ``float16`` or ``float32``.
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
    activation: Activation
    rms_eps: float
    norm_offset: float
    output_norms: bool
    embedding_scale: float
    attention_scale: float
    attention_softcap: float | None
    logit_softcap: float | None
    windows: tuple[int | None, ...]
    ropes: tuple[Rope, ...]
    max_positions: int
    tied: bool
    attention_bias: bool
    qk_norm: bool
    fused: bool
    experts: Experts | None
    prefix: str
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
        except (TypeError, ValueError, ZeroDivisionError, AttributeError) as error:
            raise ModelError(f"{path} holds a value of the wrong kind: {error}") from None

    @classmethod
    def parse(cls, raw: dict[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
        """Build the record from parsed JSON; ``KeyError`` names a missing key."""
        architecture, family, given = _family(raw)
        _refuse(architecture, family, given)
        heads, layers = int(given["num_attention_heads"]), int(given["num_hidden_layers"])
        hidden = int(given["hidden_size"])
        head_dim = int(given.get("head_dim") or hidden // heads)
        ropes = _ropes(architecture, family, given, head_dim)
        kinds = _kinds(architecture, family, given, layers)
        positions = max(int(given["max_position_embeddings"]), *(rope.reach for rope in ropes.values()))
        scalar = given["query_pre_attn_scalar"] if "query_pre_attn_scalar" in family.defaults else head_dim
        return cls(
            family=family.name,
            architecture=architecture,
            vocab_size=int(given["vocab_size"]),
            hidden_size=hidden,
            intermediate_size=int(given["intermediate_size"]),
            layers=layers,
            heads=heads,
            kv_heads=int(given.get("num_key_value_heads") or heads),
            head_dim=head_dim,
            activation=_ACTIVATIONS[_activation(given)],
            rms_eps=float(given["rms_norm_eps"]),
            norm_offset=float(family.offset_norms),
            output_norms=family.output_norms,
            embedding_scale=hidden**0.5 if family.scaled_embedding else 1.0,
            attention_scale=float(scalar) ** -0.5,
            attention_softcap=_softcap(family, given, "attn_logit_softcapping"),
            logit_softcap=_softcap(family, given, "final_logit_softcapping"),
            windows=tuple(_window(given, kind, positions) for kind in kinds),
            ropes=tuple(ropes[kind] for kind in kinds),
            max_positions=positions,
            tied=bool(given.get("tie_word_embeddings", False)),
            attention_bias=family.attention_bias,
            qk_norm=family.qk_norm,
            fused=family.fused,
            experts=_experts(family, given, layers),
            prefix="language_model.model." if family.multimodal else "model.",
            dtype=str(given.get("dtype") or given.get("torch_dtype") or "float32").removeprefix("torch."),
            bos_id=raw.get("bos_token_id", given.get("bos_token_id")),
            eos_ids=_ids(generation.get("eos_token_id"), raw.get("eos_token_id"), given.get("eos_token_id")),
            raw=raw,
        )

    def within(self, length: int) -> ModelConfig:
        """The model as it computes sequences of up to `length` tokens: LongRoPE has two sets of angles.

        One choice for all sequences, as servers make it, so that no answer depends on those beside it.
        """
        return replace(self, ropes=tuple(rope.within(length) for rope in self.ropes))

    def sparse(self, layer: int) -> bool:
        """Whether `layer` has experts instead of one feed-forward block."""
        return self.experts is not None and layer in self.experts.layers


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


def _family(raw: dict[str, Any]) -> tuple[str, Family, dict[str, Any]]:
    """The architecture, its family, and ``config.json`` with the family's defaults behind it."""
    named = raw.get("architectures") or [f"of type {raw.get('model_type', 'unknown')}"]
    architecture = str(named[0])
    if architecture not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise ModelError(
            f"architecture {architecture} is not supported: no engine has its layers",
            hint=f"use one of {known}",
        )
    family = FAMILIES[architecture]
    outer = {key: raw[key] for key in ("dtype", "torch_dtype", "quantization_config") if key in raw}
    own = raw["text_config"] if family.multimodal else raw
    return architecture, family, {**family.defaults, **outer, **own}


def _refuse(architecture: str, family: Family, given: dict[str, Any]) -> None:
    """Refuse what the families may say in config.json and no engine computes."""
    why = None
    if given.get("quantization_config"):
        method = given["quantization_config"].get("quant_method", "unknown")
        why = f"its weights are quantized ({method})"
    elif _activation(given) not in _ACTIVATIONS:
        why = f"its activation is {_activation(given)}, not {' or '.join(_ACTIVATIONS)}"
    elif not family.attention_bias and given.get("attention_bias"):
        why = "its attention has biases"
    elif given.get("mlp_bias"):
        why = "its feed-forward layers have biases"
    elif given.get("use_bidirectional_attention"):
        why = "its tokens attend to later ones (use_bidirectional_attention)"
    elif not family.partial_rotary and _rotated(given) != 1:
        why = "only a part of each head is rotated (partial_rotary_factor)"
    if why:
        raise ModelError(
            f"this {architecture} model is not supported: {why}", hint="use the family's plain bf16 release"
        )


def _activation(given: dict[str, Any]) -> str:
    return str(given.get("hidden_activation") or given.get("hidden_act") or "silu")


def _rule(given: dict[str, Any]) -> dict[str, Any]:
    """What says how positions are encoded, from either spelling.

    Older files have ``rope_theta`` beside ``rope_scaling``; transformers 5 writes both into
    ``rope_parameters``.
    """
    return {**(given.get("rope_scaling") or {}), **(given.get("rope_parameters") or {})}


def _rotated(given: dict[str, Any]) -> float:
    """The share of each head that is rotated."""
    share = _rule(given).get("partial_rotary_factor", given.get("partial_rotary_factor"))
    return 1.0 if share is None else float(share)


def _ropes(architecture: str, family: Family, given: dict[str, Any], head_dim: int) -> dict[str, Rope]:
    """The rotary embedding of each kind of layer."""
    rule = _rule(given)
    theta = float(given.get("rope_theta") or 1e4)
    rules = {kind: (dict(rule.get(kind) or rule), theta) for kind in (_FULL, _SLIDING)}
    local = given.get("rope_local_base_freq")
    if local is not None:
        # what rope_scaling says in an older file is for the layers that see everything
        rules[_SLIDING] = (dict(rule.get(_SLIDING) or {}), float(local))
    ropes = {}
    for kind, (one, base) in rules.items():
        if family.name == "phi3":
            one["original_max_position_embeddings"] = given["original_max_position_embeddings"]
            if kind_of(one) == "yarn":  # what the first files of the family call longrope
                one["rope_type"] = "longrope"
        dim = int(head_dim * _rotated(given))
        rope = Rope.parse(one, base, dim, int(given["max_position_embeddings"]))
        if rope is None:
            raise ModelError(
                f"this {architecture} model is not supported: its positions are scaled by the rule "
                f"{kind_of(one)!r}",
                hint="remove rope_scaling from config.json to use the model within its original context",
            )
        ropes[kind] = rope
    return ropes


def _kinds(architecture: str, family: Family, given: dict[str, Any], layers: int) -> list[str]:
    """``full_attention`` or ``sliding_attention`` for each layer."""
    used = "when used" not in family.windows or given.get("use_sliding_window")
    named = given.get("layer_types")
    if family.windows == "never" or not used:
        return [_FULL] * layers
    if not family.windows.startswith("by layer"):
        return [_FULL if set(named or ()) == {_FULL} else _SLIDING] * layers
    if named is None and "sliding_window_pattern" in given:
        pattern = int(given.get("_sliding_window_pattern") or given["sliding_window_pattern"])
        named = [_SLIDING if (layer + 1) % pattern else _FULL for layer in range(layers)]
    elif named is None:
        first = int(given["max_window_layers"])
        named = [_SLIDING if layer >= first else _FULL for layer in range(layers)]
    other = next((kind for kind in named if kind not in (_FULL, _SLIDING)), None)
    if other is not None or len(named) < layers:
        raise ModelError(
            f"this {architecture} model is not supported: its layers are of kind "
            f"{other or f'{len(named)} layer_types for {layers} layers'}",
            hint=f"layer_types in config.json can be {_FULL} or {_SLIDING}, one for each layer",
        )
    return list(named)[:layers]


def _window(given: dict[str, Any], kind: str, positions: int) -> int | None:
    """The window in tokens; None where it is wider than any sequence can be."""
    window = given.get("sliding_window")
    return int(window) if kind == _SLIDING and window and int(window) < positions else None


def _softcap(family: Family, given: dict[str, Any], key: str) -> float | None:
    value = given.get(key) if family.softcaps else None
    return None if value is None else float(value)


def _experts(family: Family, given: dict[str, Any], layers: int) -> Experts | None:
    if "num_experts_per_tok" not in family.defaults:
        return None
    count = int(given.get("num_local_experts") or given["num_experts"])  # newer files, older ones
    if not count:
        return None
    step, dense = int(given.get("decoder_sparse_step") or 1), given.get("mlp_only_layers") or ()
    return Experts(
        count=count,
        per_token=int(given["num_experts_per_tok"]),
        intermediate_size=int(given.get("moe_intermediate_size") or given["intermediate_size"]),
        normalized=bool(given["norm_topk_prob"]),
        layers=frozenset(layer for layer in range(layers) if (layer + 1) % step == 0 and layer not in dense),
    )


def _ids(*values: Any) -> tuple[int, ...]:
    """The union, in order, of single ids, lists of ids and None."""
    found: dict[int, None] = {}
    for value in values:
        for one in value if isinstance(value, list) else [value]:
            if one is not None:
                found[int(one)] = None
    return tuple(found)
