"""Workers on many machines, through Ray: the coordinator is an actor, the payloads never pass through it.

python ray_workers.py FOLDER
"""

from __future__ import annotations

import os
import sys

import ray

from spillover.pool import Pool, Record, Ref
from spillover.queue import Client, Task
from spillover.queue.actor import start

WORKERS, TASKS = 2, 40


@ray.remote
def work(folder: str, actor: object, name: str) -> int:
    """Lease, compute, publish, complete, until nothing is left; returns how many tasks that was."""
    queue, count = Client(actor, "squares"), 0
    with Pool.open(folder) as pool:
        while leases := queue.acquire(name, limit=4).leases:
            for lease in leases:
                assert lease.input is not None
                number = pool.record(lease.input.at(0)).payload
                queue.complete(lease, pool.publish([Record("square", number**2)]))
                count += 1
    return count


def main(folder: str) -> None:
    ray.init(num_cpus=WORKERS, include_dashboard=False, configure_logging=False, log_to_driver=False)
    actor = start(folder, name="squares-coordinator", namespace="examples")
    queue = Client(actor, "squares")
    queue.create()
    with Pool.open(folder, create=True) as pool:
        inputs: list[Ref] = [pool.publish([Record("number", number)]) for number in range(TASKS)]
        queue.submit([Task(f"square:{number}", ref) for number, ref in enumerate(inputs)])
        counts = ray.get(
            [work.remote(folder, actor, f"worker-{number}-{os.getpid()}") for number in range(WORKERS)]
        )
        squares = sorted(
            pool.record(done.result.at(0)).payload for done in queue.log(limit=TASKS) if done.result
        )
        assert squares == [number**2 for number in range(TASKS)]
    print(sum(counts), "tasks by", WORKERS, "workers; each accepted once")
    ray.kill(actor)
    ray.shutdown()


if __name__ == "__main__":
    main(os.path.abspath(sys.argv[1]))
