"""Keyed requests happen once: how their first answers are kept, and for how long."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest

from queued import Place
from spillover.errors import Conflict, Stale
from spillover.queue import Completion, Failure, Task, Yielded
from spillover.queue import messages as m
from spillover.queue.coordinator import HANDLERS


def test_a_key_names_one_request(place: Place) -> None:
    client = place.client
    client.submit([Task(f"task {n}", max_attempts=1) for n in range(4)])
    first = client.acquire("worker", 2, key="a")
    assert client.acquire("worker", 2, key="a") == first
    assert client.stats().leased == 2
    with pytest.raises(Conflict, match="request 'a' was answered before, with other content"):
        client.acquire("worker", 1, key="a")
    with pytest.raises(Conflict):
        client.cancel(["task 3"], key="a")
    assert client.fail(first.leases[0], "broken", key="b") is True
    assert client.fail(first.leases[0], "broken", key="b") is True
    assert client.retry(["task 0"], key="c") == client.retry(["task 0"], key="c") == 1
    again = place.lease(tasks=["task 0"])
    yielded = [Yielded(again.number, again.attempt, metadata={"a": 1, "b": 2})]
    assert client.yield_tasks(yielded, key="d") == 1
    same = [Yielded(again.number, again.attempt, metadata={"b": 2, "a": 1})]
    assert client.yield_tasks(same, key="d") == 1
    other = client.on("other")
    other.create()
    assert other.cancel(["nobody"], key="a") == 0  # a key belongs to its queue


def test_a_refused_request_may_be_repeated_under_its_key(place: Place) -> None:
    place.client.submit([Task("one")])
    lease = place.lease()
    place.client.release([lease])
    with pytest.raises(Stale):
        place.client.fail(lease, "broken", key="a")
    place.lease()
    assert place.client.cancel(["one"], key="a") == 1


def test_many_tasks_do_not_make_a_key_forgotten(place: Place) -> None:
    place.client.submit([Task("one"), Task("two")])
    first = place.client.acquire("worker", key="a")
    place.client.submit([Task(f"task {n}") for n in range(100_001)], key="b")
    assert place.client.acquire("worker", key="a") == first


def test_the_oldest_keys_are_forgotten_first(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spillover.queue.coordinator.REMEMBERED", 3)
    place.client.submit([Task(f"task {n}") for n in range(5)])
    first = [place.client.acquire("worker", key=str(n)) for n in range(4)]
    assert [place.client.acquire("worker", key=str(n)) for n in (1, 2, 3)] == first[1:]
    assert place.client.acquire("worker", key="0") != first[0]


def test_answers_are_kept_up_to_so_many_bytes(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the bound a repeat gets the first answer, restart or not; beyond it the oldest are gone."""
    monkeypatch.setattr("spillover.queue.coordinator.REMEMBERED_BYTES", 20_000)
    place.client.submit([Task(f"task {n:02}", metadata="x" * 1000) for n in range(40)])
    first = [place.client.acquire("worker", key=f"{n:02}") for n in range(30)]
    place.restart()
    sizes = kept(place)
    assert 15_000 < sum(sizes.values()) <= 20_000
    assert [*sizes] == [f"{n:02}" for n in range(30 - len(sizes), 30)]
    for key in reversed(sizes):
        assert place.client.acquire("worker", key=key) == first[int(key)]
    assert kept(place) == sizes
    assert place.client.acquire("worker", key="00") != first[0]
    assert sum(kept(place).values()) <= 20_000


