"""Calls that share a commit: each has its own outcome, and a commit that fails leaves nothing behind."""

from __future__ import annotations

import contextlib
import errno
import itertools
import signal
import sqlite3
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from queued import SECONDS, Place
from spillover.errors import Collected, Conflict, InputError, NotAllowed, Stale, StoreFull
from spillover.queue import Completion, Lease, Task, Yielded
from spillover.queue import messages as m

Outcome = Any


def together(place: Place, calls: list[Callable[[], object]]) -> list[Outcome]:
    """Make calls that end up in one transaction; returns answers and errors."""
    outcomes: list[Outcome] = [None] * len(calls)

    def make(n: int) -> None:
        try:
            outcomes[n] = calls[n]()
        except Exception as error:
            outcomes[n] = error

    group, begun = place.coordinator._group, place.coordinator.counters.commits
    threads = [threading.Thread(target=make, args=(n,)) for n in range(len(calls))]
    first = threading.Thread(target=place.client.create)
    with place.coordinator.owners.catalogue.reading():  # whoever commits has to wait
        first.start()
        until(lambda: group._leader is not None and not group._waiting)
        for n, thread in enumerate(threads):
            thread.start()
            until(lambda n=n: len(group._waiting) == n + 1)
    for thread in [first, *threads]:
        thread.join(60)
        assert not thread.is_alive()
    assert place.coordinator.counters.commits <= begun + 2
    return outcomes


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_one_call_that_fails_leaves_the_others_alone(place: Place) -> None:
    client, call = place.client, place.coordinator.call
    waste = place.publish("waste")
    place.pool.seal()
    place.pool.settle([waste])
    place.coordinator.owners.collect()
    client.submit([Task(f"task {n}") for n in range(4)], producer="p", cursor=0)
    one, two, three, four = client.acquire("worker", 4).leases
    client.release([four])
    calls: list[tuple[Callable[[], object], type[Exception] | None]] = [
        (lambda: client.complete(one, metadata="one"), None),
        (lambda: client.complete(four), Stale),
        (lambda: client.complete_many([Completion(two.number, 1), Completion(999, 1)]), Stale),
        (lambda: client.submit([Task("new"), Task("task 0", rank=5)], producer="p", cursor=1), Conflict),
        (lambda: client.submit([Task("new", input=waste)], producer="p", cursor=2), Collected),
        (lambda: client.submit([Task("more")], producer="p", cursor=3), None),
        (lambda: client.complete(two, metadata=object()), InputError),
        (lambda: client.yield_tasks([Yielded(two.number, 1, rank=1 << 70)]), InputError),
        (lambda: client.complete(two, "no reference"), AttributeError),  # type: ignore[arg-type]
        (lambda: call(m.Release(queue="work", leases=[(three.number, 1)] * 3)), None),
        (lambda: client.on("nowhere").seal(), InputError),
        (lambda: client.fork("nothing", "fork"), InputError),
        (lambda: client.plan_batch("batch", "nobody", []), InputError),
        (lambda: client.snapshot("then"), None),
        (lambda: client.snapshot("then"), NotAllowed),
        (lambda: client.renew([two, two]), None),
        (lambda: client.complete(two, metadata="two"), None),
    ]
    outcomes = together(place, [call for call, _ in calls])
    for outcome, (_, error) in zip(outcomes, calls, strict=True):
        assert (type(outcome) is error) if error else not isinstance(outcome, Exception), outcome
    place.account()
    accepted = [(receipt.position, receipt.task, receipt.metadata) for receipt in client.log()]
    assert accepted == [(0, "task 0", "one"), (1, "task 1", "two")]
    assert client.cursor("p") == 3
    assert client.task("new") is None
    assert client.stats().pending == 3
    place.restart()
    place.account()


def test_a_queue_that_one_call_fails_to_make_is_made_by_the_next(place: Place) -> None:
    client = place.client
    client.submit([Task("one", input=place.publish("input"))])
    client.snapshot("then")
    outcomes = together(
        place,
        [
            lambda: client.fork("nothing", "fork"),
            lambda: client.fork("then", "fork"),
            lambda: client.on("fork").submit([Task("two")]),
            lambda: client.fork("then", "fork"),
            lambda: client.on("fork").acquire("worker", 5),
            lambda: client.drop_checkpoint("then"),
            lambda: client.snapshot("then"),
        ],
    )
    kinds = [type(outcome) for outcome in outcomes if isinstance(outcome, Exception)]
    assert kinds == [InputError, NotAllowed]
    assert len(outcomes[4].leases) == 2
    place.account()


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"these tests must be allowed to mount: {done.stderr.strip()}"
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@contextlib.contextmanager
def filled(folder: Path, leaving: int) -> Iterator[None]:
    """A disk with only ``leaving`` bytes free."""
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


def _held(place: Place) -> dict[str, Lease]:
    """Tasks to do things with, most of them leased."""
    client = place.client
    names = ["done", "yielded", "failed", "released", "cancelled", "expiring"]
    client.submit([Task(name, input=place.publish(name), max_attempts=1) for name in names])
    client.submit([Task(f"waiting {n}", metadata="x" * 500) for n in range(300)])
    leases = {lease.task: lease for lease in client.acquire("worker", len(names)).leases}
    client.open_consumer("trainer")
    client.complete(leases["done"], place.publish("result"))
    client.snapshot("then")
    return leases


