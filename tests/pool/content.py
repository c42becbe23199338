"""Payloads that are a function of their id, and what a history of acknowledgements promises about them."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from spillover.errors import Collected
from spillover.pool import Pool, Reader, Record, Ref

Source = Pool | Reader


def payload(ident: str, size: int) -> bytes:
    return random.Random(ident).randbytes(size)


def size_of(ident: str) -> int:
    """``name.1000`` has a payload of a thousand bytes."""
    return int(ident.rpartition(".")[2])


def records(ident: str) -> list[Record]:
    data = payload(ident, size_of(ident))
    rows = np.frombuffer(data, np.uint8)[: size_of(ident) // 8 * 8].view(np.int64).reshape(-1, 1)
    return [Record("note", {"id": ident}), Record("raw", data, {"of": ident}), Record("rows", rows)]


def require(source: Source, ref: Ref, ident: str) -> None:
    """Read everything, and compare it."""
    data = payload(ident, size_of(ident))
    found = source.read(ref)
    assert list(found) == ["note", "raw", "rows"], (ident, list(found))
    assert found["note"].payload == {"id": ident}
    assert found["raw"].payload == data, ident
    assert found["raw"].metadata == {"of": ident}
    assert found["rows"].payload.numpy().tobytes() == data[: len(data) // 8 * 8], ident


@dataclass
class Promised:
    """What a history promises at one moment.

    Attributes:
        acked: every acknowledged reference of an id, and the writer that is known to hold it, if one is.
        owned: the ids that each owner owns.
        doubtful: references that a collection may have taken.
        closed: writers that hold what they published no longer.
    """

    acked: dict[str, dict[str, int]] = field(default_factory=dict)
    owned: dict[str, set[str]] = field(default_factory=dict)
    doubtful: set[str] = field(default_factory=set)
    closed: set[int] = field(default_factory=set)

    @classmethod
    def by(cls, events: Iterable[Sequence[Any]]) -> Promised:
        """What is promised after some events."""
        now = cls()
        for kind, *rest in events:
            getattr(now, f"_{kind}")(*rest)
        return now

    def kept(self) -> set[str]:
        """The ids that somebody owns."""
        return set().union(*self.owned.values())

    def collecting(self) -> None:
        """There was another collection, while no writer lived."""
        self._collecting()

    def check(self, source: Source) -> None:
        """Whatever was promised reads back; everything else does, or was collected."""
        kept = self.kept()
        for ident, refs in self.acked.items():
            read = 0
            for ref in refs:
                try:
                    require(source, Ref.parse(ref), ident)
                    read += 1
                except Collected:
                    assert ref in self.doubtful, f"{ident} at {ref} was promised and is gone"
            assert read or ident not in kept, f"{ident} is owned, and gone"

    def _acked(self, ident: str, ref: str, writer: int) -> None:
        self.acked.setdefault(ident, {}).setdefault(ref, writer)

    def _owned(self, name: str, *idents: str) -> None:
        self.owned.setdefault(name, set()).update(idents)

    def _releasing(self, name: str) -> None:
        self.owned.pop(name, None)

    def _closing(self, writer: int) -> None:
        self.closed.add(writer)

    def _collecting(self, *live: int) -> None:
        kept, holding = self.kept(), {*live} - self.closed
        for ident, refs in self.acked.items():
            if ident not in kept:
                self.doubtful |= {ref for ref, writer in refs.items() if writer not in holding}


class History:
    """What processes were told, one event a line, written after the answer came."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def acked(self, ident: str, ref: Ref, *, writer: int = 0) -> None:
        """``writer`` is the process whose publication it was, if that is known to live."""
        self.note("acked", ident, str(ref), writer)

    def owned(self, name: str, idents: Iterable[str]) -> None:
        self.note("owned", name, *idents)

    def releasing(self, name: str) -> None:
        """From here on ``name`` may own or not."""
        self.note("releasing", name)

    def closing(self) -> None:
        """From here on this process does not hold what it published."""
        self.note("closing", os.getpid())

    def collecting(self) -> None:
        """From here on what nobody owns may be gone, but what this process published."""
        self.note("collecting", os.getpid())

    def note(self, *event: Any) -> None:
        with self.path.open("ab", buffering=0) as file:
            file.write(json.dumps(event).encode() + b"\n")

    def promised(self) -> Promised:
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        return Promised.by(map(json.loads, lines))

    def check(self, source: Source) -> None:
        self.promised().check(source)


def publish(pool: Pool, history: History, ident: str, dependencies: Sequence[Ref] = ()) -> Ref:
    """Publish once, also when this is the repetition of a call whose answer was lost."""
    found = pool.receipt(ident)
    if found is not None:
        history.acked(ident, found[0])
        return found[0]
    ref = pool.publish(records(ident), dependencies=dependencies, submission=ident)
    history.acked(ident, ref, writer=os.getpid())
    return ref