def test_an_answer_that_is_larger_than_the_bound_is_kept_while_it_is_the_newest(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spillover.queue.coordinator.REMEMBERED_BYTES", 500)
    place.client.submit([Task(f"task {n}", metadata="x" * 1000) for n in range(3)])
    first = place.client.acquire("worker", 2, key="large")
    assert place.client.acquire("worker", 2, key="large") == first
    place.client.cancel(["nobody"], key="small")
    assert [*kept(place)] == ["small"]


def test_refused_and_repeated_requests_take_no_room(place: Place) -> None:
    place.client.submit([Task("one")])
    place.client.acquire("worker", key="a")
    before = kept(place)
    for key, attempt in itertools.product("abc", range(3)):
        with pytest.raises((Conflict, Stale)):
            place.client.yield_tasks([Yielded(1, 7 + attempt)], key=key)
        place.client.acquire("worker", key="a")
    assert kept(place) == before


def test_what_needs_no_key_is_recognised_for_as_long_as_its_row_is_there(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A result and a submission are their own receipts: no bound on answers makes them forgotten."""
    monkeypatch.setattr("spillover.queue.coordinator.REMEMBERED", 1)
    place.client.submit([Task("one", metadata=1), Task("two")])
    lease = place.lease()
    receipt = place.client.complete(lease, metadata="done")
    for n in range(5):
        place.client.cancel(["nobody"], key=str(n))
    place.restart()
    assert place.client.complete(lease, metadata="done") == receipt
    assert place.client.submit([Task("one", metadata=1), Task("two")]).added == 0


def every_call(place: Place) -> dict[str, tuple[m.Call, m.Call]]:
    """Of every kind one call that changes something, in an order in which they can, and another."""
    client, ref = place.client, place.publish("payload")
    client.submit([Task(f"task {n}", max_attempts=1) for n in range(9)])
    one, two, three, four = client.acquire("worker", 4).leases
    client.fail(four, "broken")
    client.complete(one)
    lease, other = (two.number, two.attempt), (three.number, three.attempt)
    calls: list[tuple[m.Call, dict[str, Any]]] = [
        (m.Create(queue="new"), {"queue": "newer"}),
        (m.Submit(queue="work", tasks=[Task("new")], producer="p", cursor=1), {"cursor": 2}),
        (m.Acquire(queue="work", worker="me"), {"worker": "you"}),
        (m.Renew(queue="work", leases=[lease]), {"leases": []}),
        (m.Yield(queue="work", tasks=[Yielded(*lease, ref)]), {"tasks": []}),
        (m.Complete(queue="work", results=[Completion(*other, ref)]), {"results": []}),
        (m.Release(queue="work", leases=[lease]), {"leases": [other]}),
        (m.Fail(queue="work", failures=[]), {"failures": [Failure(*lease, "x")]}),
        (m.Cancel(queue="work", tasks=["task 8"]), {"tasks": []}),
        (m.Retry(queue="work", tasks=["task 3"]), {"tasks": []}),
        (m.Limit(queue="work", unfinished=90), {"unfinished": 91}),
        (m.Retire(queue="work", worker="nobody"), {"worker": "somebody"}),
        (m.OpenConsumer(queue="work", consumer="c"), {"consumer": "d"}),
        (m.Ack(queue="work", consumer="c", positions=[0], save=True, state=1), {"state": 2}),
        (m.Rewind(queue="work", consumer="c", position=1), {"position": 0}),
        (m.PlanBatch(queue="work", batch="b", consumer="c", positions=[1], plan=ref), {"plan": None}),
        (m.BatchReady(queue="work", batch="b", ready=ref), {"ready": None}),
        (m.FinishBatch(queue="work", batch="b"), {"batch": "c"}),
        (m.Snapshot(queue="work", checkpoint="then"), {"checkpoint": "later"}),
        (m.Fork(queue="fork", checkpoint="then"), {"queue": "spoon"}),
        (m.Restore(queue="work", checkpoint="then"), {"checkpoint": "later"}),
        (m.DropCheckpoint(queue="work", checkpoint="then"), {"checkpoint": "later"}),
        (m.Trim(queue="work", position=2), {"position": 1}),
        (m.CloseConsumer(queue="work", consumer="c"), {"consumer": "d"}),
        (m.Seal(queue="work"), {}),
    ]
    keyed = [
        (msgspec.structs.replace(call, key=f"key {n}"), change) for n, (call, change) in enumerate(calls)
    ]
    return {type(call).__name__: (call, msgspec.structs.replace(call, **change)) for call, change in keyed}


def test_every_call_that_changes_something_happens_once_under_its_key(place: Place) -> None:
    """A repeat gets the first answer and changes no row, whatever came between; other content is refused."""
    calls = every_call(place)
    assert {*calls} == {kind.__name__ for kind in HANDLERS}
    answers = []
    for call, other in calls.values():
        answers.append(place.coordinator.call(call))
        before = rows(place)
        assert place.coordinator.call(call) == answers[-1]
        if other != call:
            with pytest.raises(Conflict, match="was answered before, with other content"):
                place.coordinator.call(other)
        assert rows(place) == before
    before = rows(place)
    assert [place.coordinator.call(call) for call, _ in calls.values()] == answers
    assert rows(place) == before


def rows(place: Place) -> dict[str, list[Any]]:
    """Everything in the tables, but for the counter of numbers."""
    with place.coordinator.owners.catalogue.reading() as cursor:
        query = "SELECT name FROM sqlite_schema WHERE type = 'table'"
        tables = [name for (name,) in cursor.execute(query).fetchall()]
        found = {table: cursor.execute(f"SELECT * FROM {table}").fetchall() for table in tables}
        return found | {"queues": [row[:-1] for row in found["queues"]]}


def kept(place: Place) -> dict[str, int]:
    """Keys of the answers that are kept, oldest first, and the bytes that each counts for."""
    with place.coordinator.owners.catalogue.reading() as cursor:
        query = "SELECT key, LENGTH(answer) + LENGTH(digest) + LENGTH(key) FROM answers ORDER BY id"
        return dict(cursor.execute(query).fetchall())