def _steps(place: Place, leases: dict[str, Lease]) -> list[Callable[[], object]]:
    """Calls that change every table, each possible once."""
    client = place.client
    yielded = leases["yielded"]
    tasks = [Task(f"new {n}", metadata="x" * 500) for n in range(300)]
    return [
        lambda: client.submit(tasks, producer="p", cursor=1),
        lambda: client.acquire("other", 200),
        lambda: client.yield_tasks([Yielded(yielded.number, yielded.attempt, metadata="x" * 9000)]),
        lambda: client.fail(leases["failed"], "x" * 9000),
        lambda: client.release([leases["released"]]),
        lambda: client.cancel(["cancelled"]),
        lambda: client.save("trainer", "x" * 9000, positions=[0]),
        lambda: client.plan_batch("batch", "trainer", [0]),
        lambda: client.fork("then", "fork"),
        lambda: client.snapshot("now"),
        lambda: client.retire("worker"),
        lambda: client.restore("then"),
        lambda: client.seal(),
    ]


@pytest.mark.parametrize("leaving", [0, 4 << 10, 16 << 10, 40 << 10])
def test_a_full_disk_changes_nothing_and_with_room_all_goes_on(tmp_path: Path, leaving: int) -> None:
    with small_disk(tmp_path / "disk") as disk, Place(disk / "pool") as place:
        leases = _held(place)
        steps = _steps(place, leases)
        left = list(steps)
        with filled(disk, leaving):
            while left:
                before = place.client.stats()
                try:
                    left[0]()
                except StoreFull:
                    assert place.client.stats() == before
                    place.account()
                    break
                place.account()
                left.pop(0)
            else:
                raise AssertionError("the disk was never full")
            for step in left:  # every kind of call fails as a whole
                with contextlib.suppress(StoreFull):
                    step()
                    continue
                place.account()
            place.clock.pass_(0)
        for step in steps:
            with contextlib.suppress(Stale, NotAllowed):  # those that happened before
                step()
            place.account()
        place.restart()
        place.account()
        assert place.client.stats().sealed


def test_leases_run_out_although_the_disk_was_full_when_they_did(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk, Place(disk / "pool") as place:
        client = place.client
        client.submit([Task(f"task {n}", max_attempts=1, metadata="x" * 200) for n in range(500)])
        leases = client.acquire("worker", 500).leases
        place.clock.pass_(SECONDS / 2)
        client.renew(leases[:5])
        place.clock.pass_(SECONDS / 2 + 1)
        with filled(disk, 0):
            for _ in range(3):
                with pytest.raises(StoreFull):
                    client.release([])
                place.account()
            assert client.stats().leased == 500
        client.release([])
        assert (client.stats().leased, client.stats().dead) == (5, 495)
        place.clock.pass_(SECONDS)
        client.release([])
        assert client.stats().dead == 500


def test_leases_run_out_although_ending_one_of_them_failed(place: Place) -> None:
    client = place.client
    client.submit([Task(f"task {n}", max_attempts=1) for n in range(6)])
    client.acquire("worker", 6)
    place.clock.pass_(SECONDS + 1)
    with place.coordinator.owners.catalogue.changing() as cursor:
        cursor.execute(
            "CREATE TRIGGER refuse BEFORE UPDATE ON tasks WHEN old.key = 'task 3' "
            "BEGIN SELECT RAISE(ABORT, 'refused'); END"
        )
    for _ in range(2):
        with pytest.raises(sqlite3.IntegrityError, match="refused"):
            client.release([])
        place.account()
    with place.coordinator.owners.catalogue.changing() as cursor:
        cursor.execute("DROP TRIGGER refuse")
    client.release([])
    assert client.stats().dead == 6


def test_everybody_in_a_group_hears_that_the_disk_is_full(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk, Place(disk / "pool") as place:
        client = place.client
        client.submit([Task("one")])
        lease = place.lease()
        calls: list[Callable[[], object]] = [
            lambda: client.submit([Task(f"big {n}", metadata="x" * 1000) for n in range(200)]),
            lambda: client.complete(lease),
            lambda: client.acquire("worker", 5),
        ]
        with filled(disk, 4 << 10):
            outcomes = together(place, calls)
            assert [type(outcome) for outcome in outcomes] == [StoreFull] * 3
            assert len({id(outcome) for outcome in outcomes}) >= 1
            place.account()
        outcomes = together(place, calls)
        assert not [outcome for outcome in outcomes if isinstance(outcome, Exception)]
        assert (outcomes[1].position, len(outcomes[2].leases)) == (0, 5)
        place.account()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # a file left to the collector
def test_an_interrupted_caller_leaves_memory_and_tables_alike(place: Place) -> None:
    """Ctrl-C at any moment, also between a commit and what follows it."""
    client, numbers = place.client, itertools.count()
    interruptions, deadline = 0, time.monotonic() + 60
    with interrupting() as interrupted:
        while interruptions < 200:
            assert time.monotonic() < deadline
            with contextlib.suppress(KeyboardInterrupt), interrupted(next(numbers) % 89 * 2e-5):
                for _ in range(20):
                    client.submit([Task(f"task {next(numbers)}")])
                    (lease, *_) = client.acquire("worker", 1).leases
                    client.complete(lease) if lease.number % 2 else client.release([lease])
                continue
            interruptions += 1
            client.release([])
            place.account()
    log = client.log(0, 100_000)
    assert [receipt.position for receipt in log] == [*range(len(log))]


@contextlib.contextmanager
def interrupting() -> Iterator[Callable[[float], contextlib.AbstractContextManager[None]]]:
    """Blocks that are interrupted after some seconds, as by Ctrl-C, unless they are over by then."""
    armed = False

    def interrupt(number: int, frame: object) -> None:
        if armed:
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def interrupted(seconds: float) -> Iterator[None]:
        nonlocal armed
        armed = True
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            yield
        finally:
            armed = False
            signal.setitimer(signal.ITIMER_REAL, 0)

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGALRM, before)
