"""A batch's share of the loop: what `spillover.jobs.answering` sees in the place of a scheduler."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from spillover.engine import Completion, Request, TokenLogprob
from spillover.engine.estimate import Traffic
from spillover.errors import SpillError
from spillover.serve.loop import EngineLoop

__all__ = ["Lane"]

LOOK_SECONDS = 0.1
"""How often it is asked whether to stop while nothing finishes."""


@dataclass
class _Row:
    """One row under way, by its own id; the loop has it under ``number``."""

    lane: Lane
    id: str
    tokens: list[int]
    number: str = ""

    def token(self, token: int, logprob: TokenLogprob | None) -> None:
        self.tokens.append(token)

    def done(self, completion: Completion) -> None:
        self.lane._put(replace(completion, id=self.id))

    def failed(self, error: SpillError) -> None:
        self.lane._put(error)


class Lane:
    """Rows that take turns with everybody else's, behind those that somebody waits for.

    ``traffic`` stays empty: passes are shared.
    """

    def __init__(self, loop: EngineLoop, adapter: int, should_stop: Callable[[], bool]) -> None:
        self.traffic = Traffic()
        self._loop = loop
        self._adapter = adapter
        self._should_stop = should_stop
        self._rows: dict[str, _Row] = {}
        self._news: deque[Completion | SpillError] = deque()
        self._changed = threading.Condition()

    def run(self, requests: Iterable[Request]) -> Iterator[Completion]:
        """Yield completions as rows finish, in any order.

        Raises:
            SpillError: the model could not be computed with.
        """
        source = iter(requests)
        try:
            more = True
            while not self._should_stop():
                more = more and self._fill(source)
                if not more and not self._rows:
                    return
                yield from self._finished()
        finally:
            self._loop.cancel({row.number for row in self._rows.values()})

    def partials(self) -> dict[str, list[int]]:
        """Tokens answered so far by rows that `run` pulled and did not yield, by request id."""
        return {name: [*row.tokens] for name, row in self._rows.items()}

    def _fill(self, source: Iterator[Request]) -> bool:
        """Have as many rows wait as may run, so that no slot stays empty; False: there are no more."""
        while len(self._rows) < 2 * self._loop.slots:
            request = next(source, None)
            if request is None:
                return False
            row = self._rows[request.id] = _Row(self, request.id, [*request.generated])
            row.number = self._loop.submit(replace(request, adapter=self._adapter), row, urgent=False)
        return True

    def _finished(self) -> Iterator[Completion]:
        with self._changed:
            self._changed.wait_for(lambda: self._news, LOOK_SECONDS)
            news, self._news = self._news, deque()
        for one in news:
            if isinstance(one, SpillError):
                raise one
            del self._rows[one.id]
            yield one

    def _put(self, news: Completion | SpillError) -> None:
        with self._changed:
            self._news.append(news)
            self._changed.notify()
