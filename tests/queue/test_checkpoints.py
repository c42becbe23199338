"""A queue kept as it was, begun again elsewhere, and set back."""

from __future__ import annotations

import pytest

from queued import SECONDS, Place
from spillover.errors import Collected, InputError, NotAllowed, Stale, Superseded
from spillover.queue import PARTIAL, CheckpointInfo, Client, Consumer, Task, Yielded


@pytest.fixture
def kept(place: Place) -> Client:
    """A queue with something of everything, and its checkpoint ``then``."""
    client = place.client
    client.submit([Task(f"done {n}") for n in range(3)], producer="reader", cursor=3)
    for n in range(3):
        client.complete(place.lease(), place.publish(f"result {n}"), metadata=n)
    client.open_consumer("trainer")
    client.save("trainer", {"step": 1}, payload=place.publish("state"), positions=[0, 2])
    client.plan_batch("batch", "trainer", [1], place.publish("plan"))
    client.submit([Task("dead", input=place.publish("dead"), max_attempts=1), Task("cancelled")])
    client.fail(place.lease(), "broken")
    client.cancel(["cancelled"])
    client.submit([Task(name, input=place.publish(name)) for name in ("leased", "waiting", "last")])
    leased = place.lease("worker")
    client.release([leased])
    again = place.lease("worker")
    assert (again.task, again.attempt) == ("leased", 2)
    client.retire("old")
    assert client.snapshot("then") == CheckpointInfo("then", "work", tasks=4, results=1)
    return client


def outline(client: Client) -> object:
    """What a queue holds, but for numbers."""
    tasks = [
        (t.id, t.status, t.stage, t.rank, t.attempt, t.failures, t.position, t.input, t.failure)
        for t in client.tasks(limit=1000)
    ]
    stats = client.stats()
    return (
        sorted(tasks),
        client.log(),
        client.consumer("trainer"),
        client.batch("batch"),
        client.cursor("reader"),
        (stats.pending, stats.completed, stats.dead, stats.positions, stats.sealed),
    )


def change_everything(place: Place) -> None:
    """Work on, past the checkpoint."""
    client = place.client
    client.ack("trainer", [1])
    client.save("trainer", {"step": 2})
    client.submit([Task("new")], producer="reader", cursor=9)
    client.retry(["dead"])
    for lease in client.acquire("other", 10).leases:
        client.complete(lease, place.publish(f"later {lease.task}"))
    client.seal()


def test_a_fork_begins_as_the_checkpoint_was(place: Place, kept: Client) -> None:
    owned = place.owned()
    change_everything(place)
    fork = kept.fork("then", "fork")
    consumer = fork.consumer("trainer")
    assert (consumer.low, consumer.acknowledged, consumer.state) == (1, [2], {"step": 1})
    assert consumer.state_ref is not None
    assert place.read(consumer.state_ref) == "state"
    assert fork.cursor("reader") == 3
    stats = fork.stats()
    assert (stats.pending, stats.leased, stats.completed, stats.dead, stats.cancelled) == (3, 0, 1, 1, 0)
    assert (stats.positions, stats.sealed) == (3, False)
    assert [(r.position, r.metadata) for r in fork.log()] == [(1, 1)]
    assert fork.batch("batch").status == "planned"
    assert [lease.task for lease in fork.acquire("me", 9).leases] == ["leased", "waiting", "last"]
    with pytest.raises(Superseded):
        fork.acquire("old")
    assert len(place.owned()) > len(owned)
    place.account()


def test_a_fork_and_its_origin_go_their_own_ways(place: Place, kept: Client) -> None:
    fork = kept.fork("then", "fork")
    mine, theirs = place.lease(), fork.acquire("worker").leases[0]
    assert mine.task == "waiting"  # one task is still leased in the origin
    assert theirs.task == "leased"
    kept.complete(mine, place.publish("mine"))
    with pytest.raises(Stale):
        kept.complete(theirs)
    fork.complete(theirs, place.publish("theirs"))
    assert fork.submit([Task("done 0")]).added == 1
    fork.ack("trainer", [1])
    place.account()
    assert kept.stats().positions == fork.stats().positions == 4


def test_restore_sets_everything_back(place: Place, kept: Client) -> None:
    reference = outline(kept.fork("then", "fork"))
    lease = kept.tasks("leased")[0]
    change_everything(place)
    kept.restore("then")
    assert outline(kept) == reference
    place.account()
    again = place.lease("me")
    assert (again.task, again.attempt) == ("leased", 3)
    assert again.number != lease.number
    kept.restore("then")
    kept.restore("then")
    assert outline(kept) == reference


