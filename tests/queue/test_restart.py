"""A coordinator that ends, however it ends, and the next one: nothing is lost, nobody pays for it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from queued import SECONDS, Place
from serving import Options, Server, free_port
from spillover.errors import Conflict, LockContended, Stale
from spillover.pool import Pool, Record
from spillover.queue import FRESH, Client, Coordinator, Task, Yielded

TESTS = Path(__file__).resolve().parents[1]


def test_leases_are_adopted_with_their_full_time(place: Place) -> None:
    place.client.submit([Task("one"), Task("two")])
    one, two = place.client.acquire("worker", 2).leases
    place.clock.pass_(SECONDS * 0.9)
    place.restart()
    place.clock.pass_(SECONDS)
    assert place.client.acquire("other").status == "empty"
    assert place.client.renew([one]) == [True]
    place.clock.pass_(1)
    (again,) = place.client.acquire("other", 2).leases
    assert (again.task, again.attempt, again.failures) == ("two", 2, 1)
    with pytest.raises(Stale):
        place.client.complete(two)
    assert place.client.complete(one).attempt == 1


def test_a_hundred_restarts_spend_no_attempt(place: Place) -> None:
    place.client.submit([Task("one", max_attempts=1), Task("two", max_attempts=1)])
    lease = place.lease()
    for _ in range(100):
        place.restart()
        place.clock.pass_(SECONDS * 0.9)
    assert place.client.complete(lease).attempt == 1
    assert place.lease().failures == 0


def test_answers_survive(place: Place) -> None:
    client = place.client
    client.submit([Task(f"task {n}") for n in range(4)])
    leases = client.acquire("worker", 2, key="a").leases
    receipt = client.complete(leases[0], metadata=1)
    client.fail(leases[1], "broken", retryable=False, key="b")
    place.restart()
    client = place.client
    assert client.acquire("worker", 2, key="a").leases == leases
    assert client.complete(leases[0], metadata=1) == receipt
    assert client.fail(leases[1], "broken", retryable=False, key="b") is True
    with pytest.raises(Conflict):
        client.acquire("other", 2, key="a")
    for n in range(3):  # new requests find room beside the old ones
        assert client.cancel([f"task {n + 1}"], key=f"c{n}") == 1
        place.restart()
        client = place.client


def test_positions_and_counts_go_on(place: Place) -> None:
    place.client.submit([Task(f"task {n}", max_attempts=1) for n in range(12)])
    for n in range(6):
        assert place.client.complete(place.lease()).position == n
        if n % 2:
            place.client.fail(place.lease(), "broken")
            place.client.cancel([f"task {11 - n}"])
        before = place.client.stats()
        place.restart()
        after = place.client.stats()
        assert after.generation == before.generation + 1
        place.account()
        assert (after.pending, after.leased, after.completed, after.dead, after.cancelled) == (
            before.pending,
            before.leased,
            before.completed,
            before.dead,
            before.cancelled,
        )
    assert [receipt.position for receipt in place.client.log()] == [*range(6)]


def test_an_old_lease_never_names_a_new_task(place: Place) -> None:
    """Numbers are not used again, even when all that had them is forgotten."""
    place.client.open_consumer("trainer")
    place.client.submit([Task("old")])
    old = place.lease()
    place.client.complete(old)
    place.client.ack("trainer", [0])
    assert place.client.trim(1) == 1
    place.restart()
    place.client.submit([Task("new")])
    assert place.lease().task == "new"
    with pytest.raises(Stale, match="has no task number"):
        place.client.complete(old)
    assert place.client.renew([old]) == [False]


def test_a_turn_is_not_used_again(place: Place) -> None:
    """A task that was continued stays behind those that came before, and before those that come later."""
    place.client.submit([Task("one"), Task("two")])
    one = place.lease()
    place.client.yield_tasks([Yielded(one.number, one.attempt, stage=FRESH)])
    place.restart()
    place.client.submit([Task("three")])
    assert [lease.task for lease in place.client.acquire("worker", 3).leases] == ["two", "one", "three"]


def test_draining_ends_with_the_coordinator(place: Place) -> None:
    place.client.submit([Task("one")])
    place.coordinator.drain("work")
    place.restart()
    assert place.lease().task == "one"


def test_one_coordinator_at_a_time(place: Place) -> None:
    with Pool.open(place.folder) as pool, pytest.raises(LockContended):
        Coordinator(pool)
    assert place.client.stats().generation == 1


def test_a_coordinator_that_cannot_begin_holds_nothing(tmp_path: Path) -> None:
    with Pool.open(tmp_path / "pool", create=True) as pool:
        with Coordinator(pool) as coordinator, coordinator.owners.catalogue.changing() as cursor:
            cursor.execute("ALTER TABLE queues RENAME COLUMN positions TO damaged")
        for _ in range(2):
            with pytest.raises(Exception, match="made by another version of spillover: queues differ"):
                Coordinator(pool)


def test_killed_at_once(tmp_path: Path) -> None:
    """SIGKILL, with a lease out and a keyed answer given; the next coordinator knows all of it."""
    options = Options(pool=str(tmp_path / "pool"), port=free_port())
    with Server(options) as server:
        server.wait("ready")
        with Client(server.address, "work") as client:
            client.create()
            client.submit([Task(f"task {n}", metadata=n) for n in range(10)], producer="p", cursor=10)
            first = client.acquire("worker", 3, key="a").leases
            receipt = client.complete(first[0], metadata="done")
        server.kill()
    with Place(tmp_path / "pool") as place:
        client = place.client
        place.account()
        assert client.cursor("p") == 10
        assert client.acquire("worker", 3, key="a").leases == first
        assert client.complete(first[0], metadata="done") == receipt
        assert client.complete(first[1]).position == 1
        assert (client.stats().pending, client.stats().leased, client.stats().generation) == (7, 1, 2)


def test_killed_in_the_middle_of_calls(tmp_path: Path) -> None:
    """Again and again: what was answered is there, what was not is there whole or not at all."""
    pool = tmp_path / "pool"
    answered: list[str] = []
    for round_ in range(5):
        log = tmp_path / f"log {round_}"
        command = [sys.executable, __file__, str(pool), str(log), str(round_)]
        with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(TESTS)}) as child:
            deadline = time.monotonic() + 60
            while not log.exists() or log.read_bytes().count(b"\n") < 20 + 7 * round_:
                assert time.monotonic() < deadline
                assert child.poll() is None
                time.sleep(0.002)
            child.kill()
        answered += log.read_text().split("\n")[:-1]
        with Place(pool) as place:
            place.account()
            done = {receipt.task: receipt for receipt in place.client.log(0, 100_000)}
            assert [r.position for r in done.values()] == [*range(len(done))]
            assert {*answered} <= {*done}
            for task in answered:
                result = done[task].result
                assert result is not None
                assert place.read(result) == task
            place.client.release([])
            stats = place.client.stats()
            assert stats.leased <= round_ + 1  # one was in the works at each death
    assert len(answered) == len({*answered}) > 100


def work(folder: str, log: str, round_: str) -> None:
    """Submit, lease, complete, write down what was answered; until killed."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    pool = Pool.open(folder, create=True)
    client = Client(Coordinator(pool), "work")
    client.create()
    for n in range(sys.maxsize):
        name = f"{round_}.{n}"
        client.submit([Task(name, input=pool.publish([Record("text", b"input")]))])
        (lease,) = client.acquire("worker", tasks=[name]).leases
        client.complete(lease, pool.publish([Record("text", name.encode())]))
        os.write(file, f"{name}\n".encode())


if __name__ == "__main__":
    work(*sys.argv[1:])
