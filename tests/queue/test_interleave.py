"""A coordinator that lost its locks without noticing, and the one that took over: every order of their steps.

On a shared mount that was cut off for a moment the old coordinator may go on writing. Here the database is
opened without any locks, each of the two runs in a thread, and a schedule lets one of them at a time go on to
its next step. All schedules are tried.
"""

from __future__ import annotations

import contextlib
import itertools
import sqlite3
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from spillover.errors import SpillError, Superseded
from spillover.pool import Pool, database, owners
from spillover.queue import Client, Coordinator, Lease, Task, Yielded
from spillover.state import ownership

OLD = ("begin", "commit", "committed", "checked")
NEW = ("owned", "copied", "opened")
SECONDS = 20.0
Step = Callable[[Client, Lease, str], Any]


class Schedule:
    """Lets one actor at a time go on, from one named step to the next.

    Args:
        order: whose turn it is, one name a step; afterwards everybody runs freely.
    """

    def __init__(self, order: Sequence[str]) -> None:
        self._order = [*order]
        self._free = threading.Condition()
        self._actors: dict[threading.Thread, str] = {}
        self._ended: set[str] = set()
        self.trace: list[str] = []

    def run(self, **actors: Callable[[], Any]) -> dict[str, Any]:
        """What each actor returned or raised."""
        results: dict[str, Any] = {}

        def act(name: str, do: Callable[[], Any]) -> None:
            try:
                self.step("start")
                results[name] = do()
            except SpillError as error:
                results[name] = error
            finally:
                with self._free:
                    self._ended.add(name)
                    self._free.notify_all()

        threads = [threading.Thread(target=act, args=actor) for actor in actors.items()]
        self._actors = dict(zip(threads, actors, strict=True))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SECONDS)
            assert not thread.is_alive(), f"stuck: {self.trace}"
        return results

    def step(self, point: str) -> None:
        """The calling actor has come to ``point``; return when it is its turn."""
        name = self._actors.get(threading.current_thread())
        if name is None:
            return
        with self._free:
            self.trace.append(f"{name} {point}")
            assert self._free.wait_for(lambda: self._turn(name), SECONDS), f"no turn for {name}: {self.trace}"
            if self._order:
                self._order.pop(0)
            self._free.notify_all()

    def _turn(self, name: str) -> bool:
        while self._order and self._order[0] in self._ended:
            self._order.pop(0)
        return not self._order or self._order[0] == name


class Watched:
    """A cursor that stops before its COMMIT and after it."""

    def __init__(self, cursor: sqlite3.Cursor, step: Callable[[str], None]) -> None:
        self._cursor, self._step = cursor, step

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cursor, name)

    def execute(self, sql: str, *values: Any) -> Any:
        if sql != "COMMIT":
            return self._cursor.execute(sql, *values)
        self._step("commit")
        self._cursor.execute(sql)
        self._step("committed")
        return self._cursor


def watch(coordinator: Coordinator, schedule: Schedule) -> None:
    """Let a coordinator stop at the steps in `OLD`."""
    catalogue, check = coordinator.owners.catalogue, coordinator.check
    changing = catalogue.changing

    @contextlib.contextmanager
    def watched() -> Iterator[Any]:
        schedule.step("begin")
        with changing() as cursor:
            yield Watched(cursor, schedule.step)

    def checked() -> None:
        check()
        schedule.step("checked")

    catalogue.changing = watched
    coordinator.check = checked


@pytest.fixture
def unlocked(monkeypatch: pytest.MonkeyPatch) -> Callable[[Schedule], None]:
    """A mount that forgets its locks, and whose databases have a name for each generation."""
    connect, copy, acquire = sqlite3.connect, database._own_copy, ownership.State.acquire

    def connect_without_locks(path: Path, **options: Any) -> sqlite3.Connection:
        return connect(f"file:{path}?vfs=unix-none", uri=True, **options)

    monkeypatch.setattr(database, "is_local", lambda path: False)
    monkeypatch.setattr(database.sqlite3, "connect", connect_without_locks)

    def schedule_by(schedule: Schedule) -> None:
        def copied(path: Path, generation: int) -> Path:
            found = copy(path, generation)
            schedule.step("copied")
            return found

        def acquired(*args: Any, **options: Any) -> Any:
            found = acquire(*args, **options)
            schedule.step("owned")
            return found

        monkeypatch.setattr(database, "_own_copy", copied)
        monkeypatch.setattr(owners.State, "acquire", acquired)

    return schedule_by


@pytest.fixture
def in_memory(tmp_path: Path) -> Iterator[Path]:
    """A folder without a disk, if there is one: hundreds of pools are made here."""
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shm if shm.is_dir() else tmp_path) as folder:
        yield Path(folder)


def complete(client: Client, lease: Lease, by: str) -> Any:
    return client.complete(lease, metadata=by)


def give_back(client: Client, lease: Lease, by: str) -> Any:
    return client.yield_tasks([Yielded(lease.number, lease.attempt, metadata=by)])


def fail(client: Client, lease: Lease, by: str) -> Any:
    return client.fail(lease, by)


def submit(client: Client, lease: Lease, by: str) -> Any:
    return client.submit([Task("same", metadata=by)], producer="p", cursor=by)


def acquire(client: Client, lease: Lease, by: str) -> Any:
    return client.acquire(by).leases


