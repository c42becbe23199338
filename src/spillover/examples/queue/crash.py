"""A worker and the coordinator die in the middle, and nothing is lost or done twice.

python crash.py FOLDER
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from spillover.pool import Pool, Record
from spillover.queue import Client, Coordinator, Task, Yielded

TASKS, STEPS = 6, 4


def worker(folder: str, name: str, *, dies: bool) -> None:
    """Count to `STEPS` for every task, one step a lease; what is half counted goes back to the queue."""
    with Pool.open(folder, create=True) as pool, Coordinator(pool) as coordinator:
        queue = Client(coordinator, "counting")
        queue.create()
        queue.submit([Task(f"count:{number}") for number in range(TASKS)])
        handled = 0
        while leases := queue.acquire(name).leases:
            [lease] = leases
            step = pool.record(lease.input.at(0)).payload + 1 if lease.input else 1
            ref = pool.publish([Record("step", step)])
            if step == STEPS:
                receipt = queue.complete(lease, ref)
                print(f"{name}: {lease.task} accepted at position {receipt.position}", flush=True)
            else:
                queue.yield_tasks([Yielded(lease.number, lease.attempt, ref)])
            handled += 1
            if dies and handled == 10:
                queue.acquire(name, limit=2)  # these are lost with the process, and handed out again
                os.kill(os.getpid(), signal.SIGKILL)


def main(folder: str) -> None:
    here = [sys.executable, __file__, folder]
    killed = subprocess.run([*here, "first", "dies"])
    print("the first worker ended with", killed.returncode)
    with Pool.open(folder) as pool, Coordinator(pool) as coordinator:
        Client(coordinator, "counting").retire("first")  # or wait until its leases run out
    subprocess.run([*here, "second"], check=True)
    with Pool.open(folder) as pool, Coordinator(pool) as coordinator:
        log = Client(coordinator, "counting").log()
        assert [done.position for done in log] == [*range(TASKS)]
        print(len(log), "tasks, each accepted once")


if __name__ == "__main__":
    if len(sys.argv) > 2:
        worker(sys.argv[1], sys.argv[2], dies=len(sys.argv) > 3)
    else:
        main(sys.argv[1])
