"""Causal attention of the sequences of a packed pass, in tiles of queries, with its own backward.

Sequences of similar length go through one call: they lie side by side in a buffer, the longest first, so that
those which reach a tile of queries are a prefix of it. torch's own CPU kernel takes three times as long in
the backward, and none has soft-caps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from spillover.engine.torch.pointwise import capped

if TYPE_CHECKING:
    from spillover.engine.torch.attention import Scoring

_TILE = 64  # queries at once: bounds the score matrix and skips most of the masked half
KEPT_LENGTH = 256  # up to this length probabilities wait for the backward, beyond it they are computed again


@dataclass(frozen=True)
class Group:
    """Sequences of one call: where each begins in the pass, and its length, longest first."""

    starts: Sequence[int]
    lengths: Sequence[int]

    @property
    def span(self) -> int:
        """Positions of the buffer: few different numbers, because oneDNN keeps a kernel for each shape."""
        grain = 16 if self.lengths[0] <= _TILE else 32
        return -(-self.lengths[0] // grain) * grain

    def spread(self, packed: Tensor, heads: slice) -> Tensor:
        """`heads` of ``[N, heads, D]`` as ``[B, heads, T, D]``, zero after a sequence's end."""
        part = packed[:, heads]
        shape = (len(self.lengths), part.shape[1], self.span, part.shape[2])
        ragged = min(self.lengths) < self.span
        padded = part.new_zeros(shape) if ragged else part.new_empty(shape)
        torch._foreach_copy_(self._views(padded), self._slices(part))
        return padded

    def gather(self, padded: Tensor, packed: Tensor) -> None:
        """Write ``[B, heads, T, D]`` into this group's rows of ``[N, heads, D]``."""
        torch._foreach_copy_(self._slices(packed), self._views(padded))

    def _slices(self, packed: Tensor) -> list[Tensor]:
        places = zip(self.starts, self.lengths, strict=True)
        return [packed[start : start + length] for start, length in places]

    def _views(self, padded: Tensor) -> list[Tensor]:
        return [one[:, :length].transpose(0, 1) for one, length in zip(padded, self.lengths, strict=True)]


def groups(lengths: Sequence[int]) -> list[Group]:
    """Sequences that follow one another in a pass: none is shorter than half of its group's longest."""
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    found: list[Group] = []
    members: list[int] = []
    for one in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if members and 2 * lengths[one] < lengths[members[0]]:
            found.append(Group([starts[i] for i in members], [lengths[i] for i in members]))
            members = []
        members.append(one)
    found.append(Group([starts[i] for i in members], [lengths[i] for i in members]))
    return found


