"""When an answer is over: stop ids, stop strings across token borders, and the token limit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from spillover.engine.protocol import Finish, Request


class TextStream(Protocol):
    """Turns tokens into text that is final (`spillover.models.StreamDecoder`)."""

    def push(self, token_id: int) -> str:
        """The text that this token completes; empty inside a character of several tokens."""
        ...


class StopRule:
    """Watches one answer; `push` each token and learn whether it was the last."""

    def __init__(self, request: Request, stream: Callable[[], TextStream]) -> None:
        self._ids = request.stop_ids
        self._limit = request.max_tokens
        self._strings = tuple(text for text in request.stop if text)
        self._stream = stream() if self._strings else None
        # a string that ends in new text starts at most this far back
        self._reach = max(map(len, self._strings), default=1) - 1
        self._tail = ""
        self.count = 0

    def push(self, token: int) -> Finish | None:
        """Count `token` and say how it ends the answer, if it does."""
        self.count += 1
        if token in self._ids:
            return "stop"
        if self._stream is not None and self._completes_string(self._stream.push(token)):
            return "stop"
        return "length" if self.count >= self._limit else None

    def _completes_string(self, text: str) -> bool:
        seen = self._tail + text
        self._tail = seen[-self._reach :] if self._reach else ""
        return any(stop in seen for stop in self._strings)


class Withheld:
    """Text on its way out that never shows a part of a stop string: an end that may begin one is kept back.

    The pieces joined are `cut` of the whole.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(text for text in stop if text)
        self._kept = ""
        self.over = False

    def push(self, text: str) -> str:
        """Add `text`; return what may be shown. After a stop string nothing is."""
        if self.over:
            return ""
        text = self._kept + text
        shown = cut(text, self._stop)
        if len(shown) < len(text):
            self.over, self._kept = True, ""
            return shown
        kept = self._possible(text)
        shown, self._kept = text[: len(text) - kept], text[len(text) - kept :]
        return shown

    def end(self) -> str:
        """What was kept back, as no more text comes."""
        kept, self._kept = self._kept, ""
        return "" if self.over else kept

    def _possible(self, text: str) -> int:
        """The length of the longest end of `text` that a stop string begins with."""
        longest = max(map(len, self._stop), default=1) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stop):
                return length
        return 0


def cut(text: str, stop: Sequence[str]) -> str:
    """`text` before the earliest stop string in it."""
    places = [place for place in (text.find(one) for one in stop if one) if place >= 0]
    return text[: min(places)] if places else text
