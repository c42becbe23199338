"""Group commit: calls that arrive while one is being made durable share the next one.

Guarantee: a call returns after a commit that contains it, and never before. A caller that is interrupted
(Ctrl-C) leaves nobody waiting.

Steps: a caller joins the waiting line. If nobody has the duty to commit it takes the whole line and commits
it; otherwise it sleeps. Whoever commits hands the duty to the first caller that joined meanwhile, and wakes
one of its group, which wakes the next. So there is no thread of our own, no timer, and a lone caller pays
nothing.

A caller that was answered is back in a moment with its next call. If a commit takes milliseconds, a group
that left at once would leave it behind, and two groups would take turns, each waiting out the other's
commit. With ``patience`` whoever commits waits, for a small share of what the last commit took, until as many
callers have joined as there were last time.

Source: the scheme is that of group commit in DeWitt et al., "Implementation Techniques for Main Memory
Database Systems", SIGMOD 1984.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from spillover.errors import Unknown

__all__ = ["Group"]

Item = TypeVar("Item")
Result = TypeVar("Result")
SHORTEST = 1e-4
"""Seconds that are worth waiting for others; a thread needs about as many to wake up."""
LONGEST = 5e-3
"""Seconds after which whoever did not come back has something else to do."""


class Group(Generic[Item, Result]):
    """Calls of many threads, committed together.

    Args:
        commit: makes a list of items durable; returns one result or one exception an item.
        weigh: how much an item adds to a group.
        limit: a group is closed when its weight reaches this.
        patience: how long to wait for callers to come back, as a share of what the last commit took.
    """

    def __init__(
        self,
        commit: Callable[[Sequence[Item]], Sequence[Result | BaseException]],
        weigh: Callable[[Item], int],
        limit: int,
        patience: float = 0.0,
    ) -> None:
        self._commit = commit
        self._weigh = weigh
        self._limit = limit
        self._patience = patience
        self._took = 0.0
        self._expected = 0
        self._all_back: threading.Lock | None = None
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
                if len(self._waiting) == self._expected and (all_back := self._all_back) is not None:
                    self._all_back = None  # first: an interruption here must not let it be released twice
                    all_back.release()
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
        if (pause := min(self._took * self._patience, LONGEST)) > SHORTEST:
            self._gather(pause)
        with self._lock:
            self._all_back = None
            leader.followers = self._front()[1:]
        group = [leader, *leader.followers]
        begun = time.monotonic()
        results: Sequence[Result | BaseException]
        try:
            results = self._commit([ticket.item for ticket in group])
        except Exception as error:
            results = [error] * len(group)
        with self._lock:
            self._took = time.monotonic() - begun
            self._expected = len(group) + len(self._waiting)
            for ticket, result in zip(group, results, strict=True):
                ticket.result = result
            self._pass_on(leader)
            sleeping = [ticket for ticket in leader.followers if not ticket.left]
            for ticket, following in itertools.pairwise(sleeping):
                ticket.following = following
        if sleeping:
            sleeping[0].woken.release()

    def _gather(self, seconds: float) -> None:
        """Wait until as many callers are here as last time; those who do not come back are not waited for."""
        with self._lock:
            if len(self._waiting) >= self._expected:
                return
            self._all_back = all_back = threading.Lock()
            all_back.acquire()
        all_back.acquire(timeout=seconds)

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
