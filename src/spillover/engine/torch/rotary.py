"""Rotary position embedding (Su et al., arXiv 2104.09864) and the rules that stretch it to long contexts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from spillover.errors import ModelError

if TYPE_CHECKING:
    from spillover.models import ModelConfig
    from spillover.models.rope import Rope


def frequencies(rope: Rope) -> Tensor:
    """Angle per position of each pair of dimensions, float32 ``[dim/2]``."""
    steps = torch.arange(0, rope.dim, 2, dtype=torch.int64).float() / rope.dim
    inverse = 1.0 / (rope.theta**steps)
    if rope.scaling is None:
        return inverse
    kind = rope.scaling["rope_type"]
    if kind == "linear":
        return inverse / float(rope.scaling["factor"])
    if kind == "llama3":
        return _llama3(inverse, rope.scaling)
    if kind == "yarn":
        return _yarn(inverse, rope)
    if kind == "longrope" and "factors" in rope.scaling:
        factors = torch.tensor(rope.scaling["factors"], dtype=torch.float32)
        return 1.0 / (factors * rope.theta**steps)
    raise ModelError(f"positions scaled by the rule {kind!r} cannot be computed")


def _llama3(inverse: Tensor, rule: Mapping[str, Any]) -> Tensor:
    """Slow frequencies divided by ``factor``, fast ones kept, those between interpolated (Llama 3.1)."""
    low, high = float(rule["low_freq_factor"]), float(rule["high_freq_factor"])
    context = float(rule["original_max_position_embeddings"])
    wavelength = 2 * math.pi / inverse
    blend = (context / wavelength - low) / (high - low)
    slowed = inverse / float(rule["factor"])
    between = (1 - blend) * slowed + blend * inverse
    scaled = torch.where(wavelength > context / low, slowed, between)
    return torch.where(wavelength < context / high, inverse, scaled)


def _yarn(inverse: Tensor, rope: Rope) -> Tensor:
    """Between two pairs of dimensions, a ramp from frequencies as they are to frequencies over ``factor``.

    The pairs are those that turn ``beta_fast`` and ``beta_slow`` times within the original context (Peng et
    al., arXiv 2309.00071, section 3.2).
    """
    rule = rope.scaling or {}

    def pair(turns: float) -> float:
        context = float(rule["original_max_position_embeddings"])
        return rope.dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    first, last = pair(rule["beta_fast"]), pair(rule["beta_slow"])
    if rule["truncate"]:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rope.dim - 1)
    ramp = (torch.arange(rope.dim // 2, dtype=torch.float32) - first) / (last - first or 0.001)
    slow = ramp.clamp(0, 1)
    return inverse / float(rule["factor"]) * slow + inverse * (1 - slow)


def table(rope: Rope, length: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine of each pair of dimensions at `length` positions, float32 ``[length, dim/2]``.

    Both are multiplied by the rule's ``attention_factor``, if it has one.
    """
    angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies(rope))
    size = float((rope.scaling or {}).get("attention_factor", 1.0))
    return angles.cos() * size, angles.sin() * size


def tables(config: ModelConfig, length: int) -> list[tuple[Tensor, Tensor]]:
    """`table` for each layer; layers with the same embedding share one."""
    made: list[tuple[Tensor, Tensor]] = []
    for layer, rope in enumerate(config.ropes):
        first = config.ropes.index(rope)
        made.append(table(rope, length) if first == layer else made[first])
    return made


class Rotary:
    """Cosine and signed sine by position, computed in float32 and kept in the compute dtype."""

    def __init__(self, rope: Rope, dtype: torch.dtype, device: torch.device) -> None:
        self._rope = rope
        self._dtype = dtype
        self._device = device
        self._cos = self._sin = torch.empty(0)

    def __call__(self, positions: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Tables ``[N, 1, dim]`` for `positions`, int64 ``[N]``, all below `length`."""
        cos, sin = self.reach(length)
        return cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)

    def reach(self, length: int) -> tuple[Tensor, Tensor]:
        """The whole tables, ``[at least length, dim]``; longer ones replace them once they are too short."""
        if len(self._cos) < length:
            self._extend(length)
        return self._cos, self._sin

    def _extend(self, length: int) -> None:
        length = max(length, 2 * len(self._cos), 256)
        cos, sin = table(self._rope, length)
        self._cos = cos.repeat(1, 2).to(self._device, self._dtype)
        # the first half is rotated against the second: x1 cos - x2 sin, x2 cos + x1 sin
        self._sin = torch.cat((-sin, sin), dim=-1).to(self._device, self._dtype)
