"""Who works on what right now, in memory, in the coordinator's monotonic time.

That a task is leased, to whom and as which attempt, is in the database; how long the lease still lasts is
only here. A coordinator that takes over therefore gives every lease its full time once more: a restart
spends no attempt, and no wall clock is asked.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from spillover.pool import Ref

__all__ = ["Held", "Leases"]


@dataclass(slots=True, frozen=True)
class Held:
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
    """All leases of one coordinator. Times are seconds of a monotonic clock."""

    def __init__(self) -> None:
        self._held: dict[int, Held] = {}
        self._deadlines: dict[int, float] = {}
        self._heap: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._held)

    def get(self, number: int) -> Held | None:
        """The lease on a task."""
        return self._held.get(number)

    def all(self) -> list[Held]:
        """Every lease."""
        return [*self._held.values()]

    def add(self, held: Held, deadline: float) -> None:
        """Enter a lease that runs out at ``deadline``."""
        self._held[held.number] = held
        self.extend(held.number, deadline)

    def extend(self, number: int, deadline: float) -> None:
        """Let a lease run out at ``deadline`` instead."""
        self._deadlines[number] = deadline
        heapq.heappush(self._heap, (deadline, number))
        if len(self._heap) > 64 + 4 * len(self._deadlines):
            self._heap = [(deadline, number) for number, deadline in self._deadlines.items()]
            heapq.heapify(self._heap)

    def remove(self, number: int) -> tuple[Held, float]:
        """Drop a lease; returns it with its deadline."""
        return self._held.pop(number), self._deadlines.pop(number)

    def overdue(self, now: float) -> list[Held]:
        """The leases that ran out before ``now``, each once. They stay until they are removed."""
        found: dict[int, float] = {}
        while self._heap and self._heap[0][0] < now:
            deadline, number = heapq.heappop(self._heap)
            if self._deadlines.get(number) == deadline:
                found[number] = deadline
        for number, deadline in found.items():  # the transaction that ends them may fail
            heapq.heappush(self._heap, (deadline, number))
        return [self._held[number] for number in found]
