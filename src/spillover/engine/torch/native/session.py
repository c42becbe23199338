"""Rows being generated over a cache of blocks: beginnings that rows share are computed and stored once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from spillover.engine.protocol import Floats
from spillover.engine.torch.native.blocks import Blocks, digests, needed
from spillover.engine.torch.native.decoder import Cache, NativeDecoder, Stretch
from spillover.engine.torch.native.library import BLOCK
from spillover.engine.torch.native.logits import NativeLogits
from spillover.errors import EngineError


@dataclass
class _Row:
    """A row's place in the cache: `table` is its line of the block tables, `blocks` those it uses."""

    table: int
    length: int
    adapter: int
    limit: int
    blocks: list[int] = field(default_factory=list)


class NativeSession:
    """See `spillover.engine.protocol.Session`. `room` is the cache's size in positions.

    A row holds blocks for what it has said; that it can say all it may was seen to when it was reserved.
    """

    def __init__(self, decoder: NativeDecoder, slots: int, length: int, room: int, pass_tokens: int) -> None:
        self.slots = slots
        self.length = length
        self.joins = True
        self._under_way = False
        self._decoder = decoder
        self._pass_tokens = pass_tokens
        self._blocks = Blocks(max(needed(length), room // BLOCK))
        self._cache = Cache(decoder, self._blocks.count)
        self._tables = np.zeros((slots, needed(length)), np.int32)
        self._free = list(range(slots - 1, -1, -1))
        self._rows: list[_Row] = []
        self._promised = 0  # blocks that the present and the reserved rows may come to use
        self._reserved: list[int] = []
        self.shared = 0  # prompt tokens that were found in the cache

    def reserve(self, tokens: int) -> bool:
        """Keep memory for a row of up to `tokens` tokens, which the next `admit` brings; False: none now."""
        wanted = needed(tokens)
        full = len(self._rows) + len(self._reserved) >= self.slots
        if full or self._promised + wanted > self._blocks.count:
            return False
        self._promised += wanted
        self._reserved.append(wanted)
        return True

    def admit(self, prompts: Sequence[Sequence[int]], adapters: Sequence[int] = ()) -> NativeLogits:
        """Prefill `prompts` as rows n, n + 1, ...; logits of their last tokens.

        `adapters` are indices into those of the model, -1 for the base alone; by default all rows wear the
        first.
        """
        self._begin_pass()
        return self._logits(self._newcomers(prompts, adapters))

    def decode(
        self, tokens: Sequence[int], prompts: Sequence[Sequence[int]] = (), adapters: Sequence[int] = ()
    ) -> NativeLogits:
        """Append one token to every row, and admit `prompts` in the same pass; logits of every row."""
        self._begin_pass()
        stretches = []
        for token, row in zip(tokens, self._rows, strict=True):
            stretches.append(Stretch((token,), row.length, self._tables[row.table], row.adapter))
            self._extend(row, row.length + 1)
        return self._logits([*stretches, *self._newcomers(prompts, adapters)])

    def _begin_pass(self) -> None:
        if self._under_way:
            raise EngineError("a pass of this session was given up", hint="open another session")
        self._under_way = True

    def _newcomers(self, prompts: Sequence[Sequence[int]], adapters: Sequence[int]) -> list[Stretch]:
        worn = self._decoder.worn(adapters, len(prompts)) if prompts else []
        stretches = []
        for prompt, adapter in zip(prompts, worn, strict=True):
            row = self._begin(prompt, adapter)
            first = self._adopt(row, prompt)
            self._extend(row, len(prompt))
            stretches.append(Stretch(prompt[first:], first, self._tables[row.table], adapter))
            self._rows.append(row)
        return stretches

    def _logits(self, stretches: Sequence[Stretch]) -> NativeLogits:
        last = np.concatenate([self._last(group) for group in self._passes(stretches)])
        self._under_way = False
        return self._decoder.logits(last)

    def _last(self, stretches: Sequence[Stretch]) -> Floats:
        """Compute `stretches`; what their last tokens came out as."""
        hidden = self._decoder.forward(stretches, self._cache)
        last: Floats = hidden[np.cumsum([len(stretch.tokens) for stretch in stretches]) - 1]
        return last

    def _passes(self, stretches: Sequence[Stretch]) -> Iterator[list[Stretch]]:
        """In order, a bounded number of tokens at a time: a later row may use what an earlier one wrote."""
        group: list[Stretch] = []
        for stretch in stretches:
            if group and sum(len(one.tokens) for one in group) + len(stretch.tokens) > self._pass_tokens:
                yield group
                group = []
            group.append(stretch)
        yield group

    def release(self, row: int) -> None:
        """Drop `row`; the last row takes its number."""
        gone = self._rows[row]
        self._rows[row] = self._rows[-1]
        self._rows.pop()
        for block in gone.blocks:
            self._blocks.leave(block)
        self._promised -= gone.limit
        self._free.append(gone.table)

    def _begin(self, prompt: Sequence[int], adapter: int) -> _Row:
        if not self._reserved and not self.reserve(self.length):
            raise EngineError("the cache has no room for another row")
        return _Row(self._free.pop(), 0, adapter, self._reserved.pop(0))

    def _adopt(self, row: _Row, prompt: Sequence[int]) -> int:
        """Take known blocks for the beginning of `prompt`; the number of tokens they hold.

        Blocks that this row will fill become known at once: a pass writes all its keys before any is read.
        The last token is always computed, for its logits.
        """
        shared, known = 0, True
        for number, digest in enumerate(digests(prompt[:-1], row.adapter)):
            block = self._blocks.share(digest) if known else None
            known = block is not None
            if block is None:
                self._append(row)
                self._blocks.know(row.blocks[number], digest)
            else:
                self._place(row, block)
                shared += BLOCK
        self.shared += shared
        return shared

    def _extend(self, row: _Row, length: int) -> None:
        while len(row.blocks) < needed(length):
            self._append(row)
        row.length = length

    def _append(self, row: _Row) -> None:
        block = self._blocks.take()
        self._cache.clear(block)
        self._place(row, block)

    def _place(self, row: _Row, block: int) -> None:
        self._tables[row.table, len(row.blocks)] = block
        row.blocks.append(block)
