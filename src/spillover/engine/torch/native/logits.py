"""The next-token logits of a pass, and what is asked of them, on all cores."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import CDLL

import numpy as np

from spillover.engine.protocol import Floats, Ids, TokenLogprob


class NativeLogits:
    """Float32 logits ``[rows, V]``. See `spillover.engine.protocol.NextLogits`."""

    def __init__(self, library: CDLL, logits: Floats, workspace: int) -> None:
        self._library = library
        self._logits = logits
        self._workspace = workspace

    def argmax(self) -> Ids:
        """The most likely token per row, int64 ``[rows]``; the lowest id of equals."""
        rows, width = self._logits.shape
        best = np.empty(rows, np.int64)
        self._library.spill_argmax(self._logits.ctypes.data, rows, width, best.ctypes.data, self._workspace)
        return best

    def numpy(self, row: int) -> Floats:
        """The logits of one row, float32 ``[V]``."""
        row_logits: Floats = self._logits[row]
        return row_logits

    def logprobs(self, rows: Sequence[int], tokens: Sequence[int], top: int) -> list[TokenLogprob]:
        """The log-probability of one token in each of `rows`, and of the `top` most likely tokens there.

        The lower id of equals comes first.
        """
        count, width = len(rows), self._logits.shape[1]
        top = min(top, width)
        places, chosen_ids = np.asarray(rows, np.int64), np.asarray(tokens, np.int64)
        chosen = np.empty(count, np.float32)
        ids, values = np.empty((count, top), np.int64), np.empty((count, top), np.float32)
        arrays = (places, chosen_ids)
        self._library.spill_logprobs(
            *(self._logits.ctypes.data, width, *(array.ctypes.data for array in arrays), count, top),
            *(array.ctypes.data for array in (chosen, ids, values)),
            self._workspace,
        )
        pairs = zip(chosen.tolist(), ids.tolist(), values.tolist(), strict=True)
        return [
            TokenLogprob(token, logprob, tuple(zip(best, of_best, strict=True)))
            for token, (logprob, best, of_best) in zip(tokens, pairs, strict=True)
        ]
