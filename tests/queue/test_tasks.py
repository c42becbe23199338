"""A task's life: submitted, handed out in order, continued, accepted once, failed, given up."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from queued import SECONDS, Place
from spillover.errors import Conflict, InputError, NotAllowed, SpillError, Stale, Superseded
from spillover.queue import (
    DELIVERY,
    FRESH,
    PARTIAL,
    UNRANKED,
    Client,
    Completion,
    Failure,
    Task,
    Yielded,
)
from spillover.queue import messages as m
from spillover.queue.metrics import prometheus


def names(client: Client, limit: int = 100, **options: Any) -> list[str]:
    return [lease.task for lease in client.acquire("worker", limit, **options).leases]


def test_a_repeated_submission_adds_nothing(client: Client) -> None:
    tasks = [Task("one", metadata={"a": 1, "b": [2]}), Task("two", rank=5)]
    assert client.submit(tasks).added == 2
    assert client.submit([Task("one", metadata={"b": [2], "a": 1}), Task("three")]).added == 1
    assert client.submit(tasks).added == 0
    assert client.submit([]).added == 0
    assert client.submit([Task("four"), Task("four")]).added == 1
    assert client.stats().pending == 4


@pytest.mark.parametrize(
    "changed",
    [
        Task("one", metadata=2),
        Task("one", metadata=1, stage=PARTIAL),
        Task("one", metadata=1, lane="fast"),
        Task("one", metadata=1, max_attempts=9),
    ],
)
def test_other_content_is_a_conflict_and_nothing_of_the_call_happens(client: Client, changed: Task) -> None:
    client.submit([Task("one", metadata=1)], producer="reader", cursor=10)
    with pytest.raises(Conflict, match="task 'one' was submitted before with other content"):
        client.submit([Task("new"), changed], producer="reader", cursor=20)
    assert client.task("new") is None
    assert client.cursor("reader") == 10
    assert client.stats().pending == 1


def test_another_input_is_a_conflict_and_owns_nothing(place: Place) -> None:
    first, second = place.publish("first"), place.publish("second")
    place.client.submit([Task("one", input=first)])
    with pytest.raises(Conflict):
        place.client.submit([Task("new", input=second), Task("one", input=second)])
    assert len(place.owned()) == 1


def test_a_finished_task_is_not_submitted_again(place: Place) -> None:
    tasks = [Task("done"), Task("dead", max_attempts=1), Task("cancelled")]
    place.client.submit(tasks)
    place.client.complete(place.lease(tasks=["done"]))
    place.client.fail(place.lease(tasks=["dead"]), "broken")
    place.client.cancel(["cancelled"])
    assert place.client.submit(tasks).added == 0
    assert place.client.acquire("worker").status == "empty"


def test_the_cursor_moves_with_the_tasks(client: Client) -> None:
    assert client.cursor("reader") is None
    client.submit([Task("one")], producer="reader", cursor={"row": 1})
    client.submit([Task("two")], producer="other", cursor="elsewhere")
    assert client.cursor("reader") == {"row": 1}
    client.submit([], producer="reader", cursor={"row": 2})
    assert client.cursor("reader") == {"row": 2}
    client.seal()
    with pytest.raises(NotAllowed, match="sealed"):
        client.submit([Task("three")], producer="reader", cursor={"row": 3})
    assert client.cursor("reader") == {"row": 2}
    assert client.cursor("other") == "elsewhere"


def test_order_is_stage_then_rank_then_first_come(client: Client) -> None:
    client.submit(
        [
            Task("fresh"),
            Task("fresh late"),
            Task("fresh ranked", rank=3),
            Task("partial", stage=PARTIAL, rank=9),
            Task("partial sooner", stage=PARTIAL, rank=-1),
            Task("delivery", stage=DELIVERY, rank=100),
        ]
    )
    client.submit([Task("delivery late", stage=DELIVERY, rank=100)])
    wanted = ["delivery", "delivery late", "partial sooner", "partial", "fresh ranked", "fresh", "fresh late"]
    assert names(client, 2) + names(client) == wanted


def test_a_lane_sees_only_its_tasks(client: Client) -> None:
    client.submit([Task("a"), Task("b", lane="control"), Task("c")])
    assert names(client, lane="control") == ["b"]
    assert client.acquire("worker", lane="control").status == "empty"
    assert names(client) == ["a", "c"]


def test_prefix_and_ids_choose_among_the_pending(client: Client) -> None:
    client.submit([Task(name) for name in ("prompt:1", "prompt:2", "Prompt:3", "100%", "100x", "prompt:%")])
    assert names(client, 1, prefix="prompt:") == ["prompt:1"]
    assert names(client, prefix="prompt:") == ["prompt:2", "prompt:%"]
    assert names(client, prefix="100%") == ["100%"]
    assert names(client, tasks=["nobody", "Prompt:3", "prompt:1"]) == ["Prompt:3"]
    assert names(client, tasks=[]) == []
    assert names(client, tasks=["100x"], prefix="prompt:") == []
    assert names(client) == ["100x"]


def test_acquire_says_why_there_is_no_more(place: Place) -> None:
    client = place.client
    assert client.acquire("worker").status == "empty"
    client.submit([Task("one"), Task("two")])
    lease = place.lease()
    client.seal()
    place.coordinator.drain("work")
    drained = client.acquire("worker")
    assert (drained.status, drained.leases) == ("draining", [])
    assert client.stats().draining
    place.coordinator.drain("work", draining=False)
    acquired = client.acquire("worker", 5)
    assert (acquired.status, len(acquired.leases)) == ("acquired", 1)
    assert client.acquire("worker").status == "empty"  # leased ones may come back
    client.fail(lease, "broken", retryable=False)
    client.complete(acquired.leases[0])
    assert client.acquire("worker").status == "end"
    assert client.stats().end
    assert client.retry(["one"]) == 1
    assert not client.stats().end


@pytest.mark.parametrize("limit", [0, -1])
def test_less_than_one_task_is_not_asked_for(client: Client, limit: int) -> None:
    client.submit([Task("one"), Task("two")])
    with pytest.raises(InputError, match=f"acquire asks for {limit} tasks"):
        client.acquire("worker", limit)


def test_a_lease_says_everything_about_its_task(place: Place) -> None:
    ref = place.publish("input")
    place.client.submit([Task("one", input=ref, metadata={"a": None}, stage=PARTIAL, rank=4)])
    lease = place.lease("me")
    assert (lease.task, lease.worker, lease.attempt, lease.failures) == ("one", "me", 1, 0)
    assert (lease.input, lease.metadata, lease.stage, lease.rank) == (ref, {"a": None}, PARTIAL, 4)
    assert lease.seconds == SECONDS
    info = place.client.task("one")
    assert info is not None
    assert (info.status, info.worker, info.attempt, info.input) == ("leased", "me", 1, ref)


def test_a_lease_runs_out_unless_it_is_renewed(place: Place) -> None:
    client = place.client
    client.submit([Task("kept"), Task("lost")])
    kept, lost = client.acquire("worker", 2).leases
    for _ in range(5):
        place.clock.pass_(SECONDS * 0.6)
        assert client.renew([kept]) == [True]
    assert client.renew([kept, lost]) == [True, False]
    again = place.lease("other")
    assert (again.task, again.attempt, again.failures) == ("lost", 2, 1)
    info = client.task("lost")
    assert info is not None
    assert info.failure == "the lease of worker worker ran out"
    place.clock.pass_(SECONDS)  # it lasts this long and no shorter
    assert client.complete(kept).position == 0
    assert client.complete(again).position == 1


def test_a_lease_that_ran_out_is_over_for_whoever_looks(place: Place) -> None:
    """Nobody has to change anything first: figures, lists, metrics and the end of the queue are right."""
    client = place.client
    client.submit([Task("one", max_attempts=2), Task("two", max_attempts=1)])
    client.seal()
    leases = client.acquire("worker", 2).leases
    client.renew(leases)
    place.clock.pass_(SECONDS)
    assert client.stats().leased == 2
    place.clock.pass_(1)
    stats = client.stats()
    assert (stats.pending, stats.leased, stats.dead, stats.end) == (1, 0, 1, False)
    client.release(client.acquire("worker").leases)
    place.lease()
    place.clock.pass_(SECONDS + 1)
    assert [task.status for task in client.tasks()] == ["dead", "dead"]
    place.clock.pass_(SECONDS)
    assert client.tasks("leased") == []
    one = client.task("one")
    assert one is not None
    assert (one.failures, one.worker, one.failure) == (2, None, "the lease of worker worker ran out")
    assert 'spill_tasks{queue="work",status="leased"} 0' in prometheus(place.coordinator)
    commits = place.coordinator.counters.commits
    client.stats()
    assert place.coordinator.counters.commits == commits  # who only looks writes nothing


def test_renewing_twice_at_once_counts_one_failure(place: Place) -> None:
    place.client.submit([Task("one")])
    lease = place.lease()
    assert place.client.renew([lease, lease]) == [True, True]
    place.client.renew([lease])
    place.clock.pass_(SECONDS + 1)
    assert place.lease().failures == 1


def test_a_renewal_holds_for_its_own_queue_only(place: Place) -> None:
    other = place.client.on("other")
    other.create()
    place.client.submit([Task("one")])
    lease = place.lease()
    assert other.renew([lease]) == [False]
    with pytest.raises(Stale, match="queue 'other' has no task number"):
        other.complete(lease)
    with pytest.raises(InputError, match="no queue 'nowhere'"):
        place.client.on("nowhere").renew([lease])


@pytest.mark.parametrize("jump", [6 * 3600.0, -6 * 3600.0, -2e9])
def test_the_wall_clock_changes_nothing(place: Place, monkeypatch: pytest.MonkeyPatch, jump: float) -> None:
    place.client.submit([Task("one")])
    lease = place.lease()
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + jump)
    monkeypatch.setattr(time, "time_ns", lambda: int((real() + jump) * 1e9))
    assert place.client.renew([lease]) == [True]
    place.clock.pass_(SECONDS)
    assert place.client.acquire("other").status == "empty"
    place.restart()
    assert place.client.acquire("other").status == "empty"
    assert place.client.complete(lease).attempt == 1


def test_after_its_last_attempt_a_task_is_dead(place: Place) -> None:
    client = place.client
    client.submit([Task("one", max_attempts=3)])
    assert client.fail(place.lease(), "first") is False
    place.lease()
    place.clock.pass_(SECONDS + 1)
    last = place.lease()
    assert (last.attempt, last.failures) == (3, 2)
    assert client.fail(last, "third") is True
    assert client.acquire("worker").status == "empty"
    (dead,) = client.tasks("dead")
    assert (dead.id, dead.failures, dead.failure, dead.worker) == ("one", 3, "third", None)
    with pytest.raises(Stale, match=r"attempt 3 at task 'one' is not current: the task is dead \(third\)"):
        client.complete(last)
    assert client.retry(["one", "nobody"]) == 1
    assert client.retry(["one"]) == 0
    again = place.lease()
    assert (again.attempt, again.failures) == (4, 0)
    assert client.complete(again).attempt == 4


def test_a_failure_that_no_attempt_can_mend_kills_at_once(place: Place) -> None:
    place.client.submit([Task("one", max_attempts=100)])
    assert place.client.fail(place.lease(), "no such prompt", retryable=False) is True
    assert place.client.stats().dead == 1


def test_a_failed_task_returns_to_its_place(place: Place) -> None:
    place.client.submit([Task("one"), Task("two")])
    place.client.fail(place.lease(), "broken")
    assert names(place.client) == ["one", "two"]


def test_a_dead_task_keeps_its_input_until_it_is_cancelled(place: Place) -> None:
    place.client.submit([Task("one", input=place.publish("input"), max_attempts=1)])
    place.client.fail(place.lease(), "broken")
    assert len(place.owned()) == 1
    assert place.client.cancel(["one"]) == 1
    assert place.owned() == set()


def test_cancel_ends_what_is_not_finished(place: Place) -> None:
    client = place.client
    client.submit([Task(name, max_attempts=1) for name in ("done", "dead", "leased", "pending")])
    client.complete(place.lease())
    client.fail(place.lease(), "broken")
    lease = place.lease()
    assert client.cancel(["done", "dead", "leased", "pending", "pending", "nobody"]) == 3
    assert client.cancel(["dead", "leased", "pending"]) == 0
    assert client.renew([lease]) == [False]
    with pytest.raises(Stale, match="the task is cancelled"):
        client.complete(lease)
    stats = client.stats()
    assert (stats.completed, stats.cancelled, stats.dead, stats.leased) == (1, 3, 0, 0)


def test_a_yielded_task_goes_on_with_its_new_input_behind_the_others(place: Place) -> None:
    client = place.client
    client.submit([Task("one", input=place.publish("begin"), metadata=0), Task("two", stage=PARTIAL)])
    first = place.lease(tasks=["one"])
    middle = place.publish("middle")
    yielded = Yielded(first.number, first.attempt, middle, {"tokens": 5})
    assert client.yield_tasks([yielded]) == 1
    two, one = client.acquire("other", 2).leases
    assert (two.task, one.task) == ("two", "one")
    assert (one.attempt, one.failures, one.input, one.metadata) == (2, 0, middle, {"tokens": 5})
    assert (one.stage, one.rank) == (PARTIAL, UNRANKED)
    client.yield_tasks([Yielded(one.number, one.attempt, None, stage=FRESH, rank=3)])
    last = place.lease()
    assert (last.task, last.input, last.metadata, last.stage, last.rank) == ("one", None, None, FRESH, 3)
    assert place.owned() == set()
    with pytest.raises(Stale, match="worker worker has attempt 3"):
        client.yield_tasks([yielded])


def test_a_released_task_keeps_its_place(place: Place) -> None:
    client = place.client
    client.submit([Task("one", metadata=1), Task("two"), Task("three")])
    one, two = client.acquire("worker", 2).leases
    client.complete(two)
    assert client.release([one, one, two]) == 1
    assert client.release([one]) == 0
    again, three = client.acquire("worker", 2).leases
    assert (again.task, again.attempt, again.failures, again.metadata) == ("one", 2, 0, 1)
    assert three.task == "three"


def test_a_result_is_accepted_once(place: Place) -> None:
    client = place.client
    client.submit([Task("one"), Task("two")])
    one, two = client.acquire("me", 2).leases
    ref = place.publish("result")
    receipt = client.complete(one, ref, metadata={"score": 0.5, "n": 1})
    assert (receipt.position, receipt.task, receipt.attempt, receipt.worker) == (0, "one", 1, "me")
    assert client.complete(one, ref, metadata={"n": 1, "score": 0.5}) == receipt
    assert client.complete(two).position == 1
    assert client.complete(one, ref, metadata={"score": 0.5, "n": 1}) == receipt
    for other in ({"result": ref}, {"metadata": {"score": 0.5, "n": 1}}, {}):
        with pytest.raises(Conflict, match="attempt 1 at task 'one' was accepted with another result"):
            client.complete(one, other.get("result"), metadata=other.get("metadata"))
    assert [receipt.task for receipt in client.log()] == ["one", "two"]
    assert client.log(1, limit=5)[0].position == 1


def test_an_attempt_that_is_over_is_refused_with_the_reason(place: Place) -> None:
    client = place.client
    client.submit([Task("one")])
    first = place.lease("slow")
    place.clock.pass_(SECONDS + 1)
    with pytest.raises(
        Stale, match=r"attempt 1 at task 'one' is not current: the task is pending \(the lease of worker slow"
    ):
        client.complete(first)
    second = place.lease("quick")
    with pytest.raises(Stale, match="attempt 1 at task 'one' is not current: worker quick has attempt 2"):
        client.complete(first)
    client.complete(second)
    for late in (client.complete, lambda lease: client.fail(lease, "late")):
        with pytest.raises(Stale, match="attempt 1 at task 'one' is not current: the task is completed"):
            late(first)
    assert client.release([first]) == 0
    assert client.renew([first]) == [False]


def _calls(place: Place, good: m.Completion, bad: m.Completion) -> dict[str, Callable[[], object]]:
    client, pairs = place.client, [(good.number, good.attempt), (bad.number, bad.attempt)]
    call = place.coordinator.call
    return {
        "complete": lambda: client.complete_many([good, bad]),
        "yield": lambda: client.yield_tasks([Yielded(*pair) for pair in pairs]),
        "fail": lambda: call(m.Fail(queue="work", failures=[Failure(*pair, "broken") for pair in pairs])),
    }


@pytest.mark.parametrize("kind", ["complete", "yield", "fail"])
@pytest.mark.parametrize("wrong", ["stale", "unknown", "twice"])
def test_a_batch_happens_as_a_whole_or_not_at_all(place: Place, kind: str, wrong: str) -> None:
    place.client.submit([Task("one", input=place.publish("input")), Task("two")])
    one, two = place.client.acquire("worker", 2).leases
    good = Completion(one.number, one.attempt, place.publish("result"))
    bad = {
        "stale": Completion(two.number, two.attempt + 1),
        "unknown": Completion(987654, 1),
        "twice": good,
    }[wrong]
    with pytest.raises((Stale, InputError)):
        _calls(place, good, bad)[kind]()
    assert place.client.renew([one, two]) == [True, True]
    assert place.client.log() == []
    place.account()
    assert place.client.complete(one, good.result).position == 0


def test_a_batch_may_hold_repeats(place: Place) -> None:
    place.client.submit([Task("one"), Task("two")])
    one, two = place.client.acquire("worker", 2).leases
    first = place.client.complete(one)
    done = [Completion(two.number, two.attempt), Completion(one.number, one.attempt)]
    receipts = place.client.complete_many(done)
    assert [receipt.task for receipt in receipts] == ["two", "one"]
    assert receipts[1] == first
    assert place.client.complete_many(done) == receipts
    assert place.client.complete_many([]) == []


def test_a_retired_worker_is_refused_and_its_tasks_go_on(place: Place) -> None:
    client = place.client
    client.submit([Task("one"), Task("two"), Task("three")])
    one, two = client.acquire("old", 2).leases
    client.complete(one)
    assert client.retire("old") == 1
    assert client.retire("old") == 0
    with pytest.raises(Superseded, match="worker 'old' was retired"):
        client.acquire("old")
    with pytest.raises(Stale, match="the task is pending"):
        client.complete(two)
    assert client.complete(one).position == 0  # what was accepted stays
    again = place.lease("new")
    assert (again.task, again.attempt, again.failures) == ("two", 2, 0)


def test_a_sealed_queue_takes_repeats_only(client: Client) -> None:
    client.submit([Task("one")])
    client.seal()
    assert client.submit([Task("one")]).added == 0
    with pytest.raises(NotAllowed, match="queue 'work' is sealed: it takes no more tasks"):
        client.submit([Task("one"), Task("two")])
    assert client.stats().pending == 1


def test_positions_have_no_gaps_whatever_fails(place: Place) -> None:
    client = place.client
    client.submit([Task(f"task {n}", max_attempts=1) for n in range(40)])
    for n in range(20):
        good, bad = client.acquire("worker", 2).leases
        with pytest.raises(SpillError):
            client.complete_many([Completion(good.number, 1), Completion(bad.number, 7)])
        with pytest.raises(InputError):
            client.complete(good, metadata=object())
        client.fail(bad, "broken")
        assert client.complete(good).position == n
    assert [receipt.position for receipt in client.log(0, 1000)] == [*range(20)]


@pytest.mark.parametrize(
    "call",
    [
        m.Submit(queue="work", tasks=[Task("new", metadata=object())]),
        m.Submit(queue="work", tasks=[Task("new", rank=1 << 63)]),
        m.Submit(queue="work", tasks=[Task("\ud800")]),
        m.Submit(queue="work", tasks=[Task("new")], producer="reader", cursor={1, object()}),
        m.Acquire(queue="work", worker="worker", limit=1 << 64),
        m.Trim(queue="work", position=1 << 64),
        m.ReadLog(queue="work", start=1 << 64),
        m.Complete(queue="work", results=[Completion(1 << 64, 1)]),
    ],
)
def test_what_cannot_be_stored_is_refused(place: Place, call: m.Call) -> None:
    with pytest.raises(InputError, match=f"{type(call).__name__} holds a value that cannot be stored"):
        place.coordinator.call(call)
    assert place.client.tasks() == []


def test_pages_of_tasks(client: Client) -> None:
    client.submit([Task(f"task {n}") for n in range(7)])
    client.cancel(["task 3"])
    first = client.tasks(limit=4)
    rest = client.tasks(after=first[-1].number)
    assert [task.id for task in first + rest] == [f"task {n}" for n in range(7)]
    assert [task.id for task in client.tasks("cancelled")] == ["task 3"]
    with pytest.raises(InputError, match="no status 'lost'"):
        client.tasks("lost")


def test_a_task_that_is_named_twice_is_leased_once(place: Place) -> None:
    place.client.submit([Task("one"), Task("two")])
    leases = place.client.acquire("worker", 3, tasks=["two", "two", "one"]).leases
    assert [lease.task for lease in leases] == ["one", "two"]
