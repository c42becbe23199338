"""What a pool refuses, each with one line that says why, and with nothing lost by it."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pool.content import payload, records, require
from spillover.errors import (
    Collected,
    Corrupt,
    InputError,
    LockContended,
    Mismatch,
    SpillError,
    StateError,
    StoreFull,
    StoreRefused,
    Superseded,
)
from spillover.pool import Pool, Record, Ref, Writer
from spillover.pool.layout import PackHeader, checked
from spillover.store.disk import Disk

TESTS = Path(__file__).resolve().parents[1]
WRITER = """
import sys
from pool.content import records
from spillover.errors import SpillError
from spillover.pool import Pool

pool = Pool.open(sys.argv[1])
for line in sys.stdin:
    word, ident = line.split()
    try:
        print(pool.publish(records(ident)) if word == "publish" else pool.owners().names(), flush=True)
    except SpillError as error:
        print(f"{type(error).__name__}: {error} | {error.hint}", flush=True)
"""


class Other:
    """Another process that publishes when it is told to."""

    def __init__(self, folder: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(folder)],
            cwd=TESTS,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self._process.pid

    def send(self, word: str, ident: str = "-") -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{word} {ident}\n")
        self._process.stdin.flush()

    def hear(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def publish(self, ident: str) -> str:
        self.send("publish", ident)
        return self.hear()

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()


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


@contextmanager
def mounted(folder: Path, *options: str) -> Iterator[Path]:
    folder.mkdir(exist_ok=True)
    done = subprocess.run(["mount", *options, str(folder)], capture_output=True, text=True)
    assert done.returncode == 0, f"these tests must be allowed to mount: {done.stderr.strip()}"
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextmanager
def filled(folder: Path, leaving: int) -> Iterator[None]:
    """A filesystem with only ``leaving`` bytes free."""
    ballast = folder / "ballast"
    with ballast.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError as error:
            assert error.errno == errno.ENOSPC
        file.truncate(max(0, file.tell() - leaving))
    yield
    ballast.unlink()


@contextmanager
def refused(kind: type[SpillError], *words: str) -> Iterator[None]:
    with pytest.raises(kind) as caught:
        yield
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in f"{caught.value} | {caught.value.hint}", str(caught.value)


@pytest.mark.parametrize("leaving", [0, 4 << 10, 8 << 10, 20 << 10, 60 << 10, 100 << 10])
@pytest.mark.parametrize("begun", [False, True])
def test_a_disk_that_is_really_full(tmp_path: Path, leaving: int, begun: bool) -> None:
    """One clear error at whatever call meets the end; with room again the same objects go on."""
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=3m", "tmpfs") as disk:
        path = disk / "pool"
        pool = Pool.open(path, create=True, pack_bytes=120_000)
        first = pool.publish(records("first.5000")) if begun else None
        with pool.owners() as owners:
            if first:
                owners.retain("kept", [first])
            with filled(disk, leaving):
                done = {}
                with refused(StoreFull, "no space left", "free some space"):
                    for number in range(50):
                        ident = f"full{number}.9000"
                        done[ident] = pool.publish(records(ident), submission=ident)
                for ident, ref in done.items():
                    require(pool, ref, ident)
                if first:
                    require(pool, first, "first.5000")
                with refused(StoreFull):
                    pool.publish(records("full.90000"))
            pool.publish(records("small.100"))  # shorter than what the last failure may have left behind
            pool.seal()
            last = pool.publish(records("last.90000"), submission="last")
            for ident, ref in [*done.items(), ("last.90000", last)]:
                require(Pool.open(path), ref, ident)
            owners.retain("kept", [*done.values(), last])
            assert not pool.verify().damaged
        pool.close()
        assert pool.verify().torn == 0
        with Pool.open(path).owners() as owners:
            assert not owners.collect().damaged
            for ident, ref in [*done.items(), ("last.90000", last)]:
                require(Pool.open(path), ref, ident)


@pytest.mark.parametrize("leaving", [0, 4 << 10, 24 << 10])
def test_a_full_disk_below_the_catalogue(tmp_path: Path, leaving: int) -> None:
    """Owning, collecting and compacting fail as a whole, and succeed when there is room."""
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=3m", "tmpfs") as disk:
        path = disk / "pool"
        with Pool.open(path, create=True, pack_bytes=30_000) as pool:
            refs = {f"n{n}.4000": pool.publish(records(f"n{n}.4000")) for n in range(40)}
        kept = dict([*refs.items()][::8])
        pool = Pool.open(path, pack_bytes=30_000)
        with pool.owners() as owners:
            owners.retain("kept", [*kept.values()])
            with filled(disk, leaving):
                for act in (
                    lambda: owners.retain_many({f"more{n}": [*refs.values()] for n in range(20)}),
                    lambda: owners.compact(),
                    lambda: owners.export(["kept"], disk / "export"),
                ):
                    try:
                        act()
                    except StoreFull as error:
                        assert "\n" not in str(error)
                    for ident, ref in kept.items():
                        require(pool, ref, ident)
                assert not [path for path in disk.iterdir() if path.name.endswith(".part")]
                owners.release(*[name for name in owners.names() if name != "kept"])
            for ident, ref in kept.items():
                require(pool, ref, ident)
            owners.compact()
            owners.collect()
            assert owners.stats().packs < 5
        for ident, ref in kept.items():
            require(Pool.open(path), ref, ident)


def test_a_full_disk_can_be_collected(tmp_path: Path) -> None:
    """Letting go is how room is made, so that it must not need any."""
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=3m", "tmpfs") as disk:
        with Pool.open(disk / "pool", create=True, pack_bytes=30_000) as pool:
            refs = [pool.publish(records(f"n{n}.4000")) for n in range(40)]
        pool = Pool.open(disk / "pool")
        with pool.owners() as owners:
            owners.retain("kept", refs)
            with filled(disk, 64 << 10):  # what the log of the catalogue needs
                owners.release("kept")
                assert owners.collect().packs == 0
                pool.publish(records("again.90000"))
        pool.close()


def test_a_limit_that_several_writers_share(tmp_path: Path, other: Callable[[], Other]) -> None:
    limit = 1 << 20
    path = tmp_path / "pool"
    Pool.open(path).folder.limit(limit)
    writers = [other() for _ in range(3)]
    refs: list[tuple[str, str]] = []
    open_writers, number = [*writers], 0
    while open_writers:
        for writer in [*open_writers]:
            number += 1
            said = writer.publish(f"n{number}.9000")
            if said.startswith("StoreFull"):
                assert "of its 1,048,576 bytes" in said
                assert "spill pool gc" in said
                open_writers.remove(writer)
            else:
                refs.append((said, f"n{number}.9000"))
    pool = Pool.open(path)
    used = pool.folder.used()
    assert limit * 0.9 < used < limit * (1 + 3 / 64) + 3 * 20_000
    for ref, ident in refs:
        require(pool, Ref.parse(ref), ident)
    for writer in writers:
        writer.close()
    with pool.owners() as owners:
        assert owners.collect().packs == 0
    pool.publish(records("again.9000"))


def test_a_pool_at_its_limit_can_be_sealed_and_closed(tmp_path: Path) -> None:
    pool = Pool.open(tmp_path / "pool", create=True, max_bytes=30_000)
    ref = pool.publish(records("one.9000"))
    with refused(StoreFull, "30,000"):
        pool.publish(records("two.9000"))
    pool.seal()
    require(pool, ref, "one.9000")
    pool.close()
    assert not pool.folder.list_writers()


def test_a_read_only_mount(tmp_path: Path) -> None:
    path = tmp_path / "pool"
    with Pool.open(path, create=True, pack_bytes=4000) as pool:
        refs = {f"n{n}.900": pool.publish(records(f"n{n}.900"), submission=f"n{n}") for n in range(4)}
        with pool.owners() as owners:
            owners.retain("kept", [*refs.values()][:2])
            owners.compact(min_owned=1.0)
    with mounted(tmp_path / "seen", "--bind", str(path)) as seen:
        subprocess.run(["mount", "-o", "remount,ro,bind", str(seen)], check=True)
        pool = Pool.open(seen)
        for ident, ref in refs.items():
            require(pool, ref, ident)
        assert pool.receipt("n1") == [refs["n1.900"]]
        assert not pool.verify().damaged
        with pool.pin([*refs.values()]):
            pass
        with refused(StoreRefused, "read-only mount", "mount it for writing"):
            pool.publish(records("new.900"))
        with refused(StoreRefused, "read-only mount"):
            pool.owners()
        with refused(StoreRefused, "read-only mount"):
            Pool.open(seen / "sub", create=True)
        pool.close()


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


def test_a_forked_child(tmp_path: Path) -> None:
    """It has a writer of its own, and may use none of its parent's."""
    pool = Pool.open(tmp_path / "pool", create=True)
    writer = pool.writer
    ref = pool.publish(records("one.900"))
    context = multiprocessing.get_context("fork")
    answers = context.Queue()

    def child() -> None:
        with pytest.raises(StateError, match="forked"):
            writer.publish(records("two.900"))
        with pytest.raises(StateError, match="forked"):
            writer.seal()
        require(pool, ref, "one.900")
        answers.put(str(pool.publish(records("three.900"))))
        pool.close()

    process = context.Process(target=child)
    process.start()
    three = Ref.parse(answers.get(timeout=30))
    process.join(30)
    assert process.exitcode == 0
    assert three.pack >> 24 != writer.id
    require(pool, three, "three.900")
    require(pool, pool.publish(records("four.900")), "four.900")
    assert pool.folder.list_writers() == [writer.id]
    pool.close()


