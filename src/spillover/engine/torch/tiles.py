"""Causal attention of the sequences of a packed pass, in tiles of queries, with its own backward.

Sequences of similar length go through one call: they lie side by side in a buffer, the longest first, so that
those which reach a tile of queries are a prefix of it. torch's own CPU kernel takes three times as long in
the backward, and none has soft-caps.
"""

from __future__ import annotations

import itertools
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


class Group:
    """Sequences of one call, longest first: where each begins in the pass, and its length."""

    def __init__(self, starts: Sequence[int], lengths: Sequence[int]) -> None:
        self.starts = starts
        self.lengths = lengths
        # few different numbers of positions, because oneDNN keeps a kernel for each shape
        grain = 16 if lengths[0] <= _TILE else 32
        self.span = -(-lengths[0] // grain) * grain
        self._masks: dict[tuple[int, int, int, torch.dtype], Tensor] = {}

    def spread(self, packed: Tensor) -> Tensor:
        """``[N, heads, D]`` as ``[heads, B, T, D]``, zero after a sequence's end."""
        shape = (packed.shape[1], len(self.lengths), self.span, packed.shape[2])
        padded = packed.new_zeros(shape) if self.lengths[-1] < self.span else packed.new_empty(shape)
        torch._foreach_copy_(self._views(padded), self._slices(packed))
        return padded

    def gather(self, padded: Tensor, packed: Tensor) -> None:
        """Write ``[heads, B, T, D]`` into this group's rows of ``[N, heads, D]``."""
        torch._foreach_copy_(self._slices(packed), self._views(padded))

    def mask(self, queries: int, keys: int, behind: int, like: Tensor) -> Tensor:
        """Minus infinity where a query does not see a key, else 0: ``[queries, keys]``, made once a pass.

        Query i sees key ``keys - queries + i`` and `behind` keys before it.
        """
        form = (queries, keys, behind, like.dtype)
        known = self._masks.get(form)
        if known is None:
            hidden = torch.full((queries, keys), -torch.inf, dtype=like.dtype, device=like.device)
            last = keys - queries
            known = hidden.triu(last + 1) + hidden.tril(last - behind - 1)
            self._masks[form] = known
        return known

    def _slices(self, packed: Tensor) -> list[Tensor]:
        places = zip(self.starts, self.lengths, strict=True)
        return [packed[start : start + length] for start, length in places]

    def _views(self, padded: Tensor) -> list[Tensor]:
        by_token = padded.permute(1, 2, 0, 3).unbind()
        return [one[:length] for one, length in zip(by_token, self.lengths, strict=True)]


def groups(lengths: Sequence[int]) -> list[Group]:
    """Sequences that follow one another in a pass: none is shorter than half of its group's longest."""
    starts = [0, *itertools.accumulate(lengths)]
    found: list[list[int]] = []
    for one in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if found and 2 * lengths[one] >= lengths[found[-1][0]]:
            found[-1].append(one)
        else:
            found.append([one])
    return [Group([starts[i] for i in members], [lengths[i] for i in members]) for members in found]


def tiled(heads: Tensor, within: Sequence[Group], kv_heads: int, scoring: Scoring) -> Tensor:
    """``[N, heads + 2 kv_heads, D]`` to ``[N, heads * D]``; rows that belong to no group come out zero."""
    return _Tiled.apply(heads, within, kv_heads, scoring)  # type: ignore[no-untyped-call, no-any-return]


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, heads: Tensor, within: Sequence[Group], kv_heads: int, scoring: Scoring) -> Tensor:
        out = _rows_like(heads, heads.shape[1] - 2 * kv_heads, within)
        ctx.args = (within, kv_heads, scoring)
        saved = []
        for group in within:
            call = _Call(group, group.spread(heads), kv_heads, scoring)
            saved.append(call.heads)
            mixed = torch.empty_like(call.q)
            for tile in call.tiles():
                p = tile.probabilities()
                tile.of(mixed).copy_(torch.bmm(p, tile.v).view_as(tile.of(mixed)))
                if group.span <= KEPT_LENGTH:
                    saved.append(p)
            group.gather(mixed, out)
        ctx.save_for_backward(*saved)
        return out.flatten(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        within, kv_heads, scoring = ctx.args
        saved = iter(ctx.saved_tensors)
        by_heads = None
        for group in within:
            call = _Call(group, next(saved), kv_heads, scoring)
            if by_heads is None:
                grad = grad.view(len(grad), -1, call.heads.shape[-1])
                by_heads = _rows_like(grad, len(call.heads), within)
            group.gather(call.backward(group.spread(grad), saved), by_heads)
        assert by_heads is not None
        return by_heads, None, None, None


def _rows_like(packed: Tensor, heads: int, within: Sequence[Group]) -> Tensor:
    """``[N, heads, D]``; zero where no group will write."""
    covered = sum(sum(group.lengths) for group in within)
    rows = packed.new_empty(len(packed), heads, packed.shape[2])
    rows[covered:] = 0
    return rows


class _Call:
    """One group's heads, ``[heads + 2 kv_heads, B, T, D]``: queries, keys, values."""

    def __init__(self, group: Group, heads: Tensor, kv_heads: int, scoring: Scoring) -> None:
        self.group = group
        self.heads = heads
        self.scoring = scoring
        self.kv_heads = kv_heads
        self.q, self.k, self.v = torch.split(heads, [len(heads) - 2 * kv_heads, kv_heads, kv_heads])

    def tiles(self) -> Iterator[_Tile]:
        span, window = self.group.span, self.scoring.window
        for start in range(0, span, _TILE):
            stop = min(start + _TILE, span)
            first = 0 if window is None else max(0, start - window + 1)
            reached = sum(length > start for length in self.group.lengths)
            yield _Tile(self, start, stop, first, reached)

    def backward(self, out_grad: Tensor, saved: Iterator[Tensor]) -> Tensor:
        """The gradient of `heads` from that of the output, ``[heads, B, T, D]``; `saved` is the forward's."""
        by_heads = torch.empty_like(self.heads)
        by_q, by_k, by_v = torch.split(by_heads, [len(self.q), self.kv_heads, self.kv_heads])
        # several tiles add to the same keys: in float32
        sums = torch.zeros((2, *self.k.shape), dtype=torch.float32, device=by_heads.device)
        for tile in self.tiles():
            p, slope = tile.again(next(saved) if self.group.span <= KEPT_LENGTH else None)
            upper = tile.matrix(out_grad)
            by_p = torch.bmm(upper, tile.v.transpose(1, 2))
            by_scores = torch._softmax_backward_data(by_p, p, -1, p.dtype)
            if slope is not None:
                by_scores.mul_(slope)
            place = tile.of(by_q)
            torch.mul(torch.bmm(by_scores, tile.k).view_as(place), self.scoring.scale, out=place)
            for total, left, right in zip(sums, (by_scores, p), (tile.scaled(), upper), strict=True):
                tile.reached_keys(total).add_(tile.by_sequence(torch.bmm(left.transpose(1, 2), right)))
        by_k.copy_(sums[0])
        by_v.copy_(sums[1])
        return by_heads


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
        """``[kv n, keys, D]``."""
        return self.reached_keys(self.call.k).flatten(0, 1)

    @property
    def v(self) -> Tensor:
        """``[kv n, keys, D]``."""
        return self.reached_keys(self.call.v).flatten(0, 1)

    def reached_keys(self, x: Tensor) -> Tensor:
        """The tile's keys of ``[kv, B, T, D]``, a view."""
        return x[:, : self.reached, self.first : self.stop]

    def by_sequence(self, x: Tensor) -> Tensor:
        """``[kv n, ...]`` as ``[kv, n, ...]``."""
        return torch.unflatten(x, 0, (self.call.kv_heads, -1))

    def of(self, x: Tensor) -> Tensor:
        """The tile's queries of ``[heads, B, T, D]`` as ``[kv, n, G, t, D]``, a view."""
        part = x[:, : self.reached, self.start : self.stop]
        return torch.unflatten(part, 0, (self.call.kv_heads, -1)).transpose(1, 2)

    def matrix(self, x: Tensor) -> Tensor:
        """The tile's queries of ``[heads, B, T, D]``, those of a group in one matrix: ``[kv n, G t, D]``."""
        return self.of(x).reshape(self.reached * self.call.kv_heads, -1, x.shape[-1])

    def scaled(self) -> Tensor:
        """The scaled queries, ``[kv n, G t, D]``."""
        part = self.of(self.call.q)
        scaled = torch.mul(part, self.call.scoring.scale, out=part.new_empty(part.shape))
        return scaled.view(self.reached * self.call.kv_heads, -1, part.shape[-1])

    def products(self) -> Tensor:
        """Scaled and capped products, before the mask, ``[kv n, G t, keys]``."""
        return capped(torch.bmm(self.scaled(), self.k.transpose(1, 2)), self.call.scoring.softcap)

    def probabilities(self) -> Tensor:
        """Softmax of the tile's scores, ``[kv n, G t, keys]``."""
        return self._masked(self.products())

    def again(self, kept: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The probabilities, which may have been kept, and the soft-cap's derivative, None without one."""
        cap = self.call.scoring.softcap
        if kept is not None and cap is None:
            return kept, None
        products = self.products()
        slope = None if cap is None else 1 - (products / cap).square_()
        return (self._masked(products) if kept is None else kept), slope

    def _masked(self, products: Tensor) -> Tensor:
        """Softmax of `products`, which are masked in place."""
        queries, keys = self.stop - self.start, self.stop - self.first
        window = self.call.scoring.window
        by_query: Tensor = torch.unflatten(products, 1, (-1, queries))
        if window is None or keys <= window:  # only the last keys are hidden, from some
            by_query = by_query[..., keys - queries :]
            keys, window = queries, queries
        by_query += self.call.group.mask(queries, keys, window - 1, products)
        return torch.softmax(products, dim=-1)