def tiled(heads: Tensor, within: Sequence[Group], kv_heads: int, scoring: Scoring) -> Tensor:
    """``[N, heads + 2 kv_heads, D]`` to ``[N, heads * D]``; rows that belong to no group come out zero."""
    return _Tiled.apply(heads, within, kv_heads, scoring)  # type: ignore[no-untyped-call, no-any-return]


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, heads: Tensor, within: Sequence[Group], kv_heads: int, scoring: Scoring) -> Tensor:
        out = _rows_like(heads, heads.shape[1] - 2 * kv_heads, within)
        ctx.args = (within, kv_heads, scoring)
        kept = []
        for group in within:
            call = _Call(group, heads, kv_heads, scoring)
            mixed = torch.empty_like(call.q)
            for tile in call.tiles():
                p = tile.probabilities()
                tile.of(mixed).copy_(torch.bmm(p, tile.v).view_as(tile.of(mixed)))
                if group.span <= KEPT_LENGTH and ctx.needs_input_grad[0]:
                    kept.append(p)
            group.gather(mixed, out)
        ctx.save_for_backward(heads, *kept)
        return out.flatten(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        heads, *kept = ctx.saved_tensors
        within, kv_heads, scoring = ctx.args
        by_heads = _rows_like(heads, heads.shape[1], within)
        grad = grad.view(len(heads), -1, heads.shape[2])
        waiting = iter(kept)
        for group in within:
            call = _Call(group, heads, kv_heads, scoring)
            group.gather(call.backward(grad, waiting), by_heads)
        return by_heads, None, None, None


def _rows_like(heads: Tensor, count: int, within: Sequence[Group]) -> Tensor:
    """``[N, count, D]``; zero where no group will write."""
    covered = sum(sum(group.lengths) for group in within)
    rows = heads.new_empty(len(heads), count, heads.shape[2])
    rows[covered:] = 0
    return rows


class _Call:
    """One group's queries ``[B, heads, T, D]``, keys and values ``[B kv, T, D]``."""

    def __init__(self, group: Group, heads: Tensor, kv_heads: int, scoring: Scoring) -> None:
        queries = heads.shape[1] - 2 * kv_heads
        self.group = group
        self.scoring = scoring
        self.kv_heads = kv_heads
        self.q = group.spread(heads, slice(queries))
        keys, values = slice(queries, queries + kv_heads), slice(queries + kv_heads, None)
        self.k, self.v = (group.spread(heads, one).flatten(0, 1) for one in (keys, values))

    def tiles(self) -> Iterator[_Tile]:
        span, window = self.group.span, self.scoring.window
        for start in range(0, span, _TILE):
            stop = min(start + _TILE, span)
            first = 0 if window is None else max(0, start - window + 1)
            reached = sum(length > start for length in self.group.lengths)
            yield _Tile(self, start, stop, first, reached)

    def backward(self, grad: Tensor, kept: Iterator[Tensor]) -> Tensor:
        """The gradient of queries, keys and values, ``[B, heads + 2 kv_heads, T, D]``."""
        out_grad = self.group.spread(grad, slice(None))
        count, queries, span, width = self.q.shape
        by_all = self.q.new_empty(count, queries + 2 * self.kv_heads, span, width)
        by_q, by_rest = by_all[:, :queries], by_all[:, queries:]
        # several tiles add to the same keys: in float32
        by_k, by_v = (torch.zeros_like(self.k, dtype=torch.float32) for _ in range(2))
        for tile in self.tiles():
            p: Tensor | None = next(kept) if span <= KEPT_LENGTH else None
            slope: Tensor | None = None
            if p is None or self.scoring.softcap is not None:
                products = tile.products()
                slope = tile.slope(products)
                p = tile.masked(products) if p is None else p
            upper = tile.matrix(out_grad)
            tile.keys(by_v).add_(torch.bmm(p.transpose(1, 2), upper))
            by_p = torch.bmm(upper, tile.v.transpose(1, 2))
            by_scores = torch._softmax_backward_data(by_p, p, -1, p.dtype)
            if slope is not None:
                by_scores.mul_(slope)
            by_tile = torch.bmm(by_scores, tile.k)
            torch.mul(by_tile.view_as(tile.of(by_q)), self.scoring.scale, out=tile.of(by_q))
            tile.keys(by_k).add_(torch.bmm(by_scores.transpose(1, 2), tile.scaled()))
        for place, one in enumerate((by_k, by_v)):
            halves: Tensor = torch.unflatten(by_rest, 1, (2, -1))
            halves[:, place] = one.view(count, self.kv_heads, span, width)
        return by_all


@dataclass(frozen=True)
class _Tile:
    """Queries ``[start, stop)`` of the first `reached` sequences, and the keys ``[first, stop)`` they see."""

    call: _Call
    start: int
    stop: int
    first: int
    reached: int

    @property
    def k(self) -> Tensor:
        """``[n kv, keys, D]``."""
        return self.keys(self.call.k)

    @property
    def v(self) -> Tensor:
        """``[n kv, keys, D]``."""
        return self.keys(self.call.v)

    def keys(self, x: Tensor) -> Tensor:
        """The tile's keys of ``[B kv, T, D]``, a view."""
        return x[: self.reached * self.call.kv_heads, self.first : self.stop]

    def of(self, x: Tensor) -> Tensor:
        """The tile's queries of ``[B, heads, T, D]`` as ``[n, kv, G, t, D]``, a view."""
        groups: Tensor = torch.unflatten(x, 1, (self.call.kv_heads, -1))
        return groups[: self.reached, :, :, self.start : self.stop]

    def matrix(self, x: Tensor) -> Tensor:
        """The tile's queries of ``[B, heads, T, D]``, those of a group in one matrix: ``[n kv, G t, D]``."""
        return self.of(x).reshape(self.reached * self.call.kv_heads, -1, x.shape[-1])

    def scaled(self) -> Tensor:
        """The scaled queries, ``[n kv, G t, D]``."""
        return self.matrix(self.call.q).mul(self.call.scoring.scale)

    def products(self) -> Tensor:
        """Scaled and capped products, before the mask, ``[n kv, G t, keys]``."""
        return capped(torch.bmm(self.scaled(), self.k.transpose(1, 2)), self.call.scoring.softcap)

    def slope(self, products: Tensor) -> Tensor | None:
        """The derivative of the soft-cap at `products`, which have gone through it; None without one."""
        cap = self.call.scoring.softcap
        return None if cap is None else 1 - (products / cap).square_()

    def probabilities(self) -> Tensor:
        """Softmax of the tile's scores, ``[n kv, G t, keys]``."""
        return self.masked(self.products())

    def masked(self, products: Tensor) -> Tensor:
        """Softmax of `products`, which are masked in place."""
        queries, keys = self.stop - self.start, self.stop - self.first
        by_query = products.view(len(products), -1, queries, keys)
        window = self.call.scoring.window
        late = torch.full((queries, queries), -torch.inf, dtype=products.dtype, device=products.device)
        by_query[..., keys - queries :] += late.triu(1)
        if window is not None and self.stop - self.first > window:
            # query i of the tile sees back to key i + start - window + 1
            early = torch.full((queries, keys), -torch.inf, dtype=products.dtype, device=products.device)
            by_query += early.tril(self.start - window - self.first)
        return torch.softmax(products, dim=-1)
