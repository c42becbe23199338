"""The same queue over every transport: in this process, over HTTP, through a Ray actor."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from serving import Options, Server, free_port
from spillover.errors import (
    Collected,
    Conflict,
    Full,
    InputError,
    NotAllowed,
    SpillError,
    Stale,
    StoreFull,
    Superseded,
    Unknown,
)
from spillover.pool import Pool, Record, Ref
from spillover.queue import PARTIAL, Client, Coordinator, Task, Yielded
from spillover.queue import messages as m
from spillover.queue.transport import answer_wire, told

COUNT = itertools.count()
TRANSPORTS = ["local", "http", pytest.param("ray", marks=pytest.mark.slow)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("transports")


@pytest.fixture(scope="module")
def local(folder: Path) -> Iterator[Coordinator]:
    with Pool.open(folder / "local", create=True) as pool, Coordinator(pool) as coordinator:
        yield coordinator


@pytest.fixture(scope="module")
def http(folder: Path) -> Iterator[str]:
    with Server(Options(pool=str(folder / "http"), port=free_port())) as server:
        yield server.wait("ready").address


@pytest.fixture(scope="module")
def ray(folder: Path) -> Iterator[Any]:
    ray = pytest.importorskip("ray")
    from spillover.queue.actor import start

    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=80 << 20)
    try:
        actor = start(folder / "ray", name="coordinator")
        yield actor
        ray.kill(actor)
    finally:
        ray.shutdown()


@pytest.fixture(params=TRANSPORTS)
def target(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


@pytest.fixture
def pool(folder: Path, request: pytest.FixtureRequest) -> Iterator[Pool]:
    with Pool.open(folder / request.node.callspec.params["target"], create=True) as pool:
        yield pool


@pytest.fixture
def client(target: Any) -> Iterator[Client]:
    with Client(target, f"queue {next(COUNT)}", timeout=30) as client:
        client.create()
        yield client


def publish(pool: Pool, text: str) -> Ref:
    return pool.publish([Record("text", text.encode())])


def test_a_task_from_beginning_to_end(client: Client, pool: Pool) -> None:
    begin, middle, result = (publish(pool, text) for text in ("begin", "middle", "result"))
    metadata = {"unicode": "ü", "nested": [1, None, {"x": 0.5}], "large": 1 << 62}
    submitted = client.submit(
        [Task("one", input=begin, metadata=metadata, rank=-3), Task("two", lane="other", max_attempts=1)],
        producer="reader",
        cursor={"row": 2},
    )
    assert submitted.added == 2
    assert client.submit([Task("two", lane="other", max_attempts=1)]).added == 0
    assert client.cursor("reader") == {"row": 2}
    acquired = client.acquire("me", 5)
    (lease,) = acquired.leases
    assert (acquired.status, lease.input, lease.metadata, lease.rank) == ("acquired", begin, metadata, -3)
    assert client.acquire("me").status == "empty"
    assert client.renew([lease]) == [True]
    assert client.yield_tasks([Yielded(lease.number, lease.attempt, middle, {"tokens": 9})]) == 1
    assert client.renew([lease]) == [False]
    (lease,) = client.acquire("me", prefix="on", tasks=["one"]).leases
    assert (lease.attempt, lease.stage, lease.input, lease.metadata) == (2, PARTIAL, middle, {"tokens": 9})
    receipt = client.complete(lease, result, metadata=[1, 2])
    assert (receipt.position, receipt.task, receipt.result, receipt.metadata) == (0, "one", result, [1, 2])
    assert client.complete(lease, result, metadata=[1, 2]) == receipt
    assert client.log() == [receipt]
    (lease,) = client.acquire("me", lane="other").leases
    assert client.fail(lease, "broken") is True
    assert [task.failure for task in client.tasks("dead")] == ["broken"]
    assert client.retry(["two"]) == 1
    assert client.release(client.acquire("me", lane="other").leases) == 1
    assert client.cancel(["two", "nobody"]) == 1
    client.seal()
    assert client.acquire("me").status == "end"
    stats = client.stats()
    assert (stats.completed, stats.cancelled, stats.positions, stats.end) == (1, 1, 1, True)
    assert client.task("nobody") is None


def test_consumers_and_batches(client: Client, pool: Pool) -> None:
    client.submit([Task(f"task {n}") for n in range(4)])
    for lease in client.acquire("me", 4).leases:
        client.complete(lease, publish(pool, lease.task))
    assert client.open_consumer("trainer").low == 0
    state, plan, ready = (publish(pool, text) for text in ("state", "plan", "ready"))
    saved = client.save("trainer", {"step": 1}, payload=state, positions=[0, 2])
    assert (saved.low, saved.acknowledged, saved.state, saved.state_ref) == (1, [2], {"step": 1}, state)
    assert client.consumer("trainer") == saved
    assert client.plan_batch("batch", "trainer", [1], plan).plan == plan
    assert client.batch_ready("batch", ready).ready == ready
    assert client.batch("batch").status == "ready"
    assert client.finish_batch("batch").status == "finished"
    assert client.ack("trainer", [3]).low == 4
    assert client.trim(2) == 2
    assert [receipt.position for receipt in client.log(0, limit=1)] == [2]


def test_checkpoints(client: Client) -> None:
    client.submit([Task("one"), Task("two")])
    lease = client.acquire("me").leases[0]
    info = client.snapshot(client.queue)
    assert (info.name, info.queue, info.tasks) == (client.queue, client.queue, 2)
    assert client.checkpoints() == [info]
    fork = client.fork(client.queue, f"{client.queue} fork")
    assert fork.stats().pending == 2
    client.restore(client.queue)
    with pytest.raises(Stale):
        client.complete(lease)
    assert client.drop_checkpoint(client.queue) is True
    assert client.drop_checkpoint(client.queue) is False


def test_a_refusal_is_the_same_everywhere(client: Client, pool: Pool) -> None:
    client.submit([Task("one", metadata=1), Task("two")])
    lease = client.acquire("me", tasks=["two"]).leases[0]
    receipt = client.complete(lease)
    client.open_consumer("trainer")
    client.ack("trainer", [receipt.position])
    client.retire("old")
    client.cancel(["none"], key="key")
    client.limit(unfinished=1)
    gone = Ref(publish(pool, "x").pool, 12345 << 24, 64, 128, 1)
    refusals: list[tuple[type[SpillError], str, Callable[[], object]]] = [
        (
            Conflict,
            "task 'one' was submitted before with other content",
            lambda: client.submit([Task("one")]),
        ),
        (Conflict, "request 'key' was answered before", lambda: client.cancel(["other"], key="key")),
        (
            Stale,
            "attempt 1 at task 'two' is not current: the task is completed",
            lambda: client.fail(lease, "x"),
        ),
        (Full, "has 1 unfinished tasks and may have 1", lambda: client.submit([Task("three")])),
        (Superseded, "worker 'old' was retired", lambda: client.acquire("old")),
        (InputError, "acquire asks for 0 tasks", lambda: client.acquire("me", 0)),
        (InputError, "there is no queue 'nowhere'", lambda: client.on("nowhere").stats()),
        (InputError, "there is no queue 'nowhere'", lambda: client.on("nowhere").seal()),
        (NotAllowed, "there is a queue", lambda: (client.snapshot("c"), client.fork("c", client.queue))),
        (Collected, "the result at position 0 was acknowledged", lambda: client.rewind("trainer", 0)),
        (Collected, "", lambda: (client.limit(), client.submit([Task("three", input=gone)]))),
    ]
    for kind, words, call in refusals:
        with pytest.raises(SpillError) as caught:
            call()
        assert type(caught.value) is kind
        assert words in str(caught.value)
    client.drop_checkpoint("c")
    with pytest.raises(Superseded) as caught:
        client.acquire("old")
    assert caught.value.hint == "start it again under a new name"


def test_keys(client: Client) -> None:
    client.submit([Task(f"task {n}", max_attempts=1) for n in range(3)])
    first = client.acquire("me", key="a")
    assert client.acquire("me", key="a") == first
    assert client.fail(first.leases[0], "broken", key="b") is client.fail(first.leases[0], "broken", key="b")
    client.snapshot(client.queue, key="c")
    name = f"{client.queue} fork"
    assert (
        client.fork(client.queue, name, key="d").stats() == client.fork(client.queue, name, key="d").stats()
    )
    assert (
        client.drop_checkpoint(client.queue, key="e") is client.drop_checkpoint(client.queue, key="e") is True
    )


def test_many_threads_share_a_client(client: Client) -> None:
    client.submit([Task(f"task {n}") for n in range(200)])
    errors: list[BaseException] = []

    def work(name: str) -> None:
        try:
            while leases := client.acquire(name, 7).leases:
                for lease in leases:
                    client.complete(lease, metadata=name)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(f"worker {n}",)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors
    log = client.log(0, 1000)
    assert [receipt.position for receipt in log] == [*range(200)]
    assert {receipt.task for receipt in log} == {f"task {n}" for n in range(200)}


class Lossy:
    """A coordinator behind a network that loses answers, and delivers some calls once more, later."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self.lose = 0
        self.late: list[m.Call] = []

    lossy = True

    def call(self, call: m.Call, timeout: float) -> Any:
        answer = self._coordinator.call(call)
        self.late.append(call)
        if self.lose:
            self.lose -= 1
            raise Unknown("lost on the way")
        return answer

    def deliver_again(self) -> None:
        for call in self.late:
            try:
                self._coordinator.call(call)
            except SpillError as error:
                assert isinstance(error, Stale)

    def close(self) -> None: ...