def test_no_lease_survives_a_restore(place: Place, kept: Client) -> None:
    lease = place.lease("me")
    kept.restore("then")
    for call in (
        lambda: kept.complete(lease),
        lambda: kept.fail(lease, "late"),
        lambda: kept.yield_tasks([Yielded(lease.number, lease.attempt)]),
    ):
        with pytest.raises(Stale, match="queue 'work' has no task number"):
            call()
    assert kept.renew([lease]) == [False]
    assert kept.release([lease]) == 0
    place.clock.pass_(SECONDS * 2)
    assert place.lease("me").failures == 0
    place.restart()
    with pytest.raises(Stale):
        place.client.complete(lease)


def test_a_worker_stays_retired_through_a_restore(place: Place, kept: Client) -> None:
    kept.retire("later")
    kept.restore("then")
    for worker in ("old", "later"):
        with pytest.raises(Superseded):
            kept.acquire(worker)


def test_a_checkpoint_keeps_its_payloads(place: Place, kept: Client) -> None:
    texts = ["state", "plan", "result 1", "dead", "leased", "waiting", "last"]
    for lease in kept.acquire("me", 9).leases:
        kept.complete(lease)
    kept.cancel(["dead", "leased"])
    kept.save("trainer", None, positions=[1, 3, 4])
    kept.batch_ready("batch")
    kept.finish_batch("batch")
    place.pool.seal()
    place.coordinator.owners.collect()
    place.coordinator.owners.compact(min_owned=1.0)
    kept.restore("then")
    consumer, batch = kept.consumer("trainer"), kept.batch("batch")
    inputs = [task.input for status in ("pending", "dead") for task in kept.tasks(status)]
    refs = [consumer.state_ref, batch.plan, *(receipt.result for receipt in kept.log()), *inputs]
    assert sorted(place.read(ref) for ref in refs if ref is not None) == sorted(texts)


def test_what_nobody_needs_any_more_goes_with_the_checkpoint(place: Place, kept: Client) -> None:
    for task in kept.tasks(limit=1000):
        kept.cancel([task.id])
    kept.save("trainer", None, positions=[1])
    kept.batch_ready("batch")
    kept.finish_batch("batch")
    assert len(place.owned()) == 7
    assert kept.drop_checkpoint("then") is True
    assert kept.drop_checkpoint("then") is False
    assert place.owned() == set()
    assert kept.checkpoints() == []
    for call in (lambda: kept.restore("then"), lambda: kept.fork("then", "fork")):
        with pytest.raises(InputError, match="no checkpoint 'then'"):
            call()


def test_names_are_taken_once(place: Place, kept: Client) -> None:
    with pytest.raises(NotAllowed, match="there is a checkpoint 'then'"):
        kept.snapshot("then")
    with pytest.raises(NotAllowed, match="there is a queue 'work'"):
        kept.fork("then", "work")
    other = kept.on("other")
    other.create()
    other.snapshot("second")
    kept.snapshot("third")
    assert [info.name for info in kept.checkpoints()] == ["then", "third"]
    assert other.checkpoints() == [CheckpointInfo("second", "other", 0, 0)]


def test_requests_that_make_and_set_back_happen_once(place: Place, kept: Client) -> None:
    fork = kept.fork("then", "fork", key="a")
    fork.submit([Task("new")])
    assert kept.fork("then", "fork", key="a").task("new") is not None
    assert kept.snapshot("more", key="b") == kept.snapshot("more", key="b")
    kept.restore("then", key="c")
    kept.submit([Task("new")])
    kept.restore("then", key="c")
    assert kept.task("new") is not None
    assert kept.drop_checkpoint("more", key="d") is kept.drop_checkpoint("more", key="d") is True


def test_a_sealed_queue_is_sealed_in_its_checkpoint(place: Place) -> None:
    place.client.submit([Task("one")])
    place.client.seal()
    place.client.snapshot("end")
    assert place.client.fork("end", "fork").stats().sealed
    place.restart()
    assert place.client.on("fork").stats().sealed


def test_checkpoints_survive_a_restart(place: Place, kept: Client) -> None:
    reference = outline(kept.fork("then", "fork"))
    change_everything(place)
    place.restart()
    place.client.restore("then")
    assert outline(place.client) == reference
    assert outline(place.client.on("fork")) == reference


def test_a_yielded_task_is_kept_as_it_is_continued(place: Place) -> None:
    place.client.submit([Task("one", input=place.publish("begin"))])
    lease = place.lease()
    place.client.yield_tasks([Yielded(lease.number, lease.attempt, place.publish("middle"), rank=3)])
    place.client.snapshot("then")
    place.client.complete(place.lease())
    place.client.restore("then")
    again = place.lease()
    assert again.input is not None
    assert (place.read(again.input), again.rank, again.stage) == ("middle", 3, PARTIAL)


def test_consumers_of_a_fork_read_from_what_is_there(place: Place, kept: Client) -> None:
    fork = kept.fork("then", "fork")
    assert fork.open_consumer("new") == Consumer(3, [])
    with pytest.raises(Collected):
        fork.open_consumer("other", start=0)
