"""What a pool refuses, each with one line that says why, and with nothing lost by it."""

from __future__ import annotations

import os
import signal
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pool.content import payload, records, require
from pool.others import Other, refused
from spillover.errors import (
    Corrupt,
    InputError,
    LockContended,
    Mismatch,
    StateError,
    Superseded,
)
from spillover.pool import Pool, Record, Ref, Writer
from spillover.pool.layout import PackHeader, checked


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Callable[[], Other]]:
    started: list[Other] = []
    Pool.open(tmp_path / "pool", create=True)

    def start() -> Other:
        started.append(Other(tmp_path / "pool"))
        return started[-1]

    yield start
    for process in started:
        process.close()


def test_another_version(tmp_path: Path) -> None:
    path = tmp_path / "pool"
    with Pool.open(path, create=True) as pool:
        ref = pool.publish(records("one.900"))
    (pack,) = (path / "packs").iterdir()
    before = pack.read_bytes()
    head = bytearray(before[:56])
    struct.pack_into("<H", head, 8, 2)
    pack.write_bytes(checked(bytes(head)) + before[64:])
    with refused(Corrupt, "format version 2", "pip install --upgrade spillover"):
        Pool.open(path).read(ref)
    with Pool.open(path).owners() as owners:
        assert "format version 2" in owners.collect().damaged[0]
        assert pack.exists(), "a pack of another version is not for us to delete"
    identity = path / "pool.json"
    identity.write_text(identity.read_text().replace('"format":1', '"format":2'))
    with refused(Mismatch, "pool format 2", "pip install --upgrade spillover"):
        Pool.open(path)


def test_a_reference_to_another_pool(tmp_path: Path) -> None:
    here, there = (Pool.open(tmp_path / name, create=True) for name in ("here", "there"))
    ref = there.publish(records("one.900"))
    for act in (lambda: here.read(ref), lambda: here.pin([ref]), lambda: here.record(ref.at(0))):
        with refused(Mismatch, "belongs to pool", "spill pool export"):
            act()
    with here.owners() as owners, refused(Mismatch, "belongs to pool"):
        owners.retain("kept", [ref])
    here.close()
    there.close()


def test_a_pack_under_a_wrong_name(tmp_path: Path) -> None:
    pool = Pool.open(tmp_path / "pool", create=True)
    ref = pool.publish(records("one.900"))
    path = pool.folder.path_of(ref.pack)
    wrong = pool.folder.path_of(ref.pack + 1)
    path.rename(wrong)
    with refused(Corrupt, "another pool or name"):
        Pool.open(tmp_path / "pool").read(Ref(ref.pool, ref.pack + 1, ref.offset, ref.length, ref.check))
    wrong.write_bytes(PackHeader(bytes(16), ref.pack + 1, 1).encode() + wrong.read_bytes()[64:])
    with refused(Corrupt, "another pool or name"):
        Pool.open(tmp_path / "pool").read(Ref(ref.pool, ref.pack + 1, ref.offset, ref.length, ref.check))


@pytest.mark.parametrize("begun", [False, True])
def test_a_retired_writer_that_wakes_up(tmp_path: Path, other: Callable[[], Other], begun: bool) -> None:
    """A stopped process whose lock was lost: what it writes later counts for nothing and harms nothing."""
    pool = Pool.open(tmp_path / "pool")
    zombie = other()
    first = Ref.parse(zombie.publish("first.5000"))
    os.kill(zombie.pid, signal.SIGSTOP)
    (writer,) = pool.folder.list_writers()
    with pool.owners() as owners:
        with refused(LockContended, f"process {zombie.pid}", "alive"):
            owners.retire(writer)
        pool.folder.gate_of(writer).unlink()  # what retiring does where the lock was lost
        adopted = owners.retire(writer, adopt="kept")
        assert adopted == [first]
        assert not owners.collect().deleted
        if begun:
            zombie.send("publish", "late.5000")
        os.kill(zombie.pid, signal.SIGCONT)
        said = zombie.hear() if begun else zombie.publish("late.5000")
        assert said.startswith("Superseded: writer"), said
        assert "was retired" in said
        assert "open the pool again" in said
        require(pool, first, "first.5000")
        assert not pool.verify().damaged
        assert not owners.collect().damaged
        owners.release("kept")
        zombie.close()
        assert owners.collect().packs == 0