def acknowledge(client: Client, lease: Lease, by: str) -> Any:
    return client.save("reader", by, positions=[0])


def look(client: Client, lease: Lease, by: str) -> Any:
    return client.stats()


PAIRS = [
    (complete, complete),
    (complete, give_back),
    (give_back, complete),
    (fail, complete),
    (submit, submit),
    (acquire, acquire),
    (acknowledge, acknowledge),
    (look, complete),
]


@pytest.mark.parametrize(("first", "second"), PAIRS, ids=lambda step: step.__name__)
def test_every_order(
    unlocked: Callable[[Schedule], None], in_memory: Path, first: Step, second: Step
) -> None:
    outcomes = {
        _one_order(unlocked, in_memory / str(number), order, first, second)
        for number, order in enumerate(_orders(len(OLD) + 1, len(NEW) + 1))
    }
    assert {old for old, _ in outcomes} == {True, False}, "the old one was always too late, or never"


def _one_order(
    unlocked: Callable[[Schedule], None], folder: Path, order: Sequence[str], first: Step, second: Step
) -> tuple[bool, bool]:
    schedule = Schedule(order)
    with Pool.open(folder, create=True) as pool, contextlib.ExitStack() as stack:
        old = stack.enter_context(Coordinator(pool))
        client = Client(old, "work")
        client.create()
        client.submit([Task("first"), Task("held"), Task("free")])
        client.open_consumer("reader")
        client.complete(client.acquire("before", tasks=["first"]).leases[0])
        (lease,) = client.acquire("worker", tasks=["held"]).leases
        unlocked(schedule)
        watch(old, schedule)

        def take_over() -> Any:
            new = stack.enter_context(Coordinator(pool, takeover=True))
            schedule.step("opened")
            return second(Client(new, "work"), lease, "new")

        answers = schedule.run(old=lambda: first(client, lease, "old"), new=take_over)
        new = stack.enter_context(Coordinator(pool, takeover=True))
        try:
            _consistent(Client(new, "work"), answers, first, second)
        except AssertionError as error:
            raise AssertionError(f"{error} in {schedule.trace}") from error
        with pytest.raises(Superseded):
            client.submit([Task("late")])
        with pytest.raises(Superseded):
            client.stats()
    return tuple(not isinstance(answers[name], SpillError) for name in ("old", "new"))


def _consistent(now: Client, answers: dict[str, Any], first: Step, second: Step) -> None:
    """Whatever was acknowledged is there, and what excludes each other was acknowledged once."""
    for name, step in (("old", first), ("new", second)):
        answer = answers[name]
        if isinstance(answer, SpillError):
            continue
        if step is complete:
            assert now.log(answer.position) == [answer]
            assert answer.metadata == name
        elif step is give_back:
            assert now.task("held").metadata == name
        elif step is fail:
            assert now.task("held").failure == name
        elif step is submit and answer.added:
            assert now.task("same").metadata == name
        elif step is acquire:
            for lease in answer:
                task = now.task(lease.task)
                assert (task.worker, task.attempt) == (lease.worker, lease.attempt)
        elif step is acknowledge:
            assert now.consumer("reader").low == 1
    accepted = [not isinstance(answers[name], SpillError) for name in ("old", "new")]
    if all(accepted) and {first, second} <= {complete, give_back, submit}:
        raise AssertionError(f"both were acknowledged: {answers}")
    if first is second is acknowledge:
        state = now.consumer("reader").state
        assert state == "new" if accepted[1] else (not accepted[0] or state == "old")
    log = now.log()
    assert [receipt.position for receipt in log] == [*range(len(log))]
    stats = now.stats()
    assert stats.positions == len(log)
    assert stats.pending + stats.leased + stats.completed + stats.dead == len(now.tasks())


def _orders(old: int, new: int) -> Iterator[list[str]]:
    """All ways to mix the steps of the two, each in its own order."""
    for places in itertools.combinations(range(old + new), old):
        yield ["old" if place in places else "new" for place in range(old + new)]


@pytest.mark.parametrize("delay", [0.0, 0.005, 0.01, 0.02, 0.03, 0.04])
def test_a_takeover_copies_no_half_commit(
    unlocked: Callable[[Schedule], None], in_memory: Path, delay: float
) -> None:
    """The old owner, its lock lost, is in the middle of its last commit: all of it is copied, or nothing."""
    path, schema = in_memory / "catalogue.sqlite", "CREATE TABLE rows(id INTEGER PRIMARY KEY, value, padding)"
    with contextlib.closing(database.open_database(path, 1, schema, 1)) as old:
        old.execute("BEGIN")
        old.executemany("INSERT INTO rows VALUES(?, 0, zeroblob(3000))", [(n,) for n in range(8000)])
        old.execute("COMMIT")
        begun = threading.Event()

        def commit() -> None:
            old.execute("BEGIN")
            begun.set()
            old.execute("UPDATE rows SET value = 1")
            old.execute("COMMIT")

        thread = threading.Thread(target=commit)
        thread.start()
        begun.wait()
        time.sleep(delay)
        with contextlib.closing(database.open_database(path, 2, schema, 1)) as new:
            assert new.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
            assert new.execute("SELECT COUNT(DISTINCT value) FROM rows").fetchone() == (1,)
        thread.join()
