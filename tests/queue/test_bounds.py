"""Backpressure: a queue that is full refuses who submits, or hands out nothing, until there is room again."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from queued import SECONDS, Place
from serving import Server, serving
from spillover.errors import Full, InputError, Unknown
from spillover.pool import Pool
from spillover.queue import Client, Coordinator, Task, Yielded
from spillover.queue import messages as m
from spillover.queue.audit import audit

FULL = "queue 'work' is full: it has 3 unfinished tasks and may have 3, so 1 more do not fit"


@pytest.fixture
def bounded(place: Place) -> Client:
    """A queue of at most three unfinished tasks, with three in it, one of them leased."""
    place.client.limit(unfinished=3)
    place.client.submit([Task(f"task {n}") for n in range(3)])
    place.lease()
    return place.client


def test_a_full_queue_refuses_a_submission_whole(bounded: Client) -> None:
    bounded.submit([], producer="reader", cursor=1)
    with pytest.raises(Full) as caught:
        bounded.submit([Task("task 0"), Task("more")], producer="reader", cursor=2)
    assert str(caught.value) == FULL
    assert caught.value.hint == "try again when some are finished; Client.submit(..., wait=SECONDS) does"
    assert bounded.task("more") is None
    assert bounded.cursor("reader") == 1
    assert bounded.stats().pending == 2


def test_what_was_accepted_before_is_answered_although_the_queue_is_full(place: Place) -> None:
    """By its content without a key, and by its answer with one."""
    client = place.client
    client.limit(unfinished=2)
    assert client.submit([Task("one")], producer="reader", cursor=1, key="first").added == 1
    assert client.submit([Task("two")]).added == 1
    with pytest.raises(Full):
        client.submit([Task("three")], key="third")
    for _ in range(2):
        assert client.submit([Task("one")], producer="reader", cursor=1, key="first").added == 1
        assert client.submit([Task("two"), Task("one")]).added == 0
        place.restart()
        client = place.client
    with pytest.raises(Full):  # a refusal is no answer to keep
        client.submit([Task("three")], key="third")
    client.complete(place.lease())
    assert client.submit([Task("three")], key="third").added == 1
    assert client.submit([Task("three")], key="third").added == 1


def test_whatever_ends_a_task_makes_room(bounded: Client, place: Place) -> None:
    (lease,) = (task for task in bounded.tasks("leased"))
    attempt = (lease.number, lease.attempt)
    bounded.yield_tasks([Yielded(*attempt)])  # goes back: still unfinished
    bounded.release(bounded.acquire("worker").leases)
    with pytest.raises(Full):
        bounded.submit([Task("more 0")])
    bounded.complete(place.lease())
    assert bounded.submit([Task("more 0")]).added == 1
    bounded.fail(place.lease(), "broken", retryable=False)
    assert bounded.submit([Task("more 1")]).added == 1
    bounded.cancel(["more 1"])
    assert bounded.submit([Task("more 2")]).added == 1
    with pytest.raises(Full):
        bounded.submit([Task("more 3")])


def test_what_never_fits_is_a_mistake(bounded: Client) -> None:
    with pytest.raises(InputError, match="may have 3 unfinished tasks: 4 new ones never fit"):
        bounded.submit([Task(f"more {n}") for n in range(4)])
    for bound in (0, -1, 1 << 63, 10**40):
        with pytest.raises(InputError, match="cannot be bounded at"):
            bounded.limit(unfinished=bound)
        with pytest.raises(InputError, match="cannot be bounded at"):
            bounded.limit(undelivered=bound)
    assert bounded.stats().max_unfinished == 3


def test_a_lower_bound_takes_nothing_away_and_none_lifts_it(bounded: Client) -> None:
    bounded.limit(unfinished=1)
    assert (bounded.stats().pending, bounded.stats().leased) == (2, 1)
    with pytest.raises(Full):
        bounded.submit([Task("more")])
    bounded.limit()
    assert bounded.submit([Task(f"more {n}") for n in range(9)]).added == 9


def test_retried_tasks_may_pass_the_bound_and_then_nothing_is_added(place: Place) -> None:
    client = place.client
    client.limit(unfinished=1)
    client.submit([Task("one")])
    client.fail(place.lease(), "broken", retryable=False)
    client.submit([Task("two")])
    assert client.retry(["one"]) == 1
    assert client.stats().pending == 2
    client.complete(place.lease())
    with pytest.raises(Full):
        client.submit([Task("three")])


def test_nothing_is_handed_out_while_too_much_is_undelivered(place: Place) -> None:
    """Leases count: each may become a result, and a result is always accepted."""
    client = place.client
    client.submit([Task(f"task {n}") for n in range(9)])
    client.open_consumer("trainer")
    client.limit(undelivered=3)
    assert len(client.acquire("worker", 2).leases) == 2
    leases = client.acquire("worker", 9).leases
    assert len(leases) == 1
    assert client.acquire("worker").status == "backpressured"
    client.release(leases)
    leases = [place.lease(), *(m.Lease(t.number, t.attempt, t.id, "") for t in client.tasks("leased"))][:3]
    for lease in leases:
        client.complete(lease)
        assert client.acquire("worker", 9).status == "backpressured"
    assert client.stats().undelivered == 3
    client.ack("trainer", [1, 1])
    assert client.stats().undelivered == 2
    assert len(client.acquire("worker", 9).leases) == 1
    client.ack("trainer", [0, 1, 2])
    assert len(client.acquire("worker", 9).leases) == 2
    client.limit()
    assert len(client.acquire("worker", 9).leases) == 3


def test_an_empty_or_draining_queue_says_so_although_it_has_no_room(place: Place) -> None:
    client = place.client
    client.limit(undelivered=1)
    client.submit([Task("one"), Task("two")])
    client.complete(place.lease())
    assert client.acquire("worker").status == "backpressured"
    place.coordinator.drain("work")
    assert client.acquire("worker").status == "draining"
    client.cancel(["two"])
    place.coordinator.drain("work", draining=False)
    assert client.acquire("worker").status == "empty"
    client.seal()
    assert client.acquire("worker").status == "end"


def test_undelivered_is_what_some_consumer_has_not_acknowledged(place: Place) -> None:
    client = place.client
    client.submit([Task(f"task {n}") for n in range(4)])
    for lease in client.acquire("worker", 4).leases:
        client.complete(lease)
    assert client.stats().undelivered == 4  # nobody reads: all are kept
    for name in ("trainer", "archive"):
        client.open_consumer(name)
    client.ack("trainer", [0, 1, 2])
    assert client.stats().undelivered == 4
    client.ack("archive", [0])
    assert client.stats().undelivered == 3
    client.plan_batch("batch", "archive", [1])
    client.batch_ready("batch")
    client.finish_batch("batch")
    assert client.stats().undelivered == 2
    client.close_consumer("archive")
    assert client.stats().undelivered == 1
    client.trim(4)
    assert client.stats().undelivered == 1
    place.restart()
    assert place.client.stats().undelivered == 1


def test_bounds_outlive_the_coordinator_and_go_with_a_fork(place: Place) -> None:
    place.client.submit([Task("one"), Task("two")])
    place.client.complete(place.lease())
    place.client.limit(unfinished=5, undelivered=7)
    place.client.snapshot("then")
    place.client.limit(unfinished=6)
    place.restart()
    bounds = [(s.max_unfinished, s.max_undelivered) for s in (place.client.stats(),)]
    place.client.restore("then")
    fork = place.client.fork("then", "fork").stats()
    now = place.client.stats()
    assert bounds == [(6, None)]
    assert (now.max_unfinished, now.max_undelivered, now.undelivered) == (6, None, 1)
    assert (fork.max_unfinished, fork.max_undelivered, fork.undelivered) == (5, 7, 1)


def test_a_wrong_count_is_found_by_the_audit(place: Place) -> None:
    place.client.submit([Task("one")])
    place.client.complete(place.lease())
    assert audit(place.coordinator).problems == []
    with place.coordinator.owners.catalogue.changing() as cursor:
        cursor.execute("UPDATE queues SET undelivered = 5")
    assert audit(place.coordinator).problems == [
        "queue 'work': 1 results are not delivered, the count says 5"
    ]
    with place.coordinator.owners.catalogue.changing() as cursor:
        cursor.execute("UPDATE queues SET undelivered = 1")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("bounds") / "pool") as server:
        yield server


@pytest.fixture(params=["local", "http"])
def waiting(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Client]:
    """A queue with room for one task, which it has, in this process and behind a server."""
    if request.param == "http":
        with Client(request.getfixturevalue("served").address, str(tmp_path)) as client:
            yield _filled(client)
        return
    with Pool.open(tmp_path / "pool", create=True) as pool, Coordinator(pool) as coordinator:
        yield _filled(Client(coordinator, "work"))


def _filled(client: Client) -> Client:
    client.create()
    client.limit(unfinished=1, undelivered=1)
    client.submit([Task("one")])
    return client


def test_a_submission_waits_for_room(waiting: Client) -> None:
    with pytest.raises(Full):
        waiting.submit([Task("two")])
    begun = time.monotonic()
    with pytest.raises(Full):
        waiting.submit([Task("two")], wait=0.3)
    assert 0.3 <= time.monotonic() - begun < 30
    timer = threading.Timer(0.3, lambda: waiting.cancel(["one"]))
    timer.start()
    assert waiting.submit([Task("two")], producer="reader", cursor=2, wait=60.0).added == 1
    timer.join()
    assert waiting.cursor("reader") == 2


def test_a_worker_waits_for_a_task(waiting: Client) -> None:
    (lease,) = waiting.acquire("worker").leases
    waiting.open_consumer("trainer")
    waiting.complete(lease)
    waiting.submit([Task("two")])
    assert waiting.acquire("worker").status == "backpressured"
    assert waiting.acquire("worker", wait=0.1).status == "backpressured"
    timer = threading.Timer(0.3, lambda: waiting.ack("trainer", [0]))
    timer.start()
    (lease,) = waiting.acquire("worker", wait=60.0).leases
    timer.join()
    waiting.complete(lease)
    waiting.seal()
    begun = time.monotonic()
    assert waiting.acquire("worker", wait=60.0).status == "end"  # nothing to wait for
    assert time.monotonic() - begun < 30


def test_waiting_ends_with_the_answer_that_never_comes(place: Place) -> None:
    """Who waits for room gives up on a coordinator that does not answer as ever: by the client's timeout."""
    with Client("http://127.0.0.1:9", "work", timeout=0.1) as client, pytest.raises(Unknown):
        client.submit([Task("one")], wait=60.0)


def test_a_lease_that_ran_out_makes_room_for_another(place: Place) -> None:
    client = place.client
    client.submit([Task("one"), Task("two")])
    client.limit(undelivered=1)
    place.lease()
    assert client.acquire("other").status == "backpressured"
    place.clock.pass_(SECONDS + 1)
    assert len(client.acquire("other").leases) == 1
