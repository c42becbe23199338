"""Attention over packed sequences (prefill, scoring, training) and of one token per row against the cache.

Queries, keys and values come as one tensor, ``[N, heads + 2 kv_heads, D]``. Query heads that share a key head
are adjacent, so that grouping them turns attention into larger products over fewer keys.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from spillover.engine.torch.pointwise import capped

if TYPE_CHECKING:
    from spillover.models import ModelConfig

_TILE = 128  # queries at once in training: bounds the score matrix and skips most of the masked half


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


def _attend(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
    """``q`` ``[B, heads, T, D]`` over ``k`` and ``v`` ``[B, kv, T, D]``."""
    if scoring.softcap is not None or (q.requires_grad and q.device.type == "cpu"):
        return _TiledCausal.apply(q, k, v, scoring)  # type: ignore[no-untyped-call, no-any-return]
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


class _TiledCausal(torch.autograd.Function):
    """Causal attention of ``q`` ``[B, heads, T, D]`` over ``k`` and ``v`` ``[B, kv, T, D]``, in tiles.

    The backward recomputes each tile's probabilities. torch's own CPU kernel takes three times as long there,
    and none has soft-caps.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        ctx.save_for_backward(q, k, v)
        ctx.scoring = scoring
        out = torch.empty_like(q)
        for tile in _tiles(q, k, scoring):
            mixed = tile.probabilities(tile.scores(q, k)) @ v[:, :, tile.first : tile.stop]
            tile.of(out).copy_(mixed.view_as(tile.of(out)))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v = ctx.saved_tensors
        by_q = torch.empty_like(q)
        # several tiles add to the same keys: in float32
        by_k, by_v = torch.zeros_like(k, dtype=torch.float32), torch.zeros_like(v, dtype=torch.float32)
        for tile in _tiles(q, k, ctx.scoring):
            keys = slice(tile.first, tile.stop)
            scores = tile.scores(q, k)
            slope = tile.slope(scores)  # before the mask changes them
            p = tile.probabilities(scores)
            out_grad = tile.group(grad)
            by_v[:, :, keys] += p.transpose(-1, -2) @ out_grad
            by_p = out_grad @ v[:, :, keys].transpose(-1, -2)
            by_scores = torch._softmax_backward_data(by_p, p, -1, p.dtype).mul_(tile.scoring.scale)
            if slope is not None:
                by_scores.mul_(slope)
            tile.of(by_q).copy_((by_scores @ k[:, :, keys]).view_as(tile.of(by_q)))
            by_k[:, :, keys] += by_scores.transpose(-1, -2) @ tile.group(q)
        return by_q, by_k.to(k.dtype), by_v.to(v.dtype), None


@dataclass(frozen=True)
class _Tile:
    """Queries ``[start, stop)`` and the keys ``[first, stop)`` that they see."""

    start: int
    stop: int
    first: int
    groups: int
    scoring: Scoring
    hidden: Tensor  # bool [stop - start, stop - first]: keys that a query does not see

    def of(self, x: Tensor) -> Tensor:
        """The tile of ``[B, heads, T, D]`` as ``[B, kv, G, t, D]``, a view."""
        return x.view(len(x), -1, self.groups, *x.shape[2:])[:, :, :, self.start : self.stop]

    def group(self, x: Tensor) -> Tensor:
        """The tile of ``[B, heads, T, D]`` with a group's queries in one matrix, ``[B, kv, G t, D]``."""
        return self.of(x).flatten(2, 3)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        """Scaled and capped products, before the mask, ``[B, kv, G t, keys]``."""
        products = (self.group(q) * self.scoring.scale) @ k[:, :, self.first : self.stop].transpose(-1, -2)
        return capped(products, self.scoring.softcap)

    def slope(self, scores: Tensor) -> Tensor | None:
        """The derivative of the soft-cap at `scores`, which have gone through it; None without one."""
        cap = self.scoring.softcap
        return None if cap is None else 1 - (scores / cap).square_()

    def probabilities(self, scores: Tensor) -> Tensor:
        """Softmax of the tile's `scores`, which are masked in place."""
        by_query = scores.view(*scores.shape[:2], self.groups, -1, scores.shape[-1])
        by_query.masked_fill_(self.hidden, -torch.inf)
        return torch.softmax(scores, dim=-1)


def _tiles(q: Tensor, k: Tensor, scoring: Scoring) -> Iterator[_Tile]:
    length, window = q.shape[2], scoring.window
    for start in range(0, length, _TILE):
        stop = min(start + _TILE, length)
        first = 0 if window is None else max(0, start - window + 1)
        seen = visible(torch.arange(start, stop, device=q.device), stop, window)[:, first:]
        yield _Tile(start, stop, first, q.shape[1] // k.shape[1], scoring, ~seen)
