"""Rotary position embeddings (Su et al., arXiv 2104.09864) as ``config.json`` describes them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


@dataclass(frozen=True)
class Rope:
    """One rotary embedding: the first `dim` of a head's dimensions turn, by angles that start from `theta`.

    `scaling` is None or has ``rope_type`` and the numbers of its rule, all present: ``linear`` (factor),
    ``llama3``, ``yarn`` (Peng et al., arXiv 2309.00071) or ``longrope`` (Ding et al., arXiv 2402.13753). A
    ``longrope`` has ``short_factor`` and ``long_factor`` until `within` chooses between them and leaves
    ``factors``.
    """

    theta: float
    dim: int
    scaling: Mapping[str, Any] | None = None

    @classmethod
    def parse(cls, rule: Mapping[str, Any], theta: float, dim: int, max_positions: int) -> Rope | None:
        """From a ``rope_parameters`` or ``rope_scaling`` object; None for a rule that is not known.

        Where the object is silent, `max_positions` is the original context. ``KeyError`` names a missing key.
        """
        kind = kind_of(rule)
        theta = float(rule.get("rope_theta") or theta)
        if kind == "default":
            return cls(theta, dim)
        parse = {"linear": _linear, "llama3": _llama3, "yarn": _yarn, "longrope": _longrope}.get(kind)
        return None if parse is None else cls(theta, dim, parse(rule, max_positions))

    def within(self, length: int) -> Rope:
        """The embedding that sequences of up to `length` tokens use."""
        if self.scaling is None or "short_factor" not in self.scaling:
            return self
        rule = self.scaling
        long = length > rule["original_max_position_embeddings"]
        factors = rule["long_factor" if long else "short_factor"]
        attention = rule["attention_factor"]
        chosen = {"rope_type": "longrope", "factors": factors, "attention_factor": attention}
        return replace(self, scaling=chosen)

    @property
    def reach(self) -> int:
        """Tokens that the rule itself extends the context to; 0 if it says nothing of that."""
        if self.scaling is None or self.scaling["rope_type"] != "yarn":
            return 0
        return int(self.scaling["factor"] * self.scaling["original_max_position_embeddings"])


def kind_of(rule: Mapping[str, Any]) -> str:
    """The name of a rule; ``su`` is an older name of ``longrope``."""
    kind = str(rule.get("rope_type") or rule.get("type") or "default")
    return "longrope" if kind == "su" else kind


def _number(rule: Mapping[str, Any], key: str) -> float:
    if rule.get(key) is None:
        raise KeyError(f"rope_scaling.{key}")
    return float(rule[key])


def _linear(rule: Mapping[str, Any], max_positions: int) -> dict[str, Any]:
    return {"rope_type": "linear", "factor": _number(rule, "factor")}


def _llama3(rule: Mapping[str, Any], max_positions: int) -> dict[str, Any]:
    for key in _LLAMA3:
        _number(rule, key)
    return {"rope_type": "llama3", **{key: rule[key] for key in _LLAMA3}}


def _yarn(rule: Mapping[str, Any], max_positions: int) -> dict[str, Any]:
    original = int(rule.get("original_max_position_embeddings") or max_positions)
    factor = float(rule.get("factor") or max_positions / original)
    attention = rule.get("attention_factor")
    if attention is None:
        scale, whole = rule.get("mscale"), rule.get("mscale_all_dim")
        both = bool(scale and whole)
        attention = _mscale(factor, scale) / _mscale(factor, whole) if both else _mscale(factor, 1.0)
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original,
        "attention_factor": float(attention),
        "beta_fast": float(rule.get("beta_fast") or 32.0),
        "beta_slow": float(rule.get("beta_slow") or 1.0),
        "truncate": bool(rule.get("truncate", True)),
    }


def _mscale(factor: float, scale: float | None) -> float:
    return 0.1 * float(scale or 1.0) * math.log(factor) + 1.0 if factor > 1 else 1.0


def _longrope(rule: Mapping[str, Any], max_positions: int) -> dict[str, Any]:
    original = int(rule.get("original_max_position_embeddings") or max_positions)
    factor = float(rule.get("factor") or max_positions / original)
    attention = rule.get("attention_factor")
    if attention is None:
        attention = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    parsed: dict[str, Any] = {
        "rope_type": "longrope",
        "original_max_position_embeddings": original,
        "attention_factor": float(attention),
    }
    for key in ("short_factor", "long_factor"):
        if rule.get(key) is None:
            raise KeyError(f"rope_scaling.{key}")
        parsed[key] = tuple(float(one) for one in rule[key])
    return parsed