@pytest.fixture
def lossy(local: Coordinator) -> Iterator[tuple[Client, Lossy]]:
    network = Lossy(local)
    with Client(local, f"queue {next(COUNT)}") as client:
        client.create()
        client._transports = [network]
        yield client, network


def test_a_lost_answer_is_asked_for_again(lossy: tuple[Client, Lossy]) -> None:
    client, network = lossy
    calls: list[tuple[Callable[[], Any], Callable[[Any], bool]]] = [
        (lambda: client.submit([Task("one"), Task("two")], producer="p", cursor=1), lambda a: a.added == 2),
        (lambda: client.acquire("me"), lambda a: a.leases[0].task == "one"),
        (lambda: client.retire("me"), lambda a: a == 1),
        (lambda: client.cancel(["two"]), lambda a: a == 1),
        (lambda: client.open_consumer("trainer"), lambda a: a.low == 0),
        (lambda: client.snapshot(client.queue), lambda a: a.tasks == 1),
        (lambda: client.fork(client.queue, f"{client.queue} fork").stats(), lambda a: a.pending == 1),
        (lambda: client.drop_checkpoint(client.queue), lambda a: a is True),
    ]
    for call, wanted in calls:
        network.lose = 2
        assert wanted(call())
        assert network.lose == 0
    stats = client.stats()
    assert (stats.pending, stats.leased, stats.cancelled) == (1, 0, 1)


