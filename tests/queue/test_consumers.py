"""Reading the log: acknowledging in any order, remembering where one is, letting results go."""

from __future__ import annotations

import random

import pytest

from queued import Place
from spillover.errors import Collected, InputError
from spillover.pool import Ref
from spillover.queue import Task


def accept(place: Place, count: int) -> list[Ref]:
    """Have ``count`` more results accepted; returns them."""
    start = place.client.stats().positions
    place.client.submit([Task(f"task {n}") for n in range(start, start + count)])
    refs = [place.publish(f"result {n}") for n in range(start, start + count)]
    for ref in refs:
        place.client.complete(place.lease(), ref)
    return refs


def results(place: Place) -> int:
    """How many results somebody still needs."""
    return len(place.owned())


def test_acknowledged_in_any_order(place: Place) -> None:
    accept(place, 6)
    client = place.client
    opened = client.open_consumer("trainer")
    assert (opened.low, opened.acknowledged, opened.state) == (0, [], None)
    assert client.ack("trainer", [4, 2]).acknowledged == [2, 4]
    assert client.ack("trainer", [2, 1]).low == 0
    moved = client.ack("trainer", [0])
    assert (moved.low, moved.acknowledged) == (3, [4])
    moved = client.ack("trainer", [5, 3, 0])
    assert (moved.low, moved.acknowledged) == (6, [])
    assert client.consumer("trainer") == moved
    assert client.open_consumer("trainer", start=2) == moved  # found again, not begun again


@pytest.mark.parametrize("seed", range(5))
def test_the_mark_is_the_first_that_is_missing(place: Place, seed: int) -> None:
    accept(place, 30)
    place.client.open_consumer("trainer")
    luck, acknowledged = random.Random(seed), set[int]()
    left = [*range(30)]
    luck.shuffle(left)
    while left:
        some = [left.pop() for _ in range(min(len(left), luck.randint(1, 4)))]
        acknowledged.update(some)
        found = place.client.ack("trainer", some)
        low = next(n for n in range(31) if n not in acknowledged)
        assert (found.low, found.acknowledged) == (low, sorted(n for n in acknowledged if n > low))
        assert results(place) == 30 - len(acknowledged)
    with place.coordinator.owners.catalogue.reading() as cursor:
        assert cursor.execute("SELECT COUNT(*) FROM acks").fetchone() == (0,)


def test_only_what_was_accepted_is_acknowledged(place: Place) -> None:
    accept(place, 2)
    place.client.open_consumer("trainer")
    for wrong in ([2], [-1], [0, 1, 2], [1 << 80]):
        with pytest.raises(InputError, match="queue 'work' has accepted positions 0 to 1"):
            place.client.ack("trainer", wrong)
    assert place.client.consumer("trainer").low == 0
    for call in (place.client.consumer, lambda name: place.client.ack(name, [0])):
        with pytest.raises(InputError, match="no consumer 'nobody'"):
            call("nobody")


def test_a_result_goes_when_every_consumer_is_done_with_it(place: Place) -> None:
    refs = accept(place, 3)
    client = place.client
    assert results(place) == 3  # nobody reads yet: everything stays
    client.open_consumer("trainer")
    client.open_consumer("archive", start=1)
    client.ack("trainer", [0, 1])
    assert results(place) == 2
    client.ack("archive", [2])
    assert results(place) == 2
    client.ack("archive", [1])
    assert results(place) == 1
    client.ack("trainer", [2])
    assert results(place) == 0
    assert [receipt.result for receipt in client.log()] == refs  # the log still says what was accepted


def test_a_consumer_cannot_begin_before_what_is_there(place: Place) -> None:
    accept(place, 4)
    client = place.client
    client.open_consumer("trainer")
    client.ack("trainer", [0, 1])
    with pytest.raises(Collected, match="the result at position 1 was acknowledged by every consumer"):
        client.open_consumer("late", start=1)
    assert client.open_consumer("late").low == 2
    client.ack("trainer", [2, 3])
    client.ack("late", [2, 3])
    client.trim(3)
    assert client.open_consumer("last").low == 4
    for wrong in (-1, 5, 1 << 80):
        with pytest.raises(InputError, match="queue 'work' has positions 0 to 4"):
            client.open_consumer("other", start=wrong)


