"""Workers in processes of their own, to be killed and stopped: they work on a queue and record it.

Run as ``python tests/crew.py ORDERS``, where ``ORDERS`` is the JSON of `Orders`. A payload is a function of
its task's id, so that whoever reads it can tell whether it is whole.
"""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from history import Recorder, RecordingClient
from spillover.errors import SpillError, Stale
from spillover.pool import Pool, Reader, Record, Ref
from spillover.queue import Lease, Yielded


class Orders(msgspec.Struct, kw_only=True):
    """What a worker is to do.

    Attributes:
        addresses: of coordinators, any of which may answer.
        folder: for the history.
        mischief: share of tasks that are not completed but continued, failed or returned.
        bytes: size of a result.
        pause: seconds spent on a task.
    """

    name: str
    pool: str
    addresses: list[str]
    folder: str
    queue: str = "work"
    limit: int = 4
    mischief: float = 0.0
    bytes: int = 1000
    pause: float = 0.0
    pack_bytes: int = 1 << 18


class Worker:
    """A worker's process as a test sees it. A context manager: leaving it kills the process."""

    def __init__(self, orders: Orders, environment: dict[str, str] | None = None) -> None:
        self.orders = orders
        self.process = subprocess.Popen(
            [sys.executable, __file__, msgspec.json.encode(orders).decode()],
            stderr=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
        )

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(30)
        self.process.stderr.close()

    def finish(self, seconds: float) -> str:
        """Wait for it to find no more work; returns what it said on standard error."""
        _, errors = self.process.communicate(timeout=seconds)
        assert self.process.returncode == 0, errors.decode()
        return errors.decode()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *exc: object) -> None:
        if not self.process.stderr.closed:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()
            self.process.wait(30)
            self.process.stderr.close()


def content(task: str, size: int) -> bytes:
    """The payload that belongs to a task."""
    return random.Random(task).randbytes(size)


def require(reader: Reader, ref: Ref, task: str) -> None:
    """Read a payload and compare it."""
    records = reader.read(ref)
    data = records["data"].payload
    assert records["task"].payload == task
    assert data == content(task, len(data)), f"the payload of {task} is not what was published"


def publish(pool: Pool, task: str, size: int, *dependencies: Ref) -> Ref:
    return pool.publish(
        [Record("task", task), Record("data", content(task, size))], dependencies=dependencies
    )


def work(orders: Orders) -> None:
    chance = random.Random(orders.name)
    recorder = Recorder(Path(orders.folder), orders.name)
    with (
        Pool.open(orders.pool, pack_bytes=orders.pack_bytes) as pool,
        RecordingClient(orders.addresses, orders.queue, recorder=recorder, timeout=120) as client,
    ):
        while (found := client.acquire(orders.name, orders.limit)).status != "end":
            for lease in found.leases:
                with contextlib.suppress(Stale):
                    _do(orders, chance, pool, client, lease)
            if not found.leases:
                time.sleep(0.05)


def _do(orders: Orders, chance: random.Random, pool: Pool, client: RecordingClient, lease: Lease) -> None:
    if orders.pause:
        time.sleep(orders.pause)
    if chance.random() < orders.mischief:
        what = chance.choice(("yield", "fail", "release", "renew"))
        if what == "yield":
            ref = publish(pool, lease.task, orders.bytes // 2)
            client.yield_tasks([Yielded(lease.number, lease.attempt, ref, {"by": orders.name})])
        elif what == "fail":
            client.fail(lease, "chance")
        elif what == "release":
            client.release([lease])
        else:
            client.renew([lease])
        if what != "renew":
            return
    ref = publish(pool, lease.task, orders.bytes, *([lease.input] if lease.input else []))
    try:
        client.complete(lease, ref, metadata={"by": orders.name})
    except Stale:
        pool.settle([ref])  # nobody will ever own it
        raise


def main() -> None:
    try:
        work(msgspec.json.decode(sys.argv[1], type=Orders))
    except SpillError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        sys.exit(3)


if __name__ == "__main__":
    main()
