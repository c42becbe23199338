"""The latest submissions of a writer and what they were answered."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future

from spillover.errors import Conflict, Unknown
from spillover.pool.reference import Ref

__all__ = ["Answers"]

REMEMBERED = 1 << 16
"""How many submissions and references are remembered, together."""


class Answers:
    """Answers each submission once, however often and from however many threads it comes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: OrderedDict[bytes, tuple[bytes, tuple[Ref, ...]]] = OrderedDict()
        self._size = 0
        self._flying: dict[bytes, _Flight] = {}

    def once(
        self, key: bytes, content: bytes, submission: str, publish: Callable[[], list[Ref]]
    ) -> list[Ref]:
        """What ``publish`` returns, the first time; later the same again.

        Args:
            key: of the submission.
            content: checksum of all that is published.
            submission: its id, for errors.

        Raises:
            Conflict: it came before with other content.
        """
        waiting: Future[list[Ref]] | None = None
        with self._lock:
            answer, flight = self._known.get(key), self._flying.get(key)
            known = answer[0] if answer else flight.content if flight else content
            if known != content:
                raise Conflict(f"submission {submission!r} was used for other content")
            if answer is not None:
                return [*answer[1]]
            if flight is None:
                flight = self._flying[key] = _Flight(content)
            else:
                waiting = flight.waiting = flight.waiting or Future()
        return waiting.result() if waiting is not None else self._first(key, flight, publish)

    def _first(self, key: bytes, flight: _Flight, publish: Callable[[], list[Ref]]) -> list[Ref]:
        try:
            refs = publish()
        except BaseException as error:
            with self._lock:
                del self._flying[key]
            if flight.waiting is not None:
                interrupted = Unknown("the commit was interrupted: it may have happened or not")
                flight.waiting.set_exception(error if isinstance(error, Exception) else interrupted)
            raise
        with self._lock:
            del self._flying[key]
            self._known[key] = (flight.content, tuple(refs))
            self._size += 1 + len(refs)
            while self._size > REMEMBERED and len(self._known) > 1:
                self._size -= 1 + len(self._known.popitem(last=False)[1][1])
        if flight.waiting is not None:
            flight.waiting.set_result(refs)
        return refs


class _Flight:
    """A submission on its way. ``waiting`` exists once somebody else asks for the same."""

    __slots__ = ("content", "waiting")

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.waiting: Future[list[Ref]] | None = None
