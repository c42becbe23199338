"""Many processes use one pool while they are killed, stopped and started again, and write down what they saw.

As a program, ``python -m pool.campaign FOLDER SECONDS SEED`` runs writers, readers and an owner, each in a
forked process, lets accidents happen to them, checks the history, and prints figures as JSON.

Every process appends events to a file of its own: a time (CLOCK_MONOTONIC, one for the machine), a kind,
details. What must hold is decided afterwards, by `Ledger`: a reference is *surely held* from its
acknowledgement to the end of its writer, and from the return of a retain to the call of the release. While
these spans follow each other without a gap, it must read.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pool.content import records, require
from spillover.errors import Collected, SpillError
from spillover.pool import Pool, Publication, Ref

WRITERS, READERS = 4, 4
PACK_BYTES = 120_000
FOREVER = float("inf")
Event = list[Any]


class Diary:
    """The events of one process, each on disk before the next thing happens."""

    def __init__(self, folder: Path, role: str) -> None:
        path = folder / "history" / f"{role}-{os.getpid()}.jsonl"
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC)

    def note(self, kind: str, *details: Any) -> None:
        os.write(self._file, json.dumps([time.monotonic(), kind, *details]).encode() + b"\n")


class Tail:
    """What others wrote since the last look."""

    def __init__(self, folder: Path, role: str) -> None:
        self._folder, self._pattern = folder / "history", f"{role}-*.jsonl"
        self._read: dict[Path, int] = {}

    def __iter__(self) -> Iterator[Event]:
        for path in sorted(self._folder.glob(self._pattern)):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                for line in file.read().splitlines(keepends=True):
                    if line.endswith(b"\n"):  # else it is still being written, or was cut off
                        self._read[path] = self._read.get(path, 0) + len(line)
                        yield json.loads(line)


class Stopping:
    """Whether this process was asked to end."""

    def __init__(self) -> None:
        self.asked = False
        signal.signal(signal.SIGTERM, self._ask)

    def _ask(self, number: int, frame: object) -> None:
        self.asked = True

    def pause(self, seconds: float) -> None:
        time.sleep(seconds)


def write(folder: Path, diary: Diary, luck: random.Random, stopping: Stopping, slot: int) -> None:
    """Settle what the former life of this slot left open, then publish: alone, together, linked, at once."""
    pool = Pool.open(folder / "pool", pack_bytes=PACK_BYTES)
    mine = Tail(folder, f"writer{slot}")
    begun: set[str] = set()
    for _, kind, ident, *_ in mine:
        (begun.add if kind == "publishing" else begun.discard)(ident)
    for ident in begun:
        if found := pool.receipt(ident):
            diary.note("found", ident, str(found[0]))
        else:
            publish(pool, diary, [ident], [], single=True)
    life: list[Ref] = []
    while not stopping.asked:
        idents = [
            f"w{slot}-{os.getpid()}-{luck.getrandbits(40):x}.{size(luck)}"
            for _ in range(luck.choice([1, 1, 3]))
        ]
        links = luck.sample(life, min(len(life), luck.choice([0, 0, 1, 2])))
        if luck.random() < 0.2:
            together = [
                threading.Thread(target=publish, args=(pool, diary, [ident], links)) for ident in idents
            ]
            for thread in together:
                thread.start()
            for thread in together:
                thread.join()
        else:
            life += publish(pool, diary, idents, links)
        if luck.random() < 0.02:
            pool.seal()
        if luck.random() < 0.01:
            diary.note("closing", os.getpid())
            pool.close()
            return
        stopping.pause(luck.random() * 0.02)
    diary.note("closing", os.getpid())
    pool.close()


def size(luck: random.Random) -> int:
    return luck.choice([100, 900, 5_000, 5_000, 30_000, 70_000])


def publish(
    pool: Pool, diary: Diary, idents: list[str], links: list[Ref], *, single: bool = False
) -> list[Ref]:
    """Publish several together, each one linked to the one before."""
    refs = []
    for ident in idents if single or len(idents) == 1 else ():
        diary.note("publishing", ident)
        refs.append(pool.publish(records(ident), dependencies=links, submission=ident))
    if not refs:
        many = [
            Publication(records(ident), [*links, *([n - 1] if n else [])]) for n, ident in enumerate(idents)
        ]
        refs = pool.publish_many(many)
    for n, (ident, ref) in enumerate(zip(idents, refs, strict=True)):
        needs = [str(link) for link in links] + ([str(refs[n - 1])] if n else [])
        diary.note("acked", ident, str(ref), needs, os.getpid())
    return refs


def read(folder: Path, diary: Diary, luck: random.Random, stopping: Stopping, slot: int) -> None:
    """Read anything that anybody acknowledged, in sessions short and long, and under pins."""
    pool = Pool.open(folder / "pool")
    acked: list[tuple[str, str]] = []
    news = Tail(folder, "writer*")
    session = pool.reader()
    while not stopping.asked:
        acked += [(event[2], event[3]) for event in news if event[1] in ("acked", "found")]
        for _ in range(10):
            if not acked or stopping.asked:
                break
            ident, text = acked[-1 - min(int(luck.expovariate(0.02)), len(acked) - 1)]
            began, ref = time.monotonic(), Ref.parse(text)
            way = luck.random()
            pinned = False
            try:
                if way < 0.2:
                    with pool.pin([ref]):
                        pinned = True
                        stopping.pause(luck.random() * 0.03)
                        require(pool, ref, ident)
                else:
                    require(session if way < 0.6 else pool.reader(), ref, ident)
                diary.note("read", text)
            except Collected:
                diary.note("collected", text, began, pinned)
            stopping.pause(luck.random() * 0.01)
        if luck.random() < 0.2:
            session.close()


def own(folder: Path, diary: Diary, luck: random.Random, stopping: Stopping, slot: int) -> None:
    """Retain and release in one thread, collect and compact in another."""
    pool = Pool.open(folder / "pool", pack_bytes=PACK_BYTES)
    seen = {event[2] for event in Tail(folder, "owner") if event[1] in ("released", "retained")}
    with pool.owners() as owners:
        names = set(owners.names())
        diary.note("names", sorted(names))
        failures: list[BaseException] = []

        def maintain() -> None:
            try:
                while not stopping.asked:
                    act = owners.collect if luck.random() < 0.7 else owners.compact
                    done = act()
                    assert not done.damaged, done.damaged
                    diary.note("maintained", getattr(done, "deleted", 0), getattr(done, "rewritten", 0))
                    stopping.pause(0.03)
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=maintain)
        thread.start()
        news = Tail(folder, "writer*")
        while not stopping.asked and not failures:
            for event in news:
                if event[1] in ("acked", "found") and event[3] not in seen and luck.random() < 0.7:
                    retain(owners, diary, event[3], names)
            surplus = luck.sample(sorted(names), max(0, len(names) - 150))
            for name in surplus:
                diary.note("releasing", name)
            owners.release(*surplus)
            for name in surplus:
                diary.note("released", name)
                names.discard(name)
            stopping.pause(0.02)
        thread.join()
        if failures:
            raise failures[0]


def retain(owners: Any, diary: Diary, text: str, names: set[str]) -> None:
    began = time.monotonic()
    diary.note("retaining", text)
    try:
        owners.retain(text, [Ref.parse(text)])  # each publication has an owner of its name
    except Collected:
        diary.note("collected", text, began, False)
        diary.note("released", text)
        return
    diary.note("retained", text)
    names.add(text)


ROLES: dict[str, Callable[..., None]] = (
    {f"writer{slot}": write for slot in range(WRITERS)}
    | {f"reader{slot}": read for slot in range(READERS)}
    | {"owner": own}
)


class Campaign:
    """The processes, and what happens to them."""

    def __init__(self, folder: Path, luck: random.Random) -> None:
        self._folder, self._luck = folder, luck
        (folder / "history").mkdir(parents=True)
        Pool.open(folder / "pool", create=True)
        self._diary = Diary(folder, "accidents")
        self._running: dict[str, int] = {}
        self.accidents: dict[str, int] = {"killed": 0, "stopped": 0, "ended": 0}
        self.failures: list[str] = []

    def run(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        for role in ROLES:
            self._start(role)
        while time.monotonic() < deadline and not self.failures:
            time.sleep(self._luck.uniform(0.02, 0.25))
            self._accident(self._luck.choice([*ROLES, "owner", "owner"]))
            for role, process in [*self._running.items()]:
                if os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                    self._reap(role)
                    self._start(role)
        for role in [*self._running]:
            self._kill(role)

    def _accident(self, role: str) -> None:
        kind = self._luck.random()
        if kind < 0.55:
            self.accidents["killed"] += 1
            self._kill(role)
            self._start(role)
        elif kind < 0.85:
            self.accidents["stopped"] += 1
            os.kill(self._running[role], signal.SIGSTOP)
            time.sleep(self._luck.uniform(0.02, 0.4))
            os.kill(self._running[role], signal.SIGCONT)
        else:
            self.accidents["ended"] += 1
            os.kill(self._running[role], signal.SIGTERM)

    def _start(self, role: str) -> None:
        seed = self._luck.getrandbits(64)
        child = os.fork()
        if child:
            self._running[role] = child
            return
        try:
            diary = Diary(self._folder, role)
            slot = int(role[-1]) if role[-1].isdigit() else 0
            ROLES[role](self._folder, diary, random.Random(seed), Stopping(), slot)
            os._exit(0)
        except BaseException:
            diary.note("failed", traceback.format_exc())
            os._exit(1)

    def _kill(self, role: str) -> None:
        process = self._running[role]
        self._diary.note("closing", process)
        os.kill(process, signal.SIGKILL)
        self._reap(role)

    def _reap(self, role: str) -> None:
        _, status = os.waitpid(self._running.pop(role), 0)
        code = os.waitstatus_to_exitcode(status)
        if code not in (0, -signal.SIGKILL):
            self.failures.append(f"{role} ended with {code}")


@dataclass
class Ledger:
    """What the history says, by reference."""

    idents: dict[str, str] = field(default_factory=dict)
    acked: dict[str, float] = field(default_factory=dict)
    needs: dict[str, list[str]] = field(default_factory=dict)
    spans: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    names: dict[str, list[tuple[float, str]]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    figures: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, folder: Path) -> Ledger:
        ledger = cls()
        events = sorted(Tail(folder, "*"), key=lambda event: event[0])
        ends = {event[2]: event[0] for event in reversed(events) if event[1] == "closing"}
        for at, kind, *rest in events:
            ledger._count(kind, 1)
            if kind in ("acked", "found"):
                ledger.idents[rest[1]] = rest[0]
                ledger.acked.setdefault(rest[1], at)
            if kind == "acked":
                ledger.needs[rest[1]] = rest[2]
                ledger._span(rest[1], at, ends.get(rest[3], FOREVER))
            elif kind in ("retaining", "retained", "releasing", "released"):
                ledger.names.setdefault(rest[0], []).append((at, kind))
            elif kind == "maintained":
                ledger._count("deleted", rest[0])
                ledger._count("rewritten", rest[1])
            elif kind == "failed":
                ledger.wrong.append(rest[0])
        ledger._owned()
        ledger._judge(events)
        return ledger

    def _count(self, what: str, number: int) -> None:
        self.figures[what] = self.figures.get(what, 0) + number

    def kept(self) -> list[str]:
        """References that somebody surely owns at the end."""
        return [ref for ref in self.names if self._state(ref, FOREVER) == "retained"]

    def closure(self, ref: str) -> set[str]:
        found, todo = set(), [ref]
        while todo:
            ref = todo.pop()
            if ref not in found:
                found.add(ref)
                todo += self.needs.get(ref, [])
        return found

    def _owned(self) -> None:
        for name, events in self.names.items():
            for number, (at, kind) in enumerate(events):
                if kind == "retained":
                    end = next((later for later, kind in events[number:] if kind == "releasing"), FOREVER)
                    for ref in self.closure(name):
                        self._span(ref, at, end)

    def _span(self, ref: str, start: float, end: float) -> None:
        self.spans.setdefault(ref, []).append((start, end))

    def _held_until(self, ref: str) -> float:
        """The end of the time for which it was surely held without a gap, from its acknowledgement on."""
        until = self.acked[ref]
        for start, end in sorted(self.spans.get(ref, [])):
            if start <= until:
                until = max(until, end)
        return until

    def _state(self, name: str, at: float) -> str:
        return next((kind for when, kind in reversed(self.names[name]) if when <= at), "released")

    def _judge(self, events: list[Event]) -> None:
        for at, kind, *rest in events:
            if kind == "collected":
                ref, began, pinned = rest
                until = min(self._held_until(need) for need in self.closure(ref))
                if pinned or until > at:
                    self.wrong.append(
                        f"{self.idents[ref]} at {ref} was held and is gone (read at {began:.3f})"
                    )
            elif kind == "names":
                states = {name: self._state(name, at) for name in self.names}
                lost = [name for name, state in states.items() if state == "retained" and name not in rest[0]]
                back = [name for name in rest[0] if states.get(name, "released") == "released"]
                if lost or back:
                    self.wrong.append(f"the owner came back without {lost} and with {back}")


def conclude(folder: Path, ledger: Ledger) -> dict[str, int]:
    """The state after the last accident: all that is owned reads, and no file is there without a reason."""
    pool = Pool.open(folder / "pool", pack_bytes=PACK_BYTES)
    verified = pool.verify()
    assert not verified.damaged, verified.damaged
    with pool.owners() as owners:
        for _ in range(2):
            kept = [need for ref in ledger.kept() for need in ledger.closure(ref)]
            for ref in kept:
                require(pool, Ref.parse(ref), ledger.idents[ref])
            collected = owners.collect()
            owners.compact(min_owned=1.0)
        assert not collected.damaged
        assert not pool.folder.list_writers(), "gates are left"
        stats = owners.stats()
        assert stats.packs <= stats.bytes // (PACK_BYTES // 4) + 8, stats
        assert stats.bytes <= 1.5 * stats.owned_bytes + 100_000, stats
        owners.release(*owners.names())
        final = owners.collect()
        assert final.packs == 0, final
    files = [path.relative_to(folder) for path in (folder / "pool").rglob("*") if path.is_file()]
    assert len(files) <= 8, files
    return {"owned at the end": len(kept), "packs": stats.packs}


def main(folder: Path, seconds: float, seed: int) -> dict[str, Any]:
    campaign = Campaign(folder, random.Random(seed))
    campaign.run(seconds)
    ledger = Ledger.of(folder)
    wrong = [*campaign.failures, *ledger.wrong]
    figures = {**campaign.accidents, **ledger.figures}
    try:
        figures |= conclude(folder, ledger)
    except (AssertionError, SpillError):
        wrong.append(traceback.format_exc())
    return {"figures": figures, "wrong": wrong}


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        print(json.dumps(main(Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))))
