"""Group commit: calls that arrive while one is being made durable share the next one.

Guarantee: a call returns after a commit that contains it, and never before. A caller that is interrupted
(Ctrl-C) leaves nobody waiting.

Steps: a caller joins the waiting line. If nobody has the duty to commit it takes the whole line and commits
it; otherwise it sleeps. Whoever commits hands the duty to the first caller that joined meanwhile, and wakes
one of its group, which wakes the next. So there is no thread of our own, no timer, and a lone caller pays
nothing.

Source: the scheme is that of group commit in DeWitt et al., "Implementation Techniques for Main Memory
Database Systems", SIGMOD 1984.
"""

from __future__ import annotations

import contextlib
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
        self._leader: _Ticket[Item, Result] | None = None

    def __call__(self, item: Item) -> Result:
        """Return the item's result once it is durable, or raise its exception."""
        ticket: _Ticket[Item, Result] = _Ticket(item)
        try:
            with self._lock:
                if lead := self._leader is None:
                    self._leader = ticket
                self._waiting.append(ticket)
            if not lead:
                ticket.woken.acquire()
                if ticket.following is not None:
                    ticket.following.woken.release()
            if ticket.result is None:
                self._lead(ticket)
        except BaseException:
            self._leave(ticket)
            raise
        result = ticket.result
        if isinstance(result, BaseException):
            raise result
        assert result is not None
        return result

    def _lead(self, leader: _Ticket[Item, Result]) -> None:
        """Commit the front of the line, which begins with ``leader``, and answer it."""
        with self._lock:
            leader.followers = self._front()[1:]
        group = [leader, *leader.followers]
        results: Sequence[Result | BaseException]
        try:
            results = self._commit([ticket.item for ticket in group])
        except Exception as error:
            results = [error] * len(group)
        with self._lock:
            for ticket, result in zip(group, results, strict=True):
                ticket.result = result
            self._pass_on(leader)
            sleeping = [ticket for ticket in leader.followers if not ticket.left]
            for ticket, following in itertools.pairwise(sleeping):
                ticket.following = following
        if sleeping:
            sleeping[0].woken.release()

    def _leave(self, ticket: _Ticket[Item, Result]) -> None:
        """Step out of the line after an interruption, at whatever point that came.

        Whoever depends on ``ticket`` is woken, perhaps a second time, which does nothing.
        """
        with self._lock:
            ticket.left = True
            if ticket in self._waiting:
                self._waiting.remove(ticket)
            self._pass_on(ticket)
        for other in ticket.followers:
            if other.result is None:
                other.result = Unknown("the commit was interrupted: it may have happened or not")
        for other in [*ticket.followers, *([ticket.following] if ticket.following else [])]:
            with contextlib.suppress(RuntimeError):
                other.woken.release()

    def _pass_on(self, leader: _Ticket[Item, Result]) -> None:
        """Hand the duty of ``leader``, if it has it, to the first in the line."""
        if self._leader is leader:
            self._leader = self._waiting[0] if self._waiting else None
            if self._leader is not None:
                self._leader.woken.release()

    def _front(self) -> list[_Ticket[Item, Result]]:
        """Take from the front of the line what makes one group."""
        weight = count = 0
        while count < len(self._waiting) and weight < self._limit:
            weight += self._weigh(self._waiting[count].item)
            count += 1
        group, self._waiting = self._waiting[:count], self._waiting[count:]
        return group


class _Ticket(Generic[Item, Result]):
    """One caller in the line.

    Attributes:
        result: None until there is one.
        woken: opens when there is a result, or the duty to commit.
        followers: of a leader: who else is in its group.
        following: whom to wake next.
        left: it was interrupted and waits no more.
    """

    __slots__ = ("followers", "following", "item", "left", "result", "woken")

    def __init__(self, item: Item) -> None:
        self.item = item
        self.result: Result | BaseException | None = None
        self.followers: Sequence[_Ticket[Item, Result]] = ()
        self.following: _Ticket[Item, Result] | None = None
        self.left = False
        self.woken = threading.Lock()
        self.woken.acquire()