def test_state_moves_with_the_acknowledgement(place: Place) -> None:
    accept(place, 3)
    client = place.client
    client.open_consumer("trainer")
    saved = client.save("trainer", {"step": 1}, payload=place.publish("one"), positions=[0])
    assert (saved.low, saved.state) == (1, {"step": 1})
    assert saved.state_ref is not None
    assert place.read(saved.state_ref) == "one"
    assert client.ack("trainer", [1]).state == {"step": 1}
    with pytest.raises(InputError):
        client.save("trainer", {"step": 2}, positions=[1, 99])
    assert client.consumer("trainer").state == {"step": 1}
    assert results(place) == 1 + 1
    second = place.publish("two", saved.state_ref)
    client.save("trainer", {"step": 2}, payload=second)
    assert client.consumer("trainer").state_ref == second
    assert results(place) == 1 + 2  # the second state depends on the first
    client.save("trainer", None)
    assert client.consumer("trainer") == client.ack("trainer", [])
    assert client.consumer("trainer").state_ref is None
    assert results(place) == 1


def test_back_to_a_position_that_is_still_there(place: Place) -> None:
    accept(place, 5)
    client = place.client
    client.open_consumer("trainer")
    client.open_consumer("archive")
    client.ack("trainer", [0, 1, 2, 4])
    client.ack("archive", [0])
    rewound = client.rewind("trainer", 1)
    assert (rewound.low, rewound.acknowledged) == (1, [])
    with pytest.raises(Collected, match="position 0 was acknowledged by every consumer"):
        client.rewind("trainer", 0)
    for wrong in (2, -1, 1 << 80):
        with pytest.raises(InputError, match="consumer 'trainer' is at position 1"):
            client.rewind("trainer", wrong)
    client.ack("archive", [1, 2, 3, 4])
    assert results(place) == 4  # the rewound consumer needs them again
    client.ack("trainer", [1, 2, 3, 4])
    assert results(place) == 0


def test_not_back_past_what_was_let_go_further_on(place: Place) -> None:
    accept(place, 4)
    place.client.open_consumer("trainer")
    place.client.ack("trainer", [0, 2])
    with pytest.raises(Collected, match="position 2"):
        place.client.rewind("trainer", 1)
    place.client.trim(4)
    with pytest.raises(Collected, match="position 2"):
        place.client.rewind("trainer", 1)


def test_trim_forgets_what_was_let_go(place: Place) -> None:
    accept(place, 5)
    client = place.client
    client.open_consumer("trainer")
    assert client.trim(5) == 0
    client.ack("trainer", [0, 1, 3, 4])
    assert client.trim(4) == 3
    assert [receipt.position for receipt in client.log()] == [2, 4]
    assert client.stats().completed == 2
    assert client.task("task 0") is None
    assert client.submit([Task("task 0"), Task("task 2")]).added == 1
    assert client.complete(place.lease()).position == 5
    with pytest.raises(Collected):
        client.rewind("trainer", 0)


def test_a_closed_consumer_keeps_nothing(place: Place) -> None:
    client, refs = place.client, accept(place, 3)
    for name in ("trainer", "left behind"):
        client.open_consumer(name)
    client.save("left behind", {"n": 1}, payload=place.publish("state"))
    client.plan_batch("b", "left behind", [0], place.publish("plan"))
    client.ack("trainer", [0, 1])
    assert results(place) == len(refs) + 2
    assert client.close_consumer("left behind")
    assert not client.close_consumer("left behind")
    assert results(place) == 1
    with pytest.raises(InputError, match="left behind"):
        client.consumer("left behind")
    assert client.close_consumer("trainer")
    assert results(place) == 1  # nobody reads any more: what is there stays