FORKING = """
import os, sys, time
from pool.content import records
from spillover.errors import StateError
from spillover.pool import Pool
pool = Pool.open(sys.argv[1])
ref = pool.publish(records("one.900"))
pool.reader().read(ref)
reader = pool.reader()
reader.read(ref)
owners = pool.owners()
owners.retain("before", [ref])
{}
print(child, ref, flush=True)
time.sleep(600)
"""


@contextmanager
def forking(folder: Path, middle: str) -> Iterator[tuple[int, Ref]]:
    """A parent with a writer, a reader and the ownership, which forks in ``middle`` and then is killed."""
    Pool.open(folder, create=True)
    with subprocess.Popen(
        [sys.executable, "-c", FORKING.format(middle), str(folder)],
        cwd=TESTS,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        assert parent.stdout is not None
        child, ref = parent.stdout.readline().split()
        parent.kill()
        os.waitid(os.P_PID, parent.pid, os.WEXITED | os.WNOWAIT)
        yield int(child), Ref.parse(ref)


def test_a_child_that_ends_takes_nothing_from_its_owning_parent(tmp_path: Path) -> None:
    """SQLite would delete the log of the catalogue when the child closes what it inherited."""
    middle = """
if (child := os.fork()) == 0:
    for act in (owners.names, lambda: owners.retain("mine", [ref]), owners.collect):
        try:
            act()
        except StateError as error:
            assert "forked" in str(error)
        else:
            os._exit(1)
    with owners:
        pass
    del owners
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
owners.retain("after", [ref])
"""
    with forking(tmp_path / "pool", middle) as (_, ref), Pool.open(tmp_path / "pool").owners() as owners:
        assert owners.names() == ["after", "before"]
        owners.collect()
        require(Pool.open(tmp_path / "pool"), ref, "one.900")


def test_a_child_that_outlives_its_parent_holds_no_packs(tmp_path: Path) -> None:
    middle = """
owners.release("before")
owners.close()
if (child := os.fork()) == 0:
    sys.stdin.read()  # until the test is over
    os._exit(0)
"""
    with forking(tmp_path / "pool", middle) as (child, ref), Pool.open(tmp_path / "pool").owners() as owners:
        os.kill(child, 0)
        (info,) = owners.writers()
        assert owners.retire(info.id) == [ref]
        collected = owners.collect()
        assert (collected.packs, collected.held) == (0, 0)
        os.kill(child, signal.SIGKILL)


@pytest.mark.xfail(strict=True, reason="FileHold keeps its lock in a forked child")
def test_a_child_that_outlives_its_parent_does_not_own(tmp_path: Path) -> None:
    middle = """
if (child := os.fork()) == 0:
    sys.stdin.read()
    os._exit(0)
"""
    with forking(tmp_path / "pool", middle) as (child, _):
        try:
            with Pool.open(tmp_path / "pool").owners() as owners:
                assert owners.names() == ["before"]
        finally:
            os.kill(child, signal.SIGKILL)


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
