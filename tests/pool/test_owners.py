"""Who owns what: retained things stay, released ones go, and one process at a time decides."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spillover.errors import (
    Collected,
    Corrupt,
    InputError,
    LockContended,
    Mismatch,
    Superseded,
)
from spillover.pool import Link, Owners, Pool, Publication, Record, Ref
from spillover.pool.layout import HEADER, PackHeader
from spillover.pool.reference import pack_id


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    with Pool.open(tmp_path / "pool", create=True) as found:
        yield found


@pytest.fixture
def owners(pool: Pool) -> Iterator[Owners]:
    with pool.owners() as found:
        yield found


def alone(pool: Pool, value: Any, **options: Any) -> Ref:
    """A publication in a sealed pack of its own."""
    ref = pool.publish([Record("r", value)], **options)
    pool.seal()
    return ref


def there(pool: Pool, *refs: Ref) -> list[bool]:
    found = []
    for ref in refs:
        try:
            pool.record(ref.at(0))
            found.append(True)
        except Collected:
            found.append(False)
    return found


def test_what_is_retained_stays_and_what_is_released_goes(pool: Pool, owners: Owners) -> None:
    refs = [alone(pool, number) for number in range(4)]
    owners.retain("a", refs[:2])
    owners.retain("b", [refs[1], refs[2]])
    pool.close()
    assert owners.collect().deleted == 1
    assert there(pool, *refs) == [True, True, True, False]
    owners.release("a")
    assert owners.collect().deleted == 1
    assert there(pool, *refs) == [False, True, True, False]
    owners.release("a", "never was")
    owners.release("b")
    assert owners.collect().deleted == 2
    assert owners.names() == []
    assert owners.collect().packs == 0


def test_retaining_adds_and_owned_is_what_was_given(pool: Pool, owners: Owners) -> None:
    refs = [alone(pool, number) for number in range(3)]
    owners.retain("a", [refs[0].at(0)])
    owners.retain("a", iter([refs[1], refs[1]]))
    owners.retain("a", [])
    owners.retain("nothing", [])
    assert {*owners.owned("a")} == {refs[0].at(0), refs[1]}
    assert owners.names() == ["a"]
    assert owners.owned("nobody") == []


def test_everything_a_publication_depends_on_is_owned_with_it(pool: Pool, owners: Owners) -> None:
    base = alone(pool, "base")
    middle = alone(pool, "middle", dependencies=[base])
    left, right = (alone(pool, name, dependencies=[middle]) for name in ("left", "right"))
    link = pool.publish([Link("r", base.at(0))])
    pool.close()
    owners.retain("left", [left])
    owners.retain("right", [right])
    owners.retain("link", [link])
    assert owners.collect().deleted == 0
    owners.release("left")
    assert owners.collect().deleted == 1
    assert there(pool, base, middle, left, right) == [True, True, False, True]
    owners.release("right")
    assert owners.collect().deleted == 2
    assert there(pool, base, middle, right, link) == [True, False, False, True]
    owners.release("link")
    assert owners.collect().deleted == 2


def test_one_owned_publication_keeps_its_pack(pool: Pool, owners: Owners) -> None:
    refs = [pool.publish([Record("r", number)]) for number in range(10)]
    owners.retain("a", [refs[3]])
    pool.close()
    assert owners.collect().deleted == 0
    assert all(there(pool, *refs))
    owners.release("a")
    assert owners.collect().deleted == 1


@pytest.mark.parametrize("kind", ["other pool", "gone", "cut", "dependency gone"])
def test_what_cannot_be_owned_is_refused_and_nothing_changes(
    pool: Pool, owners: Owners, tmp_path: Path, kind: str
) -> None:
    good, bad, expected = alone(pool, 1), alone(pool, 2), Collected
    if kind == "other pool":
        with Pool.open(tmp_path / "other", create=True) as other:
            bad, expected = other.publish([Record("r", 1)]), Mismatch  # type: ignore[assignment]
    elif kind == "cut":
        os.truncate(pool.folder.path_of(bad.pack), bad.offset + bad.length - 64)
        expected = Corrupt  # type: ignore[assignment]
    elif kind == "gone":
        os.unlink(pool.folder.path_of(bad.pack))
    else:
        gone, bad = bad, alone(pool, 3, dependencies=[bad])
        os.unlink(pool.folder.path_of(gone.pack))
    with pytest.raises(expected) as refused:
        owners.retain_many({"a": [good], "b": [good, bad]})
    assert "\n" not in str(refused.value)
    assert owners.names() == []
    pool.close()
    owners.collect()
    assert there(pool, good) == [False]


def test_nothing_that_is_being_deleted_can_be_owned(pool: Pool, owners: Owners) -> None:
    refs = [alone(pool, number) for number in range(3)]
    pool.close()
    assert owners.collect().deleted == 3
    for ref in refs:
        with pytest.raises(Collected):
            owners.retain("a", [ref])


NAMES = [
    "",
    " ",
    "a\0b",
    "\0",
    "é😀",
    "x" * 5000,
    "'; DROP TABLE names; --",
    "a\nb",
    "%",
    "A",
    "a",
    "checkpoint:1",
]


def test_names_with_odd_characters(pool: Pool, owners: Owners, tmp_path: Path) -> None:
    refs = {name: alone(pool, name) for name in NAMES}
    for name, ref in refs.items():
        owners.retain(name, [ref])
    assert owners.names() == sorted(NAMES, key=str.encode)
    assert all(owners.owned(name) == [ref] for name, ref in refs.items())
    owners.release("%", "A")
    assert {*owners.names()} == {*NAMES} - {"%", "A"}
    owners.export([*owners.names()], tmp_path / "file")
    with Pool.open(tmp_path / "other", create=True) as other, other.owners() as there:
        assert [*there.import_(tmp_path / "file").owners] == sorted({*NAMES} - {"%", "A"})
        assert all(there.owned(name) == [refs[name]] for name in there.names())


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.text() | st.text(st.characters(categories=["Cs"]), min_size=1))
def test_any_name(pool: Pool, owners: Owners, name: str) -> None:
    ref = pool.publish([Record("r", 1)])
    try:
        owners.retain(name, [ref])
    except InputError:
        assert "\\ud" in ascii(name)
        return
    assert owners.owned(name) == [ref]
    owners.release(name)
    assert owners.owned(name) == []


def test_live_writers_hold_what_nobody_owns_yet(pool: Pool, owners: Owners) -> None:
    refs = [alone(pool, number) for number in range(3)]
    open_one = pool.publish([Record("r", "open")])
    found = owners.collect()
    assert (found.deleted, found.held) == (0, 3)
    owners.retain("a", [refs[0]])
    owners.release("a")  # owned once, and let go
    pool.settle([refs[1]])  # nobody will
    found = owners.collect()
    assert (found.deleted, found.held) == (2, 1)
    assert there(pool, *refs, open_one) == [False, False, True, True]
    pool.close()
    assert owners.collect().deleted == 2


CHILD = """
import os, sys
from spillover.pool import Pool, Publication, Record
pool = Pool.open(sys.argv[1])
refs = [pool.publish([Record("r", n)]) for n in range(3)]
if "sealed" in sys.argv:
    pool.seal()
