"""A durable work queue in twenty lines. Kill it at any moment and run it again.

python work.py FOLDER
"""

from __future__ import annotations

import sys

from spillover.pool import Pool, Record
from spillover.queue import Client, Coordinator, Task

with Pool.open(sys.argv[1], create=True) as pool, Coordinator(pool) as coordinator:
    queue = Client(coordinator, "squares")
    queue.create()
    queue.submit([Task(f"square:{number}", metadata=number) for number in range(100)])  # again: nothing new
    while leases := queue.acquire("worker", limit=10).leases:
        for lease in leases:
            result = pool.publish([Record("square", lease.metadata**2)])
            queue.complete(lease, result)
    squares = {
        done.task: pool.record(done.result.at(0)).payload for done in queue.log(limit=100) if done.result
    }
    print(len(squares), "squares, the last is", squares["square:99"])
