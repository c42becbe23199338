"""How much memory a ring takes and what it keeps there: decided before anything is allocated."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from spillover.engine.ring.drive import Drive
from spillover.engine.ring.layers import LayerIndex
from spillover.errors import EngineError

SLOTS = 3  # one that computes, one that is being completed, one to read ahead into


@dataclass(frozen=True)
class Layout:
    """What a `Ring` keeps in memory, in bytes.

    `slots` buffers of `slot_size` hold layers on their way, `expert_slots` buffers of `expert_size` chosen
    experts; the layers in `pinned` stay, all their experts included, in `pinned_bytes` of their own.
    `pass_bytes` is what one pass over all layers reads, all experts included, once pinned layers are there.
    """

    slots: int
    slot_size: int
    expert_slots: int
    expert_size: int
    pinned: frozenset[int]
    pinned_bytes: int
    pass_bytes: int

    @property
    def bytes(self) -> int:
        """All memory that the ring may ever hold."""
        return self.slots * self.slot_size + self.expert_slots * self.expert_size + self.pinned_bytes

    @classmethod
    def of(
        cls,
        layers: LayerIndex,
        drive: Drive,
        *,
        pinned: Collection[int] = (),
        slots: int | None = None,
        expert_slots: int | None = None,
    ) -> Layout:
        """The layout with `pinned` layers.

        By default there are three slots, or as many more small ones as keep every thread of `drive` reading,
        and two expert slots or as many more.
        """
        kept = frozenset(pinned)
        streamed = [number for number in range(len(layers.layers)) if number not in kept]
        size = max((layers.layers[number].size for number in streamed), default=0)
        expert = max((part.size for number in streamed for part in layers.experts[number]), default=0)
        return cls(
            slots=min(len(streamed), slots or _enough(SLOTS, size, drive)),
            slot_size=size,
            expert_slots=(expert_slots or _enough(2, expert, drive)) if expert else 0,
            expert_size=expert,
            pinned=kept,
            pinned_bytes=sum(layers.bytes(number) for number in kept),
            pass_bytes=sum(layers.bytes(number) for number in streamed),
        )

    @classmethod
    def within(
        cls,
        layers: LayerIndex,
        drive: Drive,
        budget: int,
        *,
        slots: int | None = None,
        expert_slots: int | None = None,
    ) -> Layout:
        """The layout that reads least within `budget` bytes; `EngineError` when none fits.

        Pinned layers are spread evenly: while one of them computes, the drive reads ahead, and between two of
        them there is always something to read. All in one place, they would compute longer than the free
        slots take to fill, and the drive would wait.
        """

        def holding(count: int) -> Layout:
            return cls.of(layers, drive, pinned=spread(total, count), slots=slots, expert_slots=expert_slots)

        total = len(layers.layers)
        fitting = next((one for n in range(total, -1, -1) if (one := holding(n)).bytes <= budget), None)
        if fitting is None:
            fitting = cls.of(layers, drive, slots=2, expert_slots=2)
        if fitting.bytes > budget:
            raise EngineError(
                f"streaming needs buffers of {fitting.bytes / 1e9:.2f} GB, {budget / 1e9:.2f} GB are left",
                hint="allow more memory, or use a smaller batch",
            )
        return fitting


def spread(layers: int, count: int) -> frozenset[int]:
    """`count` of the numbers below `layers`, evenly apart, 0 among them."""
    return frozenset(number * layers // count for number in range(count))


def _enough(least: int, size: int, drive: Drive) -> int:
    """Buffers of `size` bytes, so that one can be used and one completed while all threads read."""
    return least if not size else max(least, 2 + -(-drive.threads * drive.read_bytes // size))