def test_what_comes_late_sets_nothing_back(lossy: tuple[Client, Lossy], local: Coordinator) -> None:
    """A try that was given up may still arrive, behind everything that was done since."""
    client, network = lossy
    client.submit([Task("one")], producer="p", cursor=1)
    client.submit([Task("two")], producer="p", cursor=2)
    client.open_consumer("trainer")
    one, two = client.acquire("me", 2).leases
    client.complete(one)
    client.complete(two)
    client.save("trainer", "first", positions=[0])
    client.save("trainer", "second")
    client.open_consumer("archive", start=1)
    client.ack("archive", [1])
    client.rewind("archive", 1)
    before = (client.stats(), client.cursor("p"), client.consumer("trainer"), client.consumer("archive"))
    network.deliver_again()
    network.deliver_again()
    assert before == (
        client.stats(),
        client.cursor("p"),
        client.consumer("trainer"),
        client.consumer("archive"),
    )
    assert client.cursor("p") == 2
    assert client.consumer("trainer").state == "second"
    assert client.consumer("archive").low == 1


def test_a_call_without_an_answer_is_given_up(lossy: tuple[Client, Lossy]) -> None:
    client, network = lossy
    client.timeout, network.lose = 0.2, 1 << 30
    with pytest.raises(Unknown, match=r"lost on the way; given up after 0\.2 s"):
        client.submit([Task("one")])
    network.lose = 0
    assert client.stats().pending == 1  # it happened all the same


def test_errors_travel_with_class_message_and_hint() -> None:
    error = told(StoreFull("no space left", hint="free some"))
    assert (error.error, error.message, error.hint) == ("StoreFull", "no space left", "free some")


def test_what_is_no_call_is_refused(local: Coordinator) -> None:
    for body in (b"", b"\xff", b"\x80", b"\x81\xa4type\xa6Nobody"):
        ok, answer = answer_wire(local, body)
        assert not ok
        assert b"InputError" in answer


def test_a_client_says_what_it_cannot_use() -> None:
    for target in (None, 5, [], "https://host:1", "host:1"):
        with pytest.raises(InputError, match="is no"):
            Client(target)