print(pool.writer.id, *refs, flush=True)
if "wait" in sys.argv:
    sys.stdin.read()
os.kill(os.getpid(), 9)
"""


def child(pool: Pool, *words: str) -> tuple[subprocess.Popen[str], int, list[Ref]]:
    """A process that published three things; killed by itself, once its input ends or at once."""
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(pool.path), *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    writer, *refs = process.stdout.readline().split()
    return process, int(writer), [Ref.parse(ref) for ref in refs]


def end(process: subprocess.Popen[str]) -> None:
    process.communicate(timeout=30)
    assert process.returncode == -signal.SIGKILL


@pytest.mark.parametrize("words", [[], ["sealed"]])
def test_writers_that_died_are_retired_and_their_rest_collected(
    pool: Pool, owners: Owners, words: list[str]
) -> None:
    process, writer, refs = child(pool, "wait", *words)
    assert writer in {found.id for found in owners.writers()}
    (info,) = [found for found in owners.writers() if found.id == writer]
    assert info.pid == process.pid
    with pytest.raises(LockContended, match=str(process.pid)):
        owners.retire(writer)
    found = owners.collect()
    assert (found.deleted, found.retired) == (0, 0)
    owners.retain("kept", [refs[1]])
    end(process)
    found = owners.collect()
    assert (found.deleted, found.retired) == (0, 1)
    assert all(there(pool, *refs))
    owners.release("kept")
    assert owners.collect().deleted == 1
    assert there(pool, *refs) == [False] * 3
    assert writer not in {found.id for found in owners.writers()}


def test_retiring_a_dead_writer_can_adopt_what_it_left(pool: Pool, owners: Owners) -> None:
    process, writer, refs = child(pool)
    end(process)
    assert owners.retire(writer, adopt="recovered") == refs
    assert {*owners.owned("recovered")} == {*refs}
    assert owners.retire(writer, adopt="recovered") == refs  # again: a crash may have come between
    owners.collect()
    assert [pool.record(ref.at(0)).payload for ref in refs] == [0, 1, 2]
    owners.release("recovered")
    assert owners.collect().deleted == 1


def test_a_writer_that_was_retired_is_refused(pool: Pool, owners: Owners) -> None:
    """Its gate is gone, as when somebody took it for dead."""
    before = pool.publish([Record("r", 1)])
    os.unlink(pool.folder.gate_of(pool.writer.id))
    with pytest.raises(Superseded, match="retired"):
        pool.publish([Record("r", 2)])
    pool.close()
    assert pool.publish([Record("r", 3)]).pack != before.pack


OWNER = """
import sys
from spillover.errors import SpillError
from spillover.pool import Pool
pool = Pool.open(sys.argv[1])
try:
    with pool.owners(takeover="takeover" in sys.argv) as owners:
        print("owns", *owners.names(), flush=True)
        sys.stdin.read()
