"""Batches: planned, built, used; their payloads stay as long as that takes."""

from __future__ import annotations

import pytest

from queued import Place
from spillover.errors import Conflict, InputError, NotAllowed
from spillover.queue import Task


@pytest.fixture(autouse=True)
def accepted(place: Place) -> None:
    """Four results, and a consumer."""
    place.client.submit([Task(f"task {n}") for n in range(4)])
    for n in range(4):
        place.client.complete(place.lease(), place.publish(f"result {n}"))
    place.client.open_consumer("trainer")


def test_a_batch_from_plan_to_end(place: Place) -> None:
    client = place.client
    plan, ready = place.publish("plan"), place.publish("ready")
    planned = client.plan_batch("step 1", "trainer", [2, 0], plan)
    assert (planned.status, planned.positions, planned.plan, planned.ready) == ("planned", [2, 0], plan, None)
    assert planned.consumer == "trainer"
    assert client.plan_batch("step 1", "trainer", [2, 0], plan) == planned
    built = client.batch_ready("step 1", ready)
    assert (built.status, built.ready) == ("ready", ready)
    assert client.batch_ready("step 1", ready) == client.batch("step 1") == built
    assert client.plan_batch("step 1", "trainer", [2, 0], plan) == built
    assert len(place.owned()) == 6
    finished = client.finish_batch("step 1")
    assert (finished.status, finished.plan, finished.ready) == ("finished", None, None)
    assert client.finish_batch("step 1") == finished
    consumer = client.consumer("trainer")
    assert (consumer.low, consumer.acknowledged) == (1, [2])
    assert len(place.owned()) == 2


def test_other_content_is_a_conflict(place: Place) -> None:
    client = place.client
    plan = place.publish("plan")
    client.plan_batch("step 1", "trainer", [0], plan)
    for positions, other in (([1], plan), ([0], None), ([0], place.publish("other"))):
        with pytest.raises(Conflict, match="batch 'step 1' was planned with other positions or another plan"):
            client.plan_batch("step 1", "trainer", positions, other)
    client.batch_ready("step 1", plan)
    with pytest.raises(Conflict, match="batch 'step 1' is ready with another payload"):
        client.batch_ready("step 1", place.publish("other"))
    assert client.batch("step 1").ready == plan


def test_a_batch_needs_its_consumer_its_positions_and_its_turn(place: Place) -> None:
    client = place.client
    with pytest.raises(InputError, match="no consumer 'nobody'"):
        client.plan_batch("step 1", "nobody", [0])
    with pytest.raises(InputError, match="accepted positions 0 to 3"):
        client.plan_batch("step 1", "trainer", [4])
    for call in (client.batch, client.batch_ready, client.finish_batch):
        with pytest.raises(InputError, match="no batch 'step 1'"):
            call("step 1")
    client.plan_batch("step 1", "trainer", [])
    with pytest.raises(NotAllowed, match="batch 'step 1' is not ready"):
        client.finish_batch("step 1")
    client.batch_ready("step 1")
    assert client.finish_batch("step 1").status == "finished"
    assert client.consumer("trainer").low == 0


def test_a_batch_may_be_used_after_its_positions_were_acknowledged(place: Place) -> None:
    client = place.client
    client.plan_batch("step 1", "trainer", [0, 1])
    client.batch_ready("step 1", place.publish("ready"))
    client.ack("trainer", [0, 1, 2])
    assert len(place.owned()) == 2  # one result and the batch
    client.finish_batch("step 1")
    assert client.consumer("trainer").low == 3
    assert len(place.owned()) == 1


def test_batches_survive_a_restart(place: Place) -> None:
    plan = place.publish("plan")
    place.client.plan_batch("step 1", "trainer", [3], plan)
    place.client.plan_batch("step 2", "trainer", [1])
    place.client.batch_ready("step 2", plan)
    place.restart()
    assert place.client.batch("step 1").plan == plan
    assert place.client.batch("step 2").status == "ready"
    place.account()
