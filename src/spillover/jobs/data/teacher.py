"""What the line of a distilled row says of its teacher, checked before a student learns from it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from spillover.engine.protocol import Likely
from spillover.jobs.data.parse import Fault, quoted

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Protocol

    class Tokenizer(Protocol):
        @property
        def stop_ids(self) -> frozenset[int]: ...

        def decode(self, ids: Iterable[int]) -> str: ...


__all__ = ["Teacher", "teacher_of"]

_ABOVE_ONE = 1e-3
"""By how much the probabilities of a row may exceed 1: they are written with six digits."""


class Teacher(msgspec.Struct, frozen=True):
    """``completion_token_ids``, ``finish_reason`` and ``logprobs`` of a distilled row, as they are given."""

    tokens: Any
    finish: Any
    logprobs: Any

    @property
    def was_cut(self) -> bool:
        """Whether the completion ended at its limit of tokens, not where the teacher would have ended it."""
        return bool(self.finish == "length")

    def completion(self, text: str, tokenizer: Tokenizer, vocabulary: int) -> list[int]:
        """The tokens that the teacher chose, which with this tokenizer say `text`; raises `Fault`."""
        tokens = self.tokens if isinstance(self.tokens, list) else []
        if not tokens or not all(_is_token(one, vocabulary) for one in tokens):
            raise Fault(f"completion_token_ids must be token ids from 0 to {vocabulary - 1}", hint=_HINT)
        said = tokens[:-1] if tokens[-1] in tokenizer.stop_ids else tokens
        decoded = tokenizer.decode(said).strip()
        # a stop string and what follows it is no part of the text
        if not decoded.startswith(text.strip()):
            raise Fault(
                f"completion_token_ids are {quoted(decoded)} to this model: its tokenizer is another",
                hint="--loss text learns from a teacher with any tokenizer",
            )
        return tokens

    def likely(self, count: int, vocabulary: int) -> Likely:
        """What the teacher held of its `count` tokens; raises `Fault`."""
        given = self.logprobs if isinstance(self.logprobs, dict) else {}
        tokens = _matrix(given.get("top_token_ids"), "logprobs.top_token_ids", count)
        logprobs = _matrix(given.get("top"), "logprobs.top", count)
        if tokens.shape != logprobs.shape:
            raise Fault("logprobs.top_token_ids and logprobs.top are not of one size", hint=_HINT)
        if not ((tokens >= 0) & (tokens < vocabulary) & (tokens == np.floor(tokens))).all():
            raise Fault(f"logprobs.top_token_ids must be token ids from 0 to {vocabulary - 1}", hint=_HINT)
        ordered = np.sort(tokens, axis=1)
        if (ordered[:, 1:] == ordered[:, :-1]).any():
            raise Fault("logprobs.top_token_ids names a token twice for one place", hint=_HINT)
        # far below the least that float32 holds: a probability of 0
        held = np.maximum(logprobs, -1000.0).astype(np.float32)
        if not np.isfinite(logprobs).all() or not (np.exp(held).sum(axis=1) <= 1 + _ABOVE_ONE).all():
            raise Fault("logprobs.top are no logarithms of probabilities that sum to 1 at most", hint=_HINT)
        return Likely(tokens.astype(np.int64), held)


_HINT = "spill distill writes such rows"


def teacher_of(row: dict[str, Any]) -> Teacher:
    """What a distilled row says of its teacher, not checked yet."""
    return Teacher(row.get("completion_token_ids"), row.get("finish_reason"), row.get("logprobs"))


def _is_token(value: Any, vocabulary: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < vocabulary


def _matrix(rows: Any, name: str, count: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """A list of `count` lists of equally many numbers, float64 ``[count, K]``."""
    try:
        matrix = np.array(rows, np.float64)
    except (TypeError, ValueError, OverflowError):
        matrix = np.empty(0)
    if matrix.ndim != 2 or len(matrix) != count or not matrix.shape[1]:
        raise Fault(f"{name} must have equally many numbers for each of {count} tokens", hint=_HINT)
    return matrix
