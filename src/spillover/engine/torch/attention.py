"""Attention over packed sequences (prefill, scoring, training) and of one token per row against the cache.

Queries, keys and values come as one tensor, ``[N, heads + 2 kv_heads, D]``. Query heads that share a key head
are adjacent, so that grouping them turns attention into larger products over fewer keys.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from spillover.engine.torch.native.training import HEAD, Within, kernels
from spillover.engine.torch.pointwise import capped
from spillover.engine.torch.sequences import attended
from spillover.engine.torch.tiles import Group, groups, tiled

if TYPE_CHECKING:
    from spillover.models import ModelConfig


class Attention(Protocol):
    """What a layer calls: rotated queries and keys, and values in, ``[N, heads * D]`` out."""

    def __call__(self, layer: int, heads: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Scoring:
    """How one layer scores keys: how many positions back a query sees, the scale, and the soft-cap."""

    window: int | None
    scale: float
    softcap: float | None

    @classmethod
    def of(cls, config: ModelConfig, layer: int) -> Scoring:
        """What `config` says of `layer`."""
        return cls(config.windows[layer], config.attention_scale, config.attention_softcap)


@dataclass(frozen=True)
class Causal:
    """Each sequence of a packed pass attends to itself; `lengths` sum to N."""

    lengths: Sequence[int]
    config: ModelConfig

    def __call__(self, layer: int, heads: Tensor) -> Tensor:
        scoring, keys = Scoring.of(self.config, layer), self.config.kv_heads
        if scoring.softcap is not None:
            return tiled(heads, groups(self.lengths), keys, scoring)
        packed = []
        for start, stop, count in self._runs():
            # [B, heads + 2 kv_heads, T, D]
            parts = heads[start:stop].view(count, -1, *heads.shape[1:]).transpose(1, 2)
            q, k, v = torch.split(parts, [self.config.heads, keys, keys], dim=1)
            mixed = _attend(q, k, v, scoring)
            packed.append(mixed.transpose(1, 2).reshape(stop - start, -1))
        return packed[0] if len(packed) == 1 else torch.cat(packed)

    def _runs(self) -> Iterator[tuple[int, int, int]]:
        """(start, stop, sequences) of neighbours of equal length, which go through one call."""
        start = 0
        for length, equal in itertools.groupby(self.lengths):
            count = sum(1 for _ in equal)
            yield start, start + count * length, count
            start += count * length


class Tiled:
    """`Causal` for training on a CPU; rows after the last of `lengths` are padding and come out zero."""

    def __init__(self, lengths: Sequence[int], config: ModelConfig) -> None:
        self._lengths = lengths
        self._within = Within(lengths)
        self._config = config

    @cached_property
    def _groups(self) -> list[Group]:
        return groups(self._lengths)

    def __call__(self, layer: int, heads: Tensor) -> Tensor:
        scoring, keys = Scoring.of(self._config, layer), self._config.kv_heads
        if heads.shape[-1] <= HEAD and (native := kernels(heads)) is not None:
            return attended(native, heads, self._within, keys, scoring)
        return tiled(heads, self._groups, keys, scoring)


def _attend(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
    """``q`` ``[B, heads, T, D]`` over ``k`` and ``v`` ``[B, kv, T, D]``."""
    length, scale = q.shape[2], scoring.scale
    if scoring.window is None or length <= scoring.window:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    seen = visible(torch.arange(length, device=q.device), length, scoring.window)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=True)


def visible(positions: Tensor, length: int, window: int | None) -> Tensor:
    """Which of `length` keys each position sees: bool ``[..., length]``."""
    keys = torch.arange(length, device=positions.device)
    seen = keys <= positions.unsqueeze(-1)
    return seen if window is None else seen & (keys > positions.unsqueeze(-1) - window)


def grouped(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scoring: Scoring) -> Tensor:
    """One new token per row: the heads that share a key head are the queries of one product.

    ``q`` ``[n, kv, G, D]``, ``k`` and ``v`` ``[n, kv, L, D]``, ``bias`` ``[n, 1, 1, L]`` (0 or minus
    infinity). The grouping makes torch's kernel read each key once; with one query per head it reads it G
    times. `bias` already holds the window.
    """
    if scoring.softcap is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scoring.scale)
    scores = capped((q * scoring.scale) @ k.transpose(-1, -2), scoring.softcap).add_(bias)
    return torch.softmax(scores, dim=-1) @ v
