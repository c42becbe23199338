"""The power goes at every moment of a pool's life: see `power`.

A commit of the catalogue is modelled as one atomic and durable step.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from pool.content import History, Promised, records, require
from power import Log, RecordingDisk, worlds
from spillover.errors import SpillError
from spillover.pool import Pool, Publication, Ref, ahead
from spillover.pool.catalogue import Catalogue
from spillover.pool.reference import pack_name

PACK_BYTES = 40_000
MANY = [f"many{number}.5000" for number in range(4)]
LATE = ["h.9000", "i.700"]
SMALL = ["j.500", "k.5000", "l.100"]
SINGLE = ["a.9000", "b.300", "c.30000", "d.12000", "e.1000", "f.20000", "g.200", *SMALL, *LATE]


class Told(History):
    """Puts what was acknowledged into the log of the disk."""

    def __init__(self, disk: RecordingDisk) -> None:
        self._log = disk.log

    def note(self, *event: Any) -> None:
        self._log.append(("event", *event))


@pytest.fixture
def memory() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RecordingDisk]:
    """A life: two writers, an owner that lets go, collects and compacts, and a writer that never closed."""
    root = tmp_path_factory.mktemp("disk") / "pool"
    root.mkdir()
    disk = RecordingDisk(root)
    patch = pytest.MonkeyPatch()
    patch.setattr(Catalogue, "changing", commits_noted(disk))
    patch.setattr(ahead, "filesystem", lambda path: "ext4")  # packs with zeros ahead
    live(root, disk, Told(disk))
    patch.undo()
    yield disk


def commits_noted(disk: RecordingDisk) -> Any:
    changing = Catalogue.changing

    @contextlib.contextmanager
    def noted(self: Catalogue) -> Iterator[sqlite3.Cursor]:
        with changing(self) as cursor:
            yield cursor
        if not self._connection.in_transaction:
            disk.committed(self.path, self._connection.serialize())

    return noted


def live(root: Path, disk: RecordingDisk, told: Told) -> None:
    first = Pool.open(root, create=True, disk=disk, pack_bytes=PACK_BYTES)
    refs = {"a.9000": first.publish(records("a.9000"), submission="a.9000")}
    told.acked("a.9000", refs["a.9000"], writer=1)
    many = [Publication(records(ident), [number - 1] if number else []) for number, ident in enumerate(MANY)]
    refs |= dict(zip(MANY, first.publish_many(many, submission="many"), strict=True))
    for ident in MANY:
        told.acked(ident, refs[ident], writer=1)
    with first.owners() as owners:
        owners.retain("first", [refs["a.9000"], refs[MANY[-1]]])
        told.owned("first", ["a.9000", *MANY])
    second = Pool.open(root, disk=disk, pack_bytes=PACK_BYTES)
    for ident in ("b.300", "c.30000", "d.12000", "e.1000"):  # the third begins a new pack
        refs[ident] = second.publish(records(ident), submission=ident)
        told.acked(ident, refs[ident], writer=2)
    with first.owners() as owners:
        owners.retain_many({"second": [refs["b.300"], refs["d.12000"]], "third": [refs["e.1000"]]})
        told.owned("second", ["b.300", "d.12000"])
        told.owned("third", ["e.1000"])
        told.note("closing", 2)
        second.close()
        told.releasing("first")
        owners.release("first")
        owners.retain("fourth", [refs["a.9000"]])
        told.owned("fourth", ["a.9000"])
        told.note("collecting", 1)
        owners.collect()
        told.note("closing", 1)
        first.close()
        told.note("collecting")
        owners.compact(min_owned=0.9)
        told.releasing("second")
        owners.release("second")
        told.note("collecting")
        owners.compact(min_owned=0.9)
        owners.collect()
        for ident in LATE:  # the writers of these die before their sync
            unsynced(root, disk, ident)
        (answered,) = first.receipt(LATE[0]) or [None]
        told.acked(LATE[0], answered)
        for writer in sorted({file.pack >> 24 for file in first.folder.list_packs()}):
            for ref in owners.retire(writer, adopt="late"):
                note = Pool.open(root).read(ref).get("note")
                if note is not None and note.payload["id"] in LATE:
                    told.acked(note.payload["id"], ref)
        told.owned("late", LATE)
    third = Pool.open(root, disk=disk)
    for ident in ("f.20000", "g.200", *SMALL):
        refs[ident] = third.publish(records(ident), submission=ident)
        told.acked(ident, refs[ident], writer=3)
    third.writer._gate.leave()  # it dies here: its pack stays without a seal


def unsynced(root: Path, disk: RecordingDisk, ident: str) -> None:
    """A writer that dies between its write and its sync: other processes see what the disk may not have."""
    start = len(disk.log)
    pool = Pool.open(root, disk=disk)
    pool.publish(records(ident), submission=ident)
    pool.writer._gate.leave()
    pool.writer._held.close()
    disk.log[start:] = [entry for entry in disk.log[start:] if entry[0] not in ("sync", "sync_folder")]


def events(log: Log) -> list[tuple[Any, ...]]:
    return [tuple(details) for operation, *details in log if operation == "event"]


def inspect(folder: Path, promised: Promised, *, gates: bool) -> None:
    """Everything that was acknowledged is there, and nothing torn passes for a publication."""
    if not (folder / "pool.json").exists():
        assert not promised.acked
        return
    pool = Pool.open(folder, create=True, pack_bytes=PACK_BYTES)
    writers = {file.pack >> 24 for file in pool.folder.list_packs()}
    if gates:  # their names may have reached the platter or not
        for writer in writers:
            pool.folder.gate_of(writer).touch()
    promised.check(pool.reader())
    require_torn(pool, promised)
    for submission, idents in [("many", MANY), *((ident, [ident]) for ident in SINGLE)]:
        found = pool.receipt(submission)
        if found is None:
            assert not any(set(promised.acked.get(ident, ())) - promised.doubtful for ident in idents)
            continue
        for ident, ref in zip(idents, found, strict=True):
            require(pool, ref, ident)
    if gates:
        settle(pool, promised, writers)


def settle(pool: Pool, promised: Promised, writers: set[int]) -> None:
    """Whoever takes the pool over adopts what is whole, and can collect and compact."""
    with pool.owners() as owners:
        for ref in [ref for writer in sorted(writers) for ref in owners.retire(writer, adopt="found")]:
            require_whole(pool, ref)
        assert not owners.collect().damaged
        assert not pool.folder.list_writers()
        promised.check(pool.reader())
        owners.release("found")
        promised.collecting()
        owners.compact(min_owned=1.0)
        owners.collect()
        promised.check(pool.reader())


def require_torn(pool: Pool, promised: Promised) -> None:
    """What a verification calls damaged is a publication that was cut off, not one that was acknowledged."""
    acked = {Ref.parse(ref) for refs in promised.acked.values() for ref in refs}
    for line in pool.verify().damaged:
        found = re.search(
            r"the extent at (\d+) of .*?(\w{10}-\w{6})\.pack|(\w{10}-\w{6})\.pack.*? at (\d+)", line
        )
        assert found, line
        pack, offset = found[2] or found[3], int(found[1] or found[4])
        assert (pack, offset) not in {(pack_name(ref.pack), ref.offset) for ref in acked}, line


def require_whole(pool: Pool, ref: Ref) -> None:
    """Every byte of a publication can be read."""
    for record in pool.read(ref).values():
        if record.id == "rows":
            record.payload.numpy()


def inspect_all(recorded: RecordingDisk, memory: Path, chances: Sequence[float]) -> None:
    number = 0
    for number, (cut, world) in enumerate(worlds(recorded.log, recorded.root, chances)):
        if recorded.log[cut - 1][0] == "event" and number % 5:
            continue  # nothing reached the disk since the cut before
        target = memory / str(number)
        world.build(recorded.root, target)
        try:
            inspect(target, Promised.by(events(recorded.log[:cut])), gates=number % 3 == 0)
        except BaseException as error:
            error.add_note(f"the power went after {cut} operations, the last {recorded.log[cut - 1][:2]}")
            raise
        shutil.rmtree(target)
    assert number > 500


def test_whatever_was_acknowledged_survives(recorded: RecordingDisk, memory: Path) -> None:
    inspect_all(recorded, memory, (0.0, 1.0, 0.5, 0.85))


@pytest.mark.slow
def test_whatever_was_acknowledged_survives_in_many_worlds(recorded: RecordingDisk, memory: Path) -> None:
    inspect_all(recorded, memory, (0.1, 0.3, 0.5, 0.7, *[0.9] * 8))


@pytest.mark.parametrize("dropped", ["sync", "sync_folder"])
def test_the_check_can_fail(recorded: RecordingDisk, memory: Path, dropped: str) -> None:
    """Without its syncs the same life does lose what it acknowledged, so the worlds mean something."""
    careless = [entry for entry in recorded.log if entry[0] != dropped]
    lost = 0
    for number, (cut, world) in enumerate(worlds(careless, recorded.root, (0.0, 0.5))):
        if number % 3:
            continue
        world.build(recorded.root, memory / str(number))
        try:
            promised = Promised.by(events(careless[:cut]))
            if promised.acked:
                promised.check(Pool.open(memory / str(number)))
        except (SpillError, AssertionError, OSError):
            lost += 1
    assert lost > 20
