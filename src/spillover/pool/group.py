"""Group commit: calls that arrive while one is being made durable share the next one.

Guarantee: a call returns after a commit that contains it, and never before.

Steps: a caller joins the waiting line. If nobody is committing it takes the whole line and commits it;
otherwise it sleeps. Whoever commits wakes everybody of its group and hands the duty to the first caller
that joined meanwhile. So there is no thread of our own, no timer, and a lone caller pays nothing.

Source: the scheme is that of group commit in DeWitt et al., "Implementation Techniques for Main Memory
Database Systems", SIGMOD 1984.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from spillover.errors import Unknown

__all__ = ["Group"]

Item = TypeVar("Item")
Result = TypeVar("Result")


class Group(Generic[Item, Result]):
    """Calls of many threads, committed together.

    Args:
        commit: makes a list of items durable; returns one result or one exception an item.
        weigh: how much an item adds to a group.
        limit: a group is closed when its weight reaches this.
    """

    def __init__(
        self,
        commit: Callable[[Sequence[Item]], Sequence[Result | BaseException]],
        weigh: Callable[[Item], int],
        limit: int,
    ) -> None:
        self._commit = commit
        self._weigh = weigh
        self._limit = limit
        self._lock = threading.Lock()
        self._waiting: list[_Ticket[Item, Result]] = []
        self._busy = False

    def __call__(self, item: Item) -> Result:
        """Return the item's result once it is durable, or raise its exception."""
        ticket: _Ticket[Item, Result] = _Ticket(item)
        with self._lock:
            self._waiting.append(ticket)
            lead = not self._busy
            self._busy = True
        if not lead:
            self._wait(ticket)
        if ticket.result is None:
            self._lead()
        result = ticket.result
        if isinstance(result, BaseException):
            raise result
        assert result is not None
        return result

    def _wait(self, ticket: _Ticket[Item, Result]) -> None:
        """Sleep until there is a result, or until the duty to commit is handed to ``ticket``."""
        try:
            ticket.woken.acquire()
            if ticket.following is not None:
                ticket.following.woken.release()
        except BaseException:  # Ctrl-C: leave the line, and do not keep the duty
            with self._lock:
                if ticket in self._waiting:
                    first = self._waiting[0] is ticket
                    self._waiting.remove(ticket)
                    if first and ticket.leads:
                        self._pass_on()
            raise

    def _lead(self) -> None:
        """Commit the front of the line, which holds the caller's own ticket, and pass the duty on."""
        with self._lock:
            group = self._front()
        results: Sequence[Result | BaseException] = [
            Unknown("the commit was interrupted: it may have happened or not") for _ in group
        ]
        try:
            results = self._commit([ticket.item for ticket in group])
        except Exception as error:
            results = [error] * len(group)
        finally:
            for ticket, result in zip(group, results, strict=True):
                ticket.result = result
            with self._lock:
                self._pass_on()
            for ticket, following in itertools.pairwise(group[1:]):
                ticket.following = following
            if len(group) > 1:
                group[1].woken.release()

    def _pass_on(self) -> None:
        self._busy = bool(self._waiting)
        if self._waiting:
            self._waiting[0].leads = True
            self._waiting[0].woken.release()

    def _front(self) -> list[_Ticket[Item, Result]]:
        """Take from the front of the line what makes one group."""
        weight = count = 0
        while count < len(self._waiting) and weight < self._limit:
            weight += self._weigh(self._waiting[count].item)
            count += 1
        group, self._waiting = self._waiting[:count], self._waiting[count:]
        return group


class _Ticket(Generic[Item, Result]):
    """One caller in the line. ``woken`` opens when there is a result, or the duty to commit."""

    __slots__ = ("following", "item", "leads", "result", "woken")

    def __init__(self, item: Item) -> None:
        self.item = item
        self.result: Result | BaseException | None = None
        self.leads = False
        self.following: _Ticket[Item, Result] | None = None
        self.woken = threading.Lock()
        self.woken.acquire()
