"""A model on the compiled kernels: sessions, and scores of given tokens."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from spillover.engine.protocol import Floats, Plan, TokenLogprob
from spillover.engine.torch.fit import LOGIT_BYTES
from spillover.engine.torch.native.blocks import needed
from spillover.engine.torch.native.decoder import Cache, NativeDecoder, Stretch
from spillover.engine.torch.native.session import NativeSession

if TYPE_CHECKING:
    from spillover.engine.ring import Ring
    from spillover.engine.torch.weights import Weights
    from spillover.models import Adapter


class NativeModel:
    """Packed weights, or those that stay while others are streamed; made by the first session or score."""

    def __init__(
        self,
        weights: Weights,
        plan: Plan,
        adapters: Sequence[Adapter],
        open_ring: Callable[[], Ring] | None = None,
    ) -> None:
        self._weights = weights
        self._open_ring = open_ring
        self._plan = plan
        self._adapters = adapters
        self._scratch: Cache | None = None

    @cached_property
    def _decoder(self) -> NativeDecoder:
        return NativeDecoder(self._weights, self._adapters, self._plan.sequence, self._open_ring)

    def session(self) -> NativeSession:
        """An empty session."""
        plan = self._plan
        return NativeSession(self._decoder, plan.batch, plan.sequence, plan.cache_tokens, plan.pass_tokens)

    def score(
        self, sequences: Sequence[Sequence[int]], starts: Sequence[int], top: int, adapters: Sequence[int]
    ) -> list[list[TokenLogprob]]:
        """Score sequences that make up one pass."""
        cache = self._room(sum(needed(len(sequence)) for sequence in sequences))
        first, stretches = 0, []
        for sequence, adapter in zip(sequences, self._decoder.worn(adapters, len(sequences)), strict=True):
            blocks = needed(len(sequence))
            stretches.append(Stretch(sequence, 0, np.arange(first, first + blocks, dtype=np.int32), adapter))
            first += blocks
        hidden = self._decoder.forward(stretches, cache)
        ends = np.cumsum([len(sequence) for sequence in sequences])
        places, targets = [], []
        for sequence, start, end in zip(sequences, starts, ends, strict=True):
            places.append(np.arange(end - len(sequence) + start - 1, end - 1))
            targets.append(sequence[start:])
        scored = self._scored(hidden, np.concatenate(places), list(itertools.chain(*targets)), top)
        return [list(itertools.islice(scored, len(part))) for part in targets]

    def forget(self) -> None:
        """Give back what scores were computed in."""
        self._scratch = None

    def _scored(
        self, hidden: Floats, places: np.ndarray[tuple[int], np.dtype[np.int64]], targets: list[int], top: int
    ) -> Iterator[TokenLogprob]:
        """A bounded number of logits at a time."""
        rows = max(1, LOGIT_BYTES // (4 * self._weights.config.vocab_size))
        for start in range(0, len(places), rows):
            part = places[start : start + rows]
            logits = self._decoder.logits(hidden[part])
            yield from logits.logprobs(range(len(part)), targets[start : start + rows], top)

    def _room(self, blocks: int) -> Cache:
        """A cache of at least `blocks` blocks whose content does not matter."""
        if self._scratch is None or self._scratch.blocks < blocks:
            self._scratch = Cache(self._decoder, blocks)
        for block in range(blocks):
            self._scratch.clear(block)
        return self._scratch
