"""What is on its way out: deletions, compactions that fail or die, and whoever comes at that moment."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

from pool.content import records, require
from pool.others import refused
from spillover.errors import (
    Collected,
    StoreFull,
)
from spillover.pool import Pool
from spillover.store.disk import Disk


class Late(Disk):
    """Does something at the last moment before a file is removed."""

    def __init__(self) -> None:
        self.act: Callable[[], None] = lambda: None

    def unlink(self, path: Path) -> None:
        if path.suffix == ".pack":
            self.act()
        super().unlink(path)


def test_what_is_being_deleted_cannot_be_owned_any_more(tmp_path: Path) -> None:
    """The deletion is on record before the file goes, so that nobody retains what is not there."""
    disk = Late()
    pool = Pool.open(tmp_path / "pool", create=True, disk=disk)
    ref = pool.publish(records("one.900"))
    linked = pool.publish(records("two.900"), dependencies=[ref])
    pool.close()
    refusals: list[str] = []
    with pool.owners() as owners:
        owners.retain("before", [linked])
        owners.release("before")

        def retain() -> None:
            for late in (ref, linked):
                with refused(Collected, "nobody owned it"):
                    owners.retain("late", [late])
                refusals.append(str(late))

        disk.act = lambda: in_time(retain)
        assert owners.collect().deleted == 1
        assert refusals == [str(ref), str(linked)]
        assert owners.names() == []


class Failing(Disk):
    """Cannot replace one file."""

    name = ""

    def rename(self, old: Path, new: Path) -> None:
        if new.name == self.name:
            raise OSError(errno.ENOSPC, "injected")
        super().rename(old, new)


def test_a_compaction_that_fails_at_its_last_step_changes_nothing(tmp_path: Path) -> None:
    """Its transaction is undone, also in the memory of the process that goes on."""
    disk = Failing()
    pool = Pool.open(tmp_path / "pool", create=True, disk=disk)
    refs = [pool.publish(records(ident)) for ident in ("one.900", "two.9000")]
    pool.close()
    with pool.owners() as owners:
        owners.retain("kept", refs[:1])
        disk.name = "moved"
        with refused(StoreFull, "no space left"):
            owners.compact(min_owned=1.0)
        require(Pool.open(tmp_path / "pool"), refs[1], "two.9000")
        owners.retain("both", refs)
        disk.name = ""
        assert owners.collect().packs == 1
        owners.release("both")
        assert owners.compact(min_owned=1.0).rewritten == 1
        require(Pool.open(tmp_path / "pool"), refs[0], "one.900")


def test_what_moved_is_owned_where_it_went(tmp_path: Path) -> None:
    """While a reader keeps the replaced pack, whoever retains owns the copy, not what is on its way out."""
    pool = Pool.open(tmp_path / "pool", create=True)
    refs = [pool.publish(records(ident)) for ident in ("one.900", "two.9000")]
    pool.close()
    with pool.owners() as owners:
        owners.retain("old", refs[:1])
        with pool.reader() as reader:
            require(reader, refs[0], "one.900")
            done = owners.compact(min_owned=1.0)
            assert (done.rewritten, done.held) == (1, 1)
            owners.retain("new", refs[:1])
            owners.release("old")
            require(reader, refs[0], "one.900")
            with refused(Collected, "nobody owned it"):
                owners.retain("late", refs[1:])
        assert owners.collect().packs == 1
        require(Pool.open(tmp_path / "pool"), refs[0], "one.900")


def in_time(act: Callable[[], None]) -> None:
    """Run ``act`` in another thread, and do not wait for ever."""
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive(), "it waits for a lock"


class Dying(Disk):
    """Kills its process after the first bytes that it made durable."""

    def sync_data(self, file: int) -> None:
        super().sync_data(file)
        os.kill(os.getpid(), signal.SIGKILL)


def test_the_copies_of_a_compaction_that_died_are_nobodys(tmp_path: Path) -> None:
    """They are no publications of the writer that made them, and answer for no submission."""
    path = tmp_path / "pool"
    with Pool.open(path, create=True) as pool:
        refs = {ident: pool.publish(records(ident), submission=ident) for ident in ("a.900", "b.9000")}
    with Pool.open(path).owners() as owners:
        owners.retain("kept", [refs["a.900"]])

    def compact() -> None:
        with Pool.open(path, disk=Dying()).owners() as owners:
            owners.compact(min_owned=1.0)

    process = multiprocessing.get_context("fork").Process(target=compact)
    process.start()
    process.join(30)
    assert process.exitcode == -signal.SIGKILL
    assert len([*pool.folder.list_packs()]) == 2
    assert pool.receipt("a.900") == [refs["a.900"]]
    with pool.owners() as owners:
        (info,) = owners.writers()
        assert owners.retire(info.id, adopt="found") == []
        assert owners.collect().packs == 1
        assert owners.compact(min_owned=1.0).rewritten == 1
        assert pool.receipt("a.900") == [refs["a.900"]]
        require(Pool.open(path), refs["a.900"], "a.900")