except SpillError as error:
    print(type(error).__name__, error, flush=True)
"""


def started(pool: Pool, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", OWNER, str(pool.path), *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def owner(pool: Pool, *words: str) -> tuple[subprocess.Popen[str], str]:
    process = started(pool, *words)
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def test_one_process_owns_the_pool(pool: Pool) -> None:
    first, said = owner(pool)
    assert said == "owns"
    with pytest.raises(LockContended, match=str(first.pid)):
        pool.owners()
    second, said = owner(pool)
    assert said.startswith("LockContended")
    second.communicate(timeout=30)
    first.kill()
    first.communicate(timeout=30)
    with pool.owners() as owners:  # at once: its lock went with it
        owners.retain("a", [pool.publish([Record("r", 1)])])
    third, said = owner(pool)
    assert said == "owns a"
    third.communicate(timeout=30)


def test_a_takeover_fences_the_former_owner(pool: Pool) -> None:
    ref = pool.publish([Record("r", 1)])
    former = pool.owners()
    former.retain("a", [ref])
    taking = started(pool, "takeover")
    assert taking.stdout is not None
    fenced(former)
    for act in (
        lambda: former.collect(),
        lambda: former.compact(),
        lambda: former.retain("b", [ref]),
        lambda: former.retire(1),
        lambda: former.import_(pool.path),
    ):
        with pytest.raises(Superseded):
            act()
    former.close()  # until then it has the database open, and a local one is not copied
    assert taking.stdout.readline().startswith("owns a")  # and b perhaps: a refused call may have happened
    taking.communicate(timeout=30)


def fenced(owners: Owners) -> None:
    """Return when somebody else owns the pool."""
    end = time.monotonic() + 30
    while time.monotonic() < end:
        try:
            owners.check()
        except Superseded:
            return
        time.sleep(0.01)
    raise AssertionError("nobody took over")


def test_many_threads_retain_and_release(pool: Pool, owners: Owners) -> None:
    wrong: list[BaseException] = []

    def work(thread: int) -> None:
        try:
            for number in range(25):
                first, second = pool.publish_many(
                    [Publication([Record("r", [thread, number])]), Publication([Record("r", 2)], [0])]
                )
                owners.retain(f"{thread}.{number}", [second])
                pool.settle([first])
                if number % 5:
                    owners.release(f"{thread}.{number}")
                if number % 10 == 0:
                    pool.seal()
                    owners.collect()
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not wrong
    pool.close()
    assert owners.compact(min_owned=1.1).damaged == []
    owners.collect()
    assert len(owners.names()) == 30
    for name in owners.names():
        (ref,) = owners.owned(name)
        assert pool.read(ref)["r"].payload == 2
        (dependency,) = pool.read(ref).dependencies
        assert pool.read(dependency)["r"].payload == [int(part) for part in name.split(".")]
    assert owners.stats().owned_extents == 60


def test_a_dry_run_changes_nothing(pool: Pool, owners: Owners) -> None:
    ref = alone(pool, 1)
    pool.close()
    assert owners.collect(dry_run=True).deleted == 1
    assert there(pool, ref) == [True]
    owners.retain("a", [ref])
    assert owners.collect(dry_run=True).deleted == 0


def test_a_pack_that_is_only_just_begun_is_no_damage(pool: Pool, owners: Owners) -> None:
    path = pool.folder.path_of(pack_id(pool.writer.id, 99))
    path.touch()
    assert owners.collect().damaged == []
    assert pool.verify().damaged == []
    assert path.exists()


def test_a_pack_begun_while_it_is_looked_at_is_no_damage(
    pool: Pool, owners: Owners, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its writer's first write comes between one look at its first bytes and the next."""
    number = pack_id(pool.writer.id, 99)
    path = pool.folder.path_of(number)
    header = PackHeader(pool.folder.id, number, pool.writer.id).encode()
    looks = 0

    def look(file: int, size: int, offset: int, read: Callable[..., bytes] = os.pread) -> bytes:
        nonlocal looks
        found = read(file, size, offset)
        if os.fstat(file).st_ino == path.stat().st_ino:
            looks += 1
            path.write_bytes(header + bytes(HEADER))
        return found

    monkeypatch.setattr(os, "pread", look)
    for act in (owners.collect, pool.verify):
        path.write_bytes(b"")
        assert act().damaged == []
    assert looks == 2


