"""One fenced owner, shown with real processes on a local disk and on S3."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from spillover.errors import LockContended, Mismatch, NotAllowed, StoreError, StoreRefused, Superseded
from spillover.state import State
from spillover.store import LocalStore, MemoryStore, open_store
from state.worker import IDENTITY, Worker

Start = Callable[..., Worker]
PATIENCE = 60.0
"""Seconds that a machine under load may need for what takes a moment."""


@pytest.fixture
def start() -> Iterator[Start]:
    workers: list[Worker] = []

    def begin(uri: str, lease: float = 3.0, **options: bool) -> Worker:
        workers.append(Worker(uri, lease, **options))
        return workers[-1]

    yield begin
    for worker in workers:
        worker.end()


def step(uri: str) -> int:
    document = State(open_store(uri)).read()
    assert document is not None
    return document.current["ckpt"].step


def test_of_two_that_start_at_once_one_works_and_the_other_says_who(durable_uri: str, start: Start) -> None:
    workers = [start(durable_uri), start(durable_uri)]
    heard = [worker.hear() for worker in workers]
    owners = [worker for worker, line in zip(workers, heard, strict=True) if line == "owned 1"]
    assert len(owners) == 1, heard
    refusal = next(line for line in heard if not line.startswith("owned"))
    assert f"owned by process {owners[0].process.pid} on {socket.gethostname()}, which is alive" in refusal
    assert "--takeover" in refusal
    assert owners[0].ask("publish 1") == "ok"


def test_a_killed_owners_work_is_taken_over(durable_uri: str, start: Start) -> None:
    local = not durable_uri.startswith("s3:")
    lease = 600 if local else 2.0
    first = start(durable_uri, lease)
    assert first.hear() == "owned 1"
    assert first.ask("publish 1") == "ok"
    first.process.kill()
    first.process.wait()
    before = time.monotonic()
    second = start(durable_uri, lease)
    assert second.hear() == "owned 2"
    waited = time.monotonic() - before
    assert waited < PATIENCE if local else waited > 2.0
    assert second.ask("publish 2") == "ok"
    assert step(durable_uri) == 2


def test_a_paused_owner_that_wakes_cannot_publish(durable_uri: str, start: Start) -> None:
    local = not durable_uri.startswith("s3:")
    first = start(durable_uri)
    assert first.hear() == "owned 1"
    assert first.ask("publish 1") == "ok"
    os.kill(first.process.pid, signal.SIGSTOP)
    second = start(durable_uri, takeover=local)  # its lock is held for as long as it lives
    assert second.hear() == "owned 2"
    assert second.ask("publish 2") == "ok"
    before = tree(durable_uri)
    os.kill(first.process.pid, signal.SIGCONT)
    assert first.ask("publish 3").startswith("Superseded: generation 1 lost the work")
    assert first.ask("check").startswith("Superseded")
    assert first.ask("release") == "ok"
    after = tree(durable_uri)
    assert {key: after.get(key) for key in before} == before
    assert all("step-000000003-g000001" in key for key in after.keys() - before.keys())
    assert step(durable_uri) == 2


def test_a_fenced_owner_notices_without_publishing(tmp_path: Path, start: Start) -> None:
    first = start(str(tmp_path))
    assert first.hear() == "owned 1"
    assert start(str(tmp_path), takeover=True).hear() == "owned 2"
    deadline = time.monotonic() + PATIENCE
    while (heard := first.ask("check")) == "ok" and time.monotonic() < deadline:
        time.sleep(0.1)
    assert heard.startswith("Superseded")


def test_a_live_owner_keeps_the_work_for_many_leases(s3: Callable[[], str], start: Start) -> None:
    uri = s3()
    first = start(uri, 2.0)
    assert first.hear() == "owned 1"
    for _ in range(2):
        assert start(uri, 2.0).hear().startswith("LockContended")
    assert first.ask("check") == "ok"
    assert first.ask("publish 1") == "ok"


def test_an_owner_that_hears_nothing_for_a_lease_stops(tmp_path: Path) -> None:
    class Unplugged(MemoryStore):
        down = False

        def replace(self, key: str, data: bytes, version: str) -> str:
            if self.down:
                raise StoreError("the network is gone")
            return super().replace(key, data, version)

    store = Unplugged()
    with State(store, lease_seconds=0.3).acquire(IDENTITY) as owned:
        time.sleep(0.5)
        owned.check()
        store.down = True
        time.sleep(0.7)
        with pytest.raises(Superseded, match="could not be renewed"):
            owned.check()
        store.down = False
        owned.check()  # nobody took over meanwhile, so it may go on


def test_released_work_is_free_at_once(durable_uri: str, start: Start) -> None:
    first = start(durable_uri, 600)
    assert first.hear() == "owned 1"
    assert first.ask("publish 1") == "ok"
    assert first.ask("release") == "ok"
    assert start(durable_uri, 600).hear() == "owned 2"


def test_other_work_is_refused_and_nothing_changes(durable_uri: str) -> None:
    state = State(open_store(durable_uri))
    with state.acquire({"learning_rate": 1e-4, "seed": 0}):
        pass
    before = tree(durable_uri)
    with pytest.raises(Mismatch, match=r"learning rate was 0\.0001, now 0\.0002"):
        state.acquire({"learning_rate": 2e-4, "seed": 0})
    with pytest.raises(Mismatch, match="dropout was unset, now 0"):
        state.acquire({"learning_rate": 1e-4, "seed": 0, "dropout": 0})
    with pytest.raises(Mismatch, match="seed was 0, now unset"):
        state.acquire({"learning_rate": 1e-4})
    assert tree(durable_uri) == before


def test_completed_work_is_read_only(durable_uri: str) -> None:
    state = State(open_store(durable_uri))
    with state.acquire(IDENTITY) as owned:
        owned.complete({"rows": 3})
    before = tree(durable_uri)
    with pytest.raises(NotAllowed, match="completed"):
        state.acquire(IDENTITY, takeover=True)
    with pytest.raises(NotAllowed, match="completed"):
        state.quiesce("stop")
    assert tree(durable_uri) == before


def test_anybody_can_ask_the_owner_to_stop(durable_uri: str, start: Start) -> None:
    worker = start(durable_uri)
    assert worker.hear() == "owned 1"
    assert worker.ask("asked") == "no"
    State(open_store(durable_uri)).quiesce("moving to another machine")
    deadline = time.monotonic() + PATIENCE
    while (heard := worker.ask("asked")) == "no" and time.monotonic() < deadline:
        time.sleep(0.1)
    assert heard == f"moving to another machine (asked from {socket.gethostname()})"
    assert worker.ask("publish 1") == "ok"


def test_locks_of_dead_owners_are_cleared(tmp_path: Path, start: Start) -> None:
    for generation in (1, 2, 3):
        worker = start(str(tmp_path))
        assert worker.hear() == f"owned {generation}"
        worker.process.kill()
        worker.process.wait()
    with State(open_store(tmp_path)).acquire(IDENTITY):
        assert len([*(tmp_path / "owners").iterdir()]) == 1
    assert not (tmp_path / "owners").exists() or not [*(tmp_path / "owners").iterdir()]


def test_a_thread_of_this_process_is_a_rival_too(tmp_path: Path) -> None:
    state = State(LocalStore(tmp_path))
    with state.acquire(IDENTITY), pytest.raises(LockContended, match=str(os.getpid())):
        state.acquire(IDENTITY)


def tree(uri: str) -> dict[str, bytes]:
    """Every key and value, less the lock files of live owners."""
    store = open_store(uri)
    return {e.key: store.read(e.key).data for e in store.list() if not e.key.startswith("owners/")}


def test_a_challenger_goes_by_the_lease_of_the_present_owner() -> None:
    """Not by its own, nor by that of whoever created the state."""
    store = MemoryStore()
    State(store, lease_seconds=0.2).acquire(IDENTITY).release()
    with State(store, lease_seconds=6).acquire(IDENTITY) as owned:
        assert owned.document.lease_seconds == 6

        def waiting(_: object, seconds: float) -> None:
            assert seconds > 5
            raise InterruptedError

        with pytest.raises(InterruptedError):
            State(store, lease_seconds=0.2).acquire(IDENTITY, waiting=waiting)
        owned.check()


def test_a_place_is_judged_at_every_acquisition(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = State(open_store(tmp_path))
    state.acquire(IDENTITY).release()
    before = tree(str(tmp_path))
    monkeypatch.setattr("spillover.store.filesystem.filesystem", lambda _: "nfs4")
    with pytest.raises(StoreRefused, match="nfs4"):
        state.acquire(IDENTITY)
    assert tree(str(tmp_path)) == before


def test_what_a_killed_probe_left_is_swept(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.write(".probe-0123456789ab", b"0")
    State(store).acquire(IDENTITY).release()
    assert [entry.key for entry in store.list()] == ["control.json"]