def test_a_writer_that_is_retired_within_its_write(tmp_path: Path) -> None:
    """Retired between its sync and its answer: refused, although everything is on the disk."""
    pool = Pool.open(tmp_path / "pool", create=True)
    first = pool.publish(records("first.500"))
    disk = pool.folder.disk
    sync = disk.sync_data

    def retired_meanwhile(file: int) -> None:
        sync(file)
        pool.folder.gate_of(pool.writer.id).unlink()

    disk.sync_data = retired_meanwhile  # type: ignore[method-assign]
    with refused(Superseded, "was retired"):
        pool.publish(records("second.500"))
    disk.sync_data = sync  # type: ignore[method-assign]
    with refused(Superseded, "was retired"):
        pool.publish(records("third.500"))
    pool.close()
    require(Pool.open(tmp_path / "pool"), first, "first.500")


def test_a_closed_writer(tmp_path: Path) -> None:
    pool = Pool.open(tmp_path / "pool", create=True)
    writer = pool.writer
    ref = pool.publish([Record("raw", payload("x", 100))])
    pool.close()
    pool.close()
    with refused(StateError, "closed", "open the pool again"):
        writer.publish([Record("raw", b"")])
    assert pool.record(ref.at(0)).payload == payload("x", 100)
    assert pool.publish([Record("raw", b"")]).pack >> 24 != writer.id, (
        "a pool that is used again has a new writer"
    )
    pool.close()


def test_closing_while_threads_publish(tmp_path: Path) -> None:
    """Whoever gets a reference can read it until a collection; whoever does not hears that it was closed."""
    path = tmp_path / "pool"
    for attempt in range(20):
        pool = Pool.open(path, create=True)
        found: dict[str, Ref | BaseException] = {}
        threads = [
            threading.Thread(target=publish_on, args=(pool.writer, f"{attempt}-{n}", found)) for n in range(4)
        ]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + 30
        while len(found) < 5 + attempt and time.monotonic() < deadline:
            time.sleep(0.0005)
        pool.close()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()
        errors = [answer for answer in found.values() if not isinstance(answer, Ref)]
        assert len(errors) == 4
        assert {type(error) for error in errors} == {StateError}, errors
        for ident, answer in found.items():
            if isinstance(answer, Ref):
                require(pool, answer, ident)
    with Pool.open(path).owners() as owners:
        assert not owners.writers()
        assert owners.collect().packs == 0, "a closed writer holds nothing"


def publish_on(writer: Writer, name: str, found: dict[str, Ref | BaseException]) -> None:
    """Publish until that is refused."""
    for number in range(10_000):
        ident = f"{name}-{number}.300"
        try:
            found[ident] = writer.publish(records(ident))
        except BaseException as error:
            found[ident] = error
            return


def test_an_owner_while_another_lives(tmp_path: Path, other: Callable[[], Other]) -> None:
    pool = Pool.open(tmp_path / "pool")
    rival = other()
    with pool.owners() as owners:
        ref = pool.publish(records("one.900"))
        owners.retain("kept", [ref])
        rival.send("own")
        said = rival.hear()
        assert said.startswith("LockContended"), said
        assert str(os.getpid()) in said
        with refused(LockContended, str(os.getpid())):
            pool.owners()
        owners.collect()
    rival.send("own")
    assert rival.hear() == "['kept']"
    pool.close()


def test_a_folder_that_holds_no_pool(tmp_path: Path) -> None:
    with refused(InputError, "holds no pool", "create=True"):
        Pool.open(tmp_path / "none")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("words")
    with refused(StateError, "is not empty"):
        Pool.open(tmp_path / "mine", create=True)
    assert os.listdir(tmp_path / "mine") == ["thesis.tex"]