def test_a_pack_that_is_missing_is_reported(pool: Pool, owners: Owners) -> None:
    ref = alone(pool, 1)
    owners.retain("a", [ref])
    owners.collect()
    os.unlink(pool.folder.path_of(ref.pack))
    (line,) = owners.collect().damaged
    assert "missing" in line
    assert owners.owned("a") == [ref], "what is missing was forgotten"


def test_figures(pool: Pool, owners: Owners) -> None:
    refs = [pool.publish([Record("r", "x" * 1000)]) for _ in range(4)]
    owners.retain("a", refs[:2])
    owners.retain("b", refs[1:3])
    found = owners.stats()
    assert (found.packs, found.owners, found.owned_extents, found.writers) == (1, 2, 3, 1)
    assert found.owned_bytes == sum(ref.length for ref in refs[:3])
    assert found.bytes >= sum(ref.length for ref in refs)
    assert found.pool == pool.id


def test_a_failed_commit_leaves_the_catalogue_as_it_was(
    pool: Pool, owners: Owners, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a collection recorded and could not commit must not keep anybody from owning."""
    ref = alone(pool, 1)
    pool.close()

    with monkeypatch.context() as patch:
        patch.setattr(owners.catalogue.ledger, "load", load_and_fail(owners))
        with pytest.raises(OSError, match="failed"):
            owners.collect()
    assert there(pool, ref) == [True]
    owners.retain("a", [ref])
    owners.collect()
    assert there(pool, ref) == [True]


def load_and_fail(owners: Owners) -> Any:
    """`Ledger.load` that fails behind its first call, inside the transaction that records deletions."""
    load, calls = owners.catalogue.ledger.load, []

    def loaded(cursor: Any) -> None:
        load(cursor)
        calls.append(1)
        if len(calls) == 1:
            raise OSError(5, "failed")

    return loaded
