"""Rotary position embedding (Su et al., arXiv 2104.09864) with Llama 3's frequency scaling."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from spillover.errors import ModelError

if TYPE_CHECKING:
    from spillover.models import ModelConfig


def frequencies(config: ModelConfig) -> Tensor:
    """Angle per position of each pair of dimensions, float32 ``[D/2]``."""
    steps = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    inverse = 1.0 / (config.rope_theta**steps)
    if config.rope_scaling is None:
        return inverse
    kind = config.rope_scaling.get("rope_type")
    if kind != "llama3":
        raise ModelError(f"positions scaled by the rule {kind!r} cannot be computed")
    return _llama3(inverse, config.rope_scaling)


def _llama3(inverse: Tensor, rule: dict[str, Any]) -> Tensor:
    """Slow frequencies divided by ``factor``, fast ones kept, those between interpolated (Llama 3.1)."""
    low, high = float(rule["low_freq_factor"]), float(rule["high_freq_factor"])
    context = float(rule["original_max_position_embeddings"])
    wavelength = 2 * math.pi / inverse
    blend = (context / wavelength - low) / (high - low)
    slowed = inverse / float(rule["factor"])
    between = (1 - blend) * slowed + blend * inverse
    scaled = torch.where(wavelength > context / low, slowed, between)
    return torch.where(wavelength < context / high, inverse, scaled)


class Rotary:
    """Cosine and signed sine by position, computed in float32 and kept in the compute dtype."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self._frequencies = frequencies(config)
        self._dtype = dtype
        self._device = device
        self._cos = self._sin = torch.empty(0)

    def __call__(self, positions: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Tables ``[N, 1, D]`` for `positions`, int64 ``[N]``, all below `length`."""
        if len(self._cos) < length:
            self._extend(length)
        return self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)

    def _extend(self, length: int) -> None:
        length = max(length, 2 * len(self._cos), 256)
        angles = torch.outer(torch.arange(length, dtype=torch.float32), self._frequencies)
        sin = angles.sin()
        self._cos = angles.cos().repeat(1, 2).to(self._device, self._dtype)
        # the first half is rotated against the second: x1 cos - x2 sin, x2 cos + x1 sin
        self._sin = torch.cat((-sin, sin), dim=-1).to(self._device, self._dtype)
