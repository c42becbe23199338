"""Who works on what right now, in memory, in the coordinator's monotonic time.

That a task is leased, to whom and as which attempt, is in the database; how long the lease still lasts is
only here. A coordinator that takes over therefore gives every lease its full time once more: a restart
spends no attempt, and no wall clock is asked.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Sequence

import msgspec

from spillover.pool import Ref

__all__ = ["Held", "Leases"]


class Held(msgspec.Struct, frozen=True, gc=False):
    """A lease that is out.

    Attributes:
        number: the task's number.
        attempt: which attempt.
        queue: number of the queue.
        key: the task's id.
        worker: who has it.
        input: what the task owns.
    """

    number: int
    attempt: int
    queue: int
    key: str
    worker: str
    input: Ref | None


class Leases:
    """All leases of one coordinator. Times are seconds of a monotonic clock.

    Leases that are given or extended together share one entry in the heap of deadlines. What was extended or
    removed since leaves an entry behind that means nothing; it is dropped when its time comes, or when
    such entries are many.
    """

    def __init__(self) -> None:
        self._held: dict[int, Held] = {}
        self._deadlines: dict[int, float] = {}
        self._heap: list[tuple[float, int, Sequence[int]]] = []
        self._serial = itertools.count()
        self._entered = 0

    def __len__(self) -> int:
        return len(self._held)

    def get(self, number: int) -> Held | None:
        """The lease on a task."""
        return self._held.get(number)

    def all(self) -> list[Held]:
        """Every lease."""
        return [*self._held.values()]

    def add(self, helds: Iterable[Held], deadline: float) -> None:
        """Enter leases that run out at ``deadline``."""
        added = {held.number: held for held in helds}
        self._held.update(added)
        self.extend([*added], deadline)

    def extend(self, numbers: Sequence[int], deadline: float) -> None:
        """Let leases run out at ``deadline`` instead."""
        if not numbers:
            return
        self._deadlines.update(dict.fromkeys(numbers, deadline))
        self._enter(numbers, deadline)
        if self._entered > 64 + 4 * len(self._deadlines):
            self._rebuild()

    def remove(self, numbers: Iterable[int]) -> list[tuple[Held, float]]:
        """Drop leases; returns them with their deadlines."""
        return [(self._held.pop(number), self._deadlines.pop(number)) for number in numbers]

    def due(self, now: float) -> bool:
        """Whether `overdue` may find something."""
        return any(deadline < now for deadline, *_ in self._heap[:1])

    def overdue(self, now: float) -> list[Held]:
        """The leases that ran out before ``now``, each once. They stay until they are removed."""
        found: dict[int, float] = {}
        while self._heap and self._heap[0][0] < now:
            deadline, _, numbers = heapq.heappop(self._heap)
            self._entered -= len(numbers)
            found |= {number: deadline for number in numbers if self._deadlines.get(number) == deadline}
        for number, deadline in found.items():  # the transaction that ends them may fail
            self._enter([number], deadline)
        return [self._held[number] for number in found]

    def _enter(self, numbers: Sequence[int], deadline: float) -> None:
        heapq.heappush(self._heap, (deadline, next(self._serial), numbers))
        self._entered += len(numbers)

    def _rebuild(self) -> None:
        """Drop the entries that mean nothing any more."""
        together: dict[float, list[int]] = {}
        for number, deadline in self._deadlines.items():
            together.setdefault(deadline, []).append(number)
        self._heap, self._entered = [], 0
        for deadline, numbers in together.items():
            self._enter(numbers, deadline)
