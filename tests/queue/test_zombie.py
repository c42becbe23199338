"""A worker that was declared dead, by its lease or by somebody, wakes up: it is refused, and harmless."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from serving import serving
from spillover.errors import Collected
from spillover.pool import Pool, Record, Ref
from spillover.queue import Client, Lease, Task

WORKER = """
import sys
from spillover.errors import SpillError
from spillover.pool import Pool, Record
from spillover.queue import Client
pool, address = sys.argv[1:]
with Pool.open(pool) as opened, Client(address, "work") as queue:
    (lease,) = queue.acquire("sleeper").leases
    print("leased", flush=True)
    sys.stdin.readline()
    ref = opened.publish([Record("text", b"by the sleeper")])
    print(ref, flush=True)
    for call in (
        lambda: queue.complete(lease, ref),
        lambda: queue.fail(lease, "slept"),
        lambda: queue.acquire("sleeper"),
    ):
        try:
            print("done", call(), flush=True)
        except SpillError as error:
            print(type(error).__name__, error, flush=True)
    print("renewed", queue.renew([lease]), "released", queue.release([lease]), flush=True)
    opened.settle([ref])
"""


@pytest.mark.parametrize("declared", ["by its lease", "by somebody"])
def test_a_stopped_worker_is_refused_when_it_wakes(tmp_path: Path, declared: str) -> None:
    lease_seconds = 0.5 if declared == "by its lease" else 300.0
    with (
        serving(tmp_path / "pool", lease_seconds=lease_seconds) as server,
        Pool.open(tmp_path / "pool") as pool,
        Client(server.address, "work") as queue,
    ):
        queue.create()
        queue.submit([Task("one")])
        sleeper = subprocess.Popen(
            [sys.executable, "-c", WORKER, str(tmp_path / "pool"), server.address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert sleeper.stdout.readline() == "leased\n"
            sleeper.send_signal(signal.SIGSTOP)
            if declared == "by somebody":
                assert queue.retire("sleeper") == 1
            lease = _eventually(lambda: queue.acquire("other").leases)
            accepted = pool.publish([Record("text", b"by the other")])
            receipt = queue.complete(lease, accepted)
            before = (queue.stats(), queue.task("one"), queue.log())
            sleeper.send_signal(signal.SIGCONT)
            told = sleeper.communicate("wake up\n", timeout=60)[0].splitlines()
        finally:
            sleeper.kill()
            sleeper.wait()
        late, answers = Ref.parse(told[0]), told[1:]
        why = "Stale attempt 1 at task 'one' is not current: the task is completed"
        assert [answer.startswith(why) for answer in answers[:2]] == [True, True], answers
        if declared == "by somebody":
            assert answers[2] == "Superseded worker 'sleeper' was retired"
        else:
            assert answers[2].startswith("done Acquired(leases=[], status='empty')")
        assert answers[3] == "renewed [False] released 0"
        assert (receipt.attempt, receipt.worker, receipt.result) == (2, "other", accepted)
        assert before == (queue.stats(), queue.task("one"), queue.log())
        assert (lease.failures, queue.task("one").failures) == ((1, 1) if lease_seconds < 1 else (0, 0))
        assert server.stop()[0] == 0
    _harmless(tmp_path / "pool", accepted, late)


def _eventually(look: Callable[[], list[Lease]]) -> Lease:
    end = time.monotonic() + 60
    while not (found := look()):
        assert time.monotonic() < end
        time.sleep(0.05)
    return found[0]


def _harmless(path: Path, accepted: Ref, late: Ref) -> None:
    """What it published goes with the next collection; what was accepted stays."""
    with Pool.open(path) as pool, pool.owners() as owners:
        owners.collect()
        assert pool.read(accepted)["text"].payload == b"by the other"
        with pytest.raises(Collected):
            pool.read(late)
