"""Eight workers and two coordinators, killed and stopped at random, and a check of all they were told.

Collection and compaction run meanwhile. ``SPILL_CAMPAIGN_SECONDS`` says for how long, ``SPILL_CAMPAIGN_SEED``
in which order.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import statistics
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from crew import Orders, Worker, publish, require
from history import Final, History, Recorder, RecordingClient, check
from serving import Options, Server, free_port
from spillover.errors import Collected
from spillover.pool import Pool
from spillover.queue import Client, Coordinator, Task
from spillover.queue import messages as m
from spillover.queue.audit import audit

SECONDS = float(os.environ.get("SPILL_CAMPAIGN_SECONDS", "20"))
SEED = int(os.environ.get("SPILL_CAMPAIGN_SEED", "0")) or time.time_ns() % 1_000_000
TASKS = int(SECONDS * 400)
"""More than they manage."""
WORKERS = 8
LEASE_SECONDS = 3.0
GAP_SECONDS = 30.0
PATIENCE = 5
"""How many times as long it may go on until enough has happened, on a slow machine."""
KEPT = 300
"""How many of the last results the consumer leaves unacknowledged."""


@dataclass
class Campaign:
    """Who is there, and what was done to them."""

    folder: Path
    stack: contextlib.ExitStack
    chance: random.Random
    workers: list[Worker] = field(default_factory=list)
    waking: list[tuple[float, Worker | Server]] = field(default_factory=list)
    did: Counter[str] = field(default_factory=Counter)
    killed: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ports = [free_port(), free_port()]
        self.active = self._server(0, standby=False).wait("ready")
        self.waiting = self._server(1, standby=True).wait("waiting")
        for _ in range(WORKERS):
            self._hire()

    @property
    def pool(self) -> str:
        return str(self.folder / "pool")

    def client(self, name: str) -> RecordingClient:
        recorder = Recorder(self.folder / "history", name)
        self.stack.callback(recorder.close)
        addresses = [f"http://127.0.0.1:{port}" for port in self.ports]
        return self.stack.enter_context(RecordingClient(addresses, "work", recorder=recorder, timeout=120))

    def go_on(self) -> None:
        """One more misfortune."""
        now = time.monotonic()
        for due, process in [*self.waking]:
            if due < now:
                self._wake(due, process)
        what = self.chance.choices(("kill", "stop", "coordinator", "pause"), (5, 3, 2, 1))[0]
        if what == "kill":
            self._kill_worker()
        elif what == "stop" and len(self.waking) < 3:
            self._stop(self.chance.choice(self.workers), LEASE_SECONDS + self.chance.uniform(0.5, 3))
        elif what == "coordinator" and not any(process is self.active for _, process in self.waking):
            self._kill_coordinator()
        elif what == "pause":
            self._stop(self.active, self.chance.uniform(0.1, 1.5))

    def end(self) -> None:
        """Wake everybody, and let the workers work on for a moment before they die."""
        for due, process in [*self.waking]:
            self._wake(due, process)
        time.sleep(1.0)
        for worker in self.workers:
            worker.kill()

    def _server(self, side: int, *, standby: bool) -> Server:
        options = Options(
            pool=self.pool,
            port=self.ports[side],
            standby=standby,
            lease_seconds=LEASE_SECONDS,
            maintain=1.0,
            pack_bytes=1 << 18,
            history=str(self.folder / "history"),
        )
        return self.stack.enter_context(Server(options))

    def _hire(self) -> None:
        self.did["hired"] += 1
        orders = Orders(
            name=f"w{self.did['hired']}",
            pool=self.pool,
            addresses=[f"http://127.0.0.1:{port}" for port in self.ports],
            folder=str(self.folder / "history"),
            mischief=0.1,
        )
        self.workers.append(self.stack.enter_context(Worker(orders)))

    def _kill_worker(self) -> None:
        worker = self.chance.choice(self.workers)
        worker.kill()
        self.workers.remove(worker)
        self.waking = [(due, process) for due, process in self.waking if process is not worker]
        self.did["workers killed"] += 1
        self._hire()

    def _kill_coordinator(self) -> None:
        self.killed.append(time.monotonic())
        self.active.kill()
        side = self.ports.index(self.active.options.port)
        self.active = self.waiting.wait("ready")
        self.waiting = self._server(side, standby=True).wait("waiting")
        self.did["coordinators killed"] += 1

    def _stop(self, process: Worker | Server, seconds: float) -> None:
        if not any(process is other for _, other in self.waking):
            process.signal(signal.SIGSTOP)
            self.waking.append((time.monotonic() + seconds, process))
            self.did["workers stopped" if isinstance(process, Worker) else "coordinators stopped"] += 1

    def _wake(self, due: float, process: Worker | Server) -> None:
        process.signal(signal.SIGCONT)
        self.waking.remove((due, process))


def test_nothing_is_lost_and_nothing_doubled(tmp_path: Path) -> None:
    print(f"seed {SEED}")
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(Pool.open(tmp_path / "pool", create=True, pack_bytes=1 << 18))
        campaign = Campaign(tmp_path, stack, random.Random(SEED))
        main = campaign.client("main")
        main.create()
        over, errors = threading.Event(), []
        threads = [
            threading.Thread(target=_told, args=(errors, do, over, campaign.client(do.__name__), pool))
            for do in (_submit, _consume)
        ]
        for thread in threads:
            thread.start()
        begun = time.monotonic()
        while not errors and not _enough(campaign, main, time.monotonic() - begun):
            time.sleep(campaign.chance.uniform(0.1, 1.0))
            campaign.go_on()
        over.set()
        campaign.end()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        seconds = time.monotonic() - begun
        status, complaints, _ = campaign.active.stop()
        assert (status, complaints, errors) == (0, "", [])
    _examine(tmp_path, campaign, seconds)


def _enough(campaign: Campaign, client: Client, seconds: float) -> bool:
    if seconds < SECONDS:
        return False
    happened = campaign.did["workers killed"] >= 3 and client.stats().completed > 3 * KEPT
    return happened or seconds > PATIENCE * SECONDS


def _told(errors: list[BaseException], do: object, over: threading.Event, client: Client, pool: Pool) -> None:
    try:
        do(over, client, pool)
    except BaseException as error:
        errors.append(error)


def _submit(over: threading.Event, client: Client, pool: Pool) -> None:
    """Keep the workers busy; every fourth task has an input."""
    number = client.cursor("p") or 0
    while number < TASKS and not over.is_set():
        if client.stats().pending > 500:
            over.wait(0.2)
            continue
        tasks = []
        for name in (f"task {n}" for n in range(number, number + 100)):
            ref = publish(pool, name, 500) if len(tasks) % 4 == 0 else None
            tasks.append(Task(name, ref, max_attempts=10_000))
        number += len(tasks)
        client.submit(tasks, producer="p", cursor=number)


def _consume(over: threading.Event, client: Client, pool: Pool) -> None:
    """Read what is accepted, and let most of it go."""
    reader = client.open_consumer("reader", start=0)
    while not over.wait(0.1):
        receipts = client.log(reader.low, 500)
        for receipt in receipts[:-KEPT]:
            with pool.reader() as session:
                require(session, receipt.result, receipt.task)
        if len(receipts) > KEPT:
            positions = [receipt.position for receipt in receipts[:-KEPT]]
            reader = client.save("reader", positions[-1], positions=positions)


def _examine(folder: Path, campaign: Campaign, seconds: float) -> None:
    """Everything that anybody was told, against the queue as it ended up."""
    history = History.read(folder / "history", "work")
    with Pool.open(folder / "pool") as pool, Coordinator(pool) as coordinator:
        client = Client(coordinator, "work")
        final = Final.of(client, consumers=["reader"], producers=["p"])
        tasks = {receipt.result: receipt.task for receipt in final.log}
        tasks |= {task.input: task.id for task in final.tasks if task.input is not None}
        with pool.reader() as reader:
            found = check(history, final, lambda ref: require(reader, ref, tasks[ref]))
            gone = sum(_gone(reader, receipt) for receipt in final.log)
        assert found == [], found[:20]
        assert audit(coordinator).problems == []
        packs = coordinator.owners.stats()
        coordinator.owners.collect()
    stale = [done.message for done in history.done if done.error == "Stale"]
    assert all("is not current: " in message or "no such attempt" in message for message in stale), stale
    gaps = _gaps(history, campaign.killed)
    ends = [done.end for done in history.of_kind(m.Complete) if done.ok]
    busy = max(ends) - history.done[0].begin
    print(
        f"{len(final.log)} of {len(final.tasks)} accepted in {busy:.0f} of {seconds:.0f} s, "
        f"{len(final.log) / busy:.0f} tasks/s; {dict(campaign.did)}; {len(stale)} stale calls refused; "
        f"gaps median {statistics.median(gaps):.2f} s, longest {max(gaps):.2f} s; "
        f"{gone} results collected, {packs.packs} packs, {packs.bytes} bytes, {packs.owned_bytes} owned"
    )
    assert max(gaps) < GAP_SECONDS
    assert len(final.log) > SECONDS * 5
    assert campaign.did["workers killed"] >= 3
    assert gone > 0, "the collector had nothing to do"
    if SECONDS >= 60:
        assert any("ran out" in message or "has attempt" in message for message in stale)


def _gone(reader: object, receipt: m.Receipt) -> bool:
    try:
        reader.read(receipt.result)
    except Collected:
        return True
    return False


def _gaps(history: History, killed: list[float]) -> list[float]:
    """Seconds from each kill to the first answer of the next coordinator."""
    ends = sorted(done.end for done in history.done if done.ok)
    gaps = [0.0]
    for kill in killed:
        opened = min(event.time for event in history.opened if event.time > kill)
        gaps.append(next(end for end in ends if end > opened) - kill)
    return gaps[1:] or gaps
