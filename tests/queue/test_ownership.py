"""The pool's collection while a queue lives: what the queue needs stays, everything else goes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from queued import SECONDS, Place
from spillover.errors import Collected, SpillError
from spillover.pool import Pool, Record, Ref
from spillover.queue import Client, Task, Yielded

PACK = 4096
"""Bytes of a pack, so that nearly every payload has one of its own."""
WEIGHT = "x" * PACK


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with Place(tmp_path / "pool", pack_bytes=PACK) as place:
        yield place
        place.account()


def heavy(place: Place, text: str, *dependencies: Ref) -> Ref:
    return place.publish(text + WEIGHT, *dependencies)


def collect(place: Place, *unwanted: Ref) -> None:
    """Give up what is unwanted, and collect."""
    place.pool.seal()
    place.pool.settle(unwanted)
    assert not place.coordinator.owners.collect().damaged


def there(place: Place, ref: Ref) -> bool:
    try:
        return place.read(ref).endswith(WEIGHT)
    except Collected:
        return False


def accepted(place: Place, result: Ref) -> int:
    place.client.submit([Task(f"task for {result}")])
    return place.client.complete(place.lease(), result).position


Step = Callable[[Place, Ref], object]


def _pending(place: Place, ref: Ref) -> None:
    place.client.submit([Task("one", input=ref)])


def _leased(place: Place, ref: Ref) -> None:
    _pending(place, ref)
    place.lease()


def _expired(place: Place, ref: Ref) -> None:
    _leased(place, ref)
    place.clock.pass_(SECONDS + 1)
    place.client.release([])


def _dead(place: Place, ref: Ref) -> None:
    _pending(place, ref)
    place.client.fail(place.lease(), "broken", retryable=False)


def _yielded(place: Place, ref: Ref) -> None:
    place.client.submit([Task("one")])
    lease = place.lease()
    place.client.yield_tasks([Yielded(lease.number, lease.attempt, ref)])


def _result(place: Place, ref: Ref) -> None:
    accepted(place, ref)
    place.client.open_consumer("trainer")


def _state(place: Place, ref: Ref) -> None:
    place.client.open_consumer("trainer")
    place.client.save("trainer", 1, payload=ref)


def _plan(place: Place, ref: Ref) -> None:
    place.client.open_consumer("trainer")
    place.client.plan_batch("batch", "trainer", [], ref)


def _ready(place: Place, ref: Ref) -> None:
    place.client.open_consumer("trainer")
    place.client.plan_batch("batch", "trainer", [])
    place.client.batch_ready("batch", ref)


def _checkpoint(place: Place, ref: Ref) -> None:
    _pending(place, ref)
    place.client.snapshot("then")
    place.client.cancel(["one"])


def _fork(place: Place, ref: Ref) -> None:
    _checkpoint(place, ref)
    place.client.fork("then", "fork")
    place.client.drop_checkpoint("then")


def _restored(place: Place, ref: Ref) -> None:
    _checkpoint(place, ref)
    place.client.restore("then")
    place.client.drop_checkpoint("then")


def _cancel(place: Place, ref: Ref) -> None:
    place.client.cancel(["one"])


def _complete(place: Place, ref: Ref) -> None:
    place.client.complete(place.lease())


def _finish(place: Place, ref: Ref) -> None:
    place.client.batch_ready("batch", place.client.batch("batch").ready)
    place.client.finish_batch("batch")


OWNERS: dict[str, tuple[Step, Step]] = {
    "pending": (_pending, _cancel),
    "pending, then done": (_pending, _complete),
    "leased": (_leased, _cancel),
    "expired": (_expired, _complete),
    "dead": (_dead, _cancel),
    "yielded": (_yielded, _complete),
    "result": (_result, lambda place, ref: place.client.ack("trainer", [0])),
    "state": (_state, lambda place, ref: place.client.save("trainer", 2)),
    "plan": (_plan, _finish),
    "ready": (_ready, _finish),
    "checkpoint": (_checkpoint, lambda place, ref: place.client.drop_checkpoint("then")),
    "fork": (_fork, lambda place, ref: place.client.on("fork").cancel(["one"])),
    "restored": (_restored, _cancel),
}
"""How a payload becomes owned, and how it is let go."""


@pytest.mark.parametrize("linked", [False, True], ids=["alone", "linked"])
@pytest.mark.parametrize("kind", OWNERS)
def test_what_is_owned_stays_and_then_goes(place: Place, kind: str, linked: bool) -> None:
    own, let_go = OWNERS[kind]
    below = [heavy(place, "below")] if linked else []
    ref, waste = heavy(place, "above", *below), heavy(place, "waste")
    own(place, ref)
    collect(place, waste, *below)
    place.coordinator.owners.compact(min_owned=1.0)
    assert there(place, ref)
    assert all(there(place, one) for one in below)
    assert not there(place, waste)
    place.restart()
    collect(place)
    assert there(place, ref)
    let_go(place, ref)
    place.account()
    assert place.owned() == set()
    collect(place)
    assert not there(place, ref)
    assert not any(there(place, one) for one in below)


def test_one_payload_of_many_owners_goes_with_the_last(place: Place) -> None:
    client, ref = place.client, heavy(place, "shared")
    client.submit([Task("one", input=ref), Task("two", input=ref.at(0))])
    one, two = client.acquire("worker", 2).leases
    client.open_consumer("trainer")
    client.complete(one, ref)
    client.save("trainer", 1, payload=ref)
    client.snapshot("then")
    for step in (
        lambda: client.complete(two),
        lambda: client.ack("trainer", [0, 1]),
        lambda: client.drop_checkpoint("then"),
    ):
        step()
        collect(place)
        assert there(place, ref)
    client.save("trainer", 2)
    collect(place)
    assert not there(place, ref)


def test_what_is_gone_is_not_submitted(place: Place) -> None:
    waste = heavy(place, "waste")
    collect(place, waste)
    place.client.submit([Task("one")])
    lease = place.lease()
    place.client.open_consumer("trainer")
    for call in (
        lambda: place.client.submit([Task("two"), Task("three", input=waste)]),
        lambda: place.client.complete(lease, waste),
        lambda: place.client.yield_tasks([Yielded(lease.number, lease.attempt, waste)]),
        lambda: place.client.save("trainer", 1, payload=waste, positions=[]),
        lambda: place.client.plan_batch("batch", "trainer", [], waste),
    ):
        with pytest.raises(Collected):
            call()
        place.account()
    assert place.client.renew([lease]) == [True]
    assert place.client.complete(lease).position == 0


def test_a_payload_of_another_pool_is_refused(place: Place, tmp_path: Path) -> None:
    with Pool.open(tmp_path / "other", create=True) as other:
        foreign = other.publish([Record("text", b"foreign")])
    with pytest.raises(SpillError):
        place.client.submit([Task("one", input=foreign)])
    assert place.client.stats().pending == 0


def test_only_the_call_that_hands_over_settles(place: Place) -> None:
    """What a worker published stays until somebody owns it, and a refused call owns nothing."""
    ref = heavy(place, "result")
    place.client.submit([Task("one")])
    lease = place.lease()
    place.client.cancel(["one"])
    with pytest.raises(SpillError):
        place.client.complete(lease, ref)
    collect(place)
    assert there(place, ref)
    place.client.submit([Task("two")])
    place.client.open_consumer("trainer")
    Client(place.coordinator, "work").complete(place.lease(), ref)
    collect(place)
    assert there(place, ref)
    place.client.ack("trainer", [0])
    collect(place)
    assert not there(place, ref)
