"""The coordinator dies under load while another one stands by: on a local disk, on two mounts of a volume."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from crew import Orders, Worker, require
from history import Final, History, Recorder, RecordingClient, check
from pool.gluster import Volume
from serving import Options, Server, free_port, serving
from spillover.errors import LockContended, Unknown
from spillover.pool import Pool
from spillover.queue import Client, Task
from spillover.queue.standby import standby

GAP_SECONDS = 30.0
"""No gap lasts until a lease ends, however slow the machine is."""


class Place:
    """A pool as two machines see it, and who works there."""

    def __init__(self, here: Path, there: Path, history: Path) -> None:
        self.here, self.there, self.history = here, there, history
        self.ports = free_port(), free_port()
        self.stack = contextlib.ExitStack()

    @property
    def addresses(self) -> list[str]:
        return [f"http://127.0.0.1:{port}" for port in self.ports]

    def server(self, side: int, **options: object) -> Server:
        pool = (self.here, self.there)[side]
        options = {"history": str(self.history), **options}
        server = Server(Options(pool=str(pool), port=self.ports[side], **options))
        return self.stack.enter_context(server)

    def worker(self, name: str, side: int, **orders: object) -> Worker:
        pool = (self.here, self.there)[side]
        return self.stack.enter_context(
            Worker(
                Orders(
                    name=name,
                    pool=str(pool),
                    addresses=self.addresses,
                    folder=str(self.history),
                    **orders,
                )
            )
        )

    def client(self, name: str) -> RecordingClient:
        recorder = Recorder(self.history, name)
        self.stack.callback(recorder.close)
        return self.stack.enter_context(RecordingClient(self.addresses, "work", recorder=recorder))

    def check(self, client: Client) -> Final:
        """Nothing that was told can not have been."""
        final = Final.of(client)
        tasks = {receipt.result: receipt.task for receipt in final.log}
        with Pool.open(self.here) as pool, pool.reader() as reader:
            found = check(
                History.read(self.history, "work"), final, lambda ref: require(reader, ref, tasks[ref])
            )
        assert found == []
        return final


@pytest.fixture(params=["local", "gluster"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    here = there = tmp_path
    if request.param == "gluster":
        mounts = request.getfixturevalue("gluster")
        request.getfixturevalue("declared")
        here, there = (folder / tmp_path.name for folder in mounts)
        here.mkdir()
    place = Place(here / "pool", there / "pool", tmp_path / "history")
    with place.stack:
        yield place


@pytest.fixture
def declared(gluster: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    declare(gluster, tmp_path, monkeypatch)


def declare(mounts: tuple[Path, Path], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = mounts
    facts = {
        "profile": "gluster",
        "path": str(here),
        "peer": str(there),
        "client_version": "tested by test_qualify",
        "direct_mount": True,
        "writeback": False,
        "open_cache": 0,
        "readdir_cache": False,
        "locks": "seen",
        "durability_description": "one brick, a test",
    }
    (folder / "declaration.json").write_text(json.dumps(facts))
    monkeypatch.setenv("SPILL_STORAGE_DECLARATION", str(folder / "declaration.json"))


def test_a_standby_takes_over_under_load(place: Place) -> None:
    first = place.server(0).wait("ready")
    second = place.server(1, standby=True).wait("waiting")
    client = place.client("main")
    client.create()
    submitting = Submitting(place.client("submitter"), 10)
    client.submit([Task("kept")])
    (kept,) = client.acquire("slow", tasks=["kept"]).leases
    workers = [place.worker(f"w{number}", number % 2) for number in range(3)]
    _await(lambda: client.stats().completed > 50)

    killed = time.monotonic()
    first.kill()
    second.wait("ready")
    assert client.renew([kept]) == [True]
    gap = _gap(place, killed)
    _await(lambda: client.stats().completed > 200)
    assert client.stats().generation == 2

    submitting.end()
    receipt = client.complete(kept, metadata="after all")
    assert (receipt.task, receipt.attempt) == ("kept", 1)
    client.seal()
    for worker in workers:
        assert worker.finish(120) == ""
    final = place.check(client)
    assert final.stats.end
    assert {task.failures for task in final.tasks} == {0}, "a restart spent attempts"
    assert {task.attempt for task in final.tasks} <= {1, 2}
    print(f"gap {gap:.2f} s, {len(final.log)} accepted")
    assert gap < GAP_SECONDS
    assert second.stop()[0] == 0


def test_one_after_the_other(place: Place) -> None:
    """Five coordinators die, one after the other, on either side."""
    current = place.server(0).wait("ready")
    client = place.client("main")
    client.create()
    submitting = Submitting(place.client("submitter"), 5)
    workers = [place.worker(f"w{number}", number % 2) for number in range(2)]
    gaps = []
    for number in range(5):
        waiting = place.server(1 - number % 2, standby=True).wait("waiting")
        done = client.stats().completed
        _await(lambda done=done: client.stats().completed > done + 20)
        killed = time.monotonic()
        current.kill()
        current = waiting.wait("ready")
        client.renew([])
        gaps.append(_gap(place, killed))
    submitting.end()
    client.seal()
    for worker in workers:
        assert worker.finish(120) == ""
    final = place.check(client)
    assert final.stats.generation == 6
    assert {task.failures for task in final.tasks} == {0}
    print("gaps " + ", ".join(f"{gap:.2f}" for gap in gaps))
    assert max(gaps) < GAP_SECONDS


def test_a_stopped_coordinator_answers_nothing_when_it_wakes(place: Place) -> None:
    """SIGSTOP: it is alive, so who stands by waits. Who insists fences it off.

    On a local disk it still has the database, and who insists is refused. On a volume they get a copy of it.
    """
    first = place.server(0).wait("ready")
    client = place.client("main")
    client.create()
    client.submit([Task("before")])
    waiting = place.server(1, standby=True).wait("waiting")
    first.signal(signal.SIGSTOP)
    calls = [_in_background(place.client(f"c{number}"), f"during {number}") for number in range(4)]
    insisting = place.stack.enter_context(
        Server(Options(pool=str(place.there), port=free_port(), takeover=True))
    )
    if place.here == place.there:
        with pytest.raises(AssertionError, match="LockContended"):
            insisting.wait("ready")
    else:
        insisting.wait("ready").kill()
    assert b"ready" not in waiting.said
    first.signal(signal.SIGCONT)
    assert first.process.wait(60) == 0
    waiting.wait("ready")
    for thread in calls:
        thread.join(60)
        assert not thread.is_alive()
    assert client.stats().generation > 2
    final = place.check(client)
    assert {task.id for task in final.tasks} == {"before", *(f"during {number}" for number in range(4))}


def test_insisting_replaces_a_live_coordinator(place: Place) -> None:
    """It notices, gives way within seconds, and nothing that it acknowledged is lost."""
    first = place.server(0).wait("ready")
    client = place.client("main")
    client.create()
    submitting = Submitting(place.client("submitter"), 5)
    workers = [place.worker(f"w{number}", number % 2) for number in range(2)]
    _await(lambda: client.stats().completed > 20)
    begun = time.monotonic()
    second = place.server(1, takeover=True).wait("ready")
    print(f"taken over within {time.monotonic() - begun:.2f} s")
    assert first.process.wait(60) == 0
    done = client.stats().completed
    _await(lambda: client.stats().completed > done + 20)
    submitting.end()
    client.seal()
    for worker in workers:
        assert worker.finish(120) == ""
    assert {task.failures for task in place.check(client).tasks} == {0}
    assert second.stop()[0] == 0


class Submitting:
    """A thread that submits so many tasks at a time until it is told to end."""

    def __init__(self, client: Client, size: int) -> None:
        self._client, self._size = client, size
        self._over = threading.Event()
        self._errors: list[BaseException] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        number = 0
        try:
            while not self._over.wait(0.05):
                tasks = [Task(f"task {number + n}") for n in range(self._size)]
                number += self._size
                self._client.submit(tasks, producer="p", cursor=number)
        except BaseException as error:
            self._errors.append(error)

    def end(self) -> None:
        self._over.set()
        self._thread.join(90)
        assert not self._thread.is_alive()
        assert self._errors == []


def _gap(place: Place, killed: float) -> float:
    """Seconds from a kill to the first answer that a client got from the next coordinator."""
    history = History.read(place.history, "work")
    opened = min(event.time for event in history.opened if event.time > killed)
    ends = [done.end for done in history.done if done.ok and done.end > opened]
    return min(ends) - killed


def _await(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it does not get on"
        time.sleep(0.05)


def _in_background(client: Client, task: str) -> threading.Thread:
    thread = threading.Thread(target=lambda: client.submit([Task(task)]))
    thread.start()
    return thread


class Proxy:
    """Stands between a mount and its brick, so that the network between them can be cut."""

    def __init__(self, port: int) -> None:
        self._brick = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._open = True
        self._sockets: set[socket.socket] = set()
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        self._open = False
        for connection in [*self._sockets]:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def heal(self) -> None:
        self._open = True

    def close(self) -> None:
        self.cut()
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                if self._open:
                    brick = socket.create_connection(("127.0.0.1", self._brick))
                    for pair in ((client, brick), (brick, client)):
                        threading.Thread(target=self._pump, args=pair, daemon=True).start()
                else:
                    client.close()

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        self._sockets.add(source)
        with source, contextlib.suppress(OSError):
            while piece := source.recv(1 << 16):
                target.sendall(piece)
        self._sockets.discard(source)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def cut_off(
    gluster_volume: Volume, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Place, Proxy, Path]]:
    """Two mounts, the first of which can be cut off: a place, the proxy, and that mount."""
    proxy = Proxy(gluster_volume.port)
    with monkeypatch.context() as patch:
        patch.setattr(gluster_volume, "port", proxy.port)
        here = gluster_volume.mount()
    there = gluster_volume.mount()
    declare((here, there), tmp_path, monkeypatch)
    (there / tmp_path.name).mkdir()
    place = Place(here / tmp_path.name / "pool", there / tmp_path.name / "pool", tmp_path / "history")
    try:
        with place.stack:
            yield place, proxy, here
    finally:
        proxy.close()
        gluster_volume.unmount(here)
        gluster_volume.unmount(there)


@pytest.mark.parametrize("heals", [True, False], ids=["and comes back", "for good"])
def test_a_coordinator_that_is_cut_off_acknowledges_nothing_more(
    cut_off: tuple[Place, Proxy, Path], gluster_volume: Volume, heals: bool
) -> None:
    """Its machine loses the volume and with it its locks; perhaps it gets it back and could write again."""
    place, proxy, mount = cut_off
    old = place.server(0).wait("ready")
    client = place.client("main")
    client.create()
    client.submit([Task(f"before {number}") for number in range(20)])
    leases = client.acquire("slow", 20).leases
    for lease in leases[:10]:
        client.complete(lease, metadata="old")
    new = place.server(1, standby=True).wait("waiting")

    cut = time.monotonic()
    if heals:
        proxy.cut()
    else:
        gluster_volume.clients[mount].kill()
    new.wait("ready")
    for lease in leases[10:15]:
        client.complete(lease, metadata="new")
    gap = _gap(place, cut)
    assert client.stats().generation == 2
    proxy.heal()
    refused = _hammer(old)
    assert refused, "it ended before it was asked"
    assert old.process.wait(60) == 0, old.process.stderr.read()
    assert old.process.stderr.read() == b""

    for lease in leases[15:]:
        assert client.complete(lease, metadata="new").attempt == 1
    with Pool.open(place.there) as pool:
        names = sorted(path.name for path in pool.path.glob("catalogue-*.sqlite"))
    assert names == ["catalogue-000001.sqlite", "catalogue-000002.sqlite"]
    final = Final.of(client)
    assert check(History.read(place.history, "work"), final) == []
    assert not [task.id for task in final.tasks if task.id.startswith("late")]
    assert {task.failures for task in final.tasks} == {0}
    print(f"gap {gap:.2f} s; {len(refused)} calls refused by the old one: {sorted({*refused})}")
    assert gap < GAP_SECONDS


def _hammer(server: Server) -> list[str]:
    """Submit to this one server until it ends; it must acknowledge nothing. Returns what it said."""
    refused: list[str] = []
    with Client(server.address, "work", timeout=1) as client:
        while server.process.poll() is None and len(refused) < 1000:
            try:
                answer = client.submit([Task(f"late {len(refused)}")])
                raise AssertionError(f"acknowledged after the takeover: {answer}")
            except Unknown as error:
                refused.append(str(error).split(":")[-1].strip())
    return refused


def test_standing_by_ends_when_it_should(tmp_path: Path) -> None:
    """At its deadline, when it is told to, and as soon as the other one is gone."""
    with serving(tmp_path / "pool") as first, Pool.open(tmp_path / "pool") as pool:
        begun = time.monotonic()
        with pytest.raises(LockContended, match=f"process {first.process.pid} "):
            standby(pool, timeout=1.0)
        assert 0.5 < time.monotonic() - begun < 30

        stop, begun = threading.Event(), time.monotonic()
        timer = threading.Timer(0.5, stop.set)
        timer.start()
        with pytest.raises(LockContended):
            standby(pool, stop=stop)
        assert time.monotonic() - begun < 30
        timer.join()

        timer = threading.Timer(0.5, first.kill)
        timer.start()
        with standby(pool, timeout=60.0) as coordinator:
            assert coordinator.owners.generation == 2
        timer.join()
    assert [*(tmp_path / "pool" / "owner" / "owners").glob("*")] == []
