"""One side of `queue_vs_straw.py`, in a process of its own: ours, the peer, or bare SQLite.

It answers one JSON request a line, as `pool_side.py` does. All sides run the same loops over the same tasks;
what differs is the few lines that call a queue.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import resource
import sqlite3
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor


class Ours:
    """`spillover.queue` in process: one pool, one coordinator, one client."""

    def __init__(self, folder: str) -> None:
        from spillover.pool import Pool
        from spillover.queue import Client, Completion, Coordinator, Task

        self._task, self._completion = Task, Completion
        self.pool = Pool.open(folder, create=True)
        self.coordinator = Coordinator(self.pool)
        self.client = Client(self.coordinator, "rollout")
        self.client.create()

    def submit(self, names: Sequence[str]) -> None:
        self.client.submit([self._task(name) for name in names])

    def acquire(self, count: int) -> list:
        return self.client.acquire("worker", limit=count).leases

    def complete(self, leases: Sequence) -> None:
        self.client.complete_many([self._completion(lease.number, lease.attempt) for lease in leases])

    def close(self) -> None:
        self.coordinator.close()
        self.pool.close()


class OverHttp(Ours):
    """The same through ``spill queue serve``; its "folder" is an address and a token."""

    def __init__(self, folder: str) -> None:
        from spillover.queue import Client, Completion, Task

        url, token = folder.split()
        self._task, self._completion = Task, Completion
        self.client = Client(url, "rollout", token=token)

    def close(self) -> None:
        self.client.close()


class Peer:
    """`straw.Coordinator` over a store with its online collection."""

    def __init__(self, folder: str) -> None:
        import straw

        self._straw, self._count = straw, itertools.count()
        self._turn = threading.Lock()  # its store refuses a second call while one runs
        known = os.path.exists(f"{folder}/run.json")
        self.store = straw.SharedFilesystemStore(folder, "benchmark", online_gc=True)
        self.queue = straw.Coordinator(self.store, exclusive_owner="benchmark", recover=known)
        self._result = self.store.publish([straw.Record("result", b"r")], submission_id="result")

    def submit(self, names: Sequence[str]) -> None:
        tasks = [self._straw.TaskSpec(task_id=name, input_ref=None, allow_empty=True) for name in names]
        self.queue.submit_tasks(f"submit-{next(self._count)}-{os.getpid()}", tasks)

    def acquire(self, count: int) -> list:
        return [assignment.lease for assignment in self.queue.acquire("worker", max_tasks=count).assignments]

    def complete(self, leases: Sequence) -> None:
        for lease in leases:
            record = self._straw.Record(
                "result", b"r", metadata={"task_id": lease.task_id, "attempt_id": lease.attempt_id}
            )
            with self._turn:
                ref = self.store.publish([record], submission_id=lease.attempt_id)
            self.queue.complete_task(
                lease, submission_id=lease.attempt_id, result_ref=ref, result_digest=ref.digest
            )

    def close(self) -> None:
        self.store.close()


class Raw:
    """The three transitions as bare SQL: what SQLite itself can do with one table and one index."""

    def __init__(self, folder: str) -> None:
        os.makedirs(folder, exist_ok=True)
        self._lock = threading.Lock()
        self._base = sqlite3.connect(f"{folder}/raw.sqlite", isolation_level=None, check_same_thread=False)
        for pragma in ("locking_mode=EXCLUSIVE", "journal_mode=WAL", "synchronous=FULL"):
            self._base.execute(f"PRAGMA {pragma}")
        self._base.executescript(
            "CREATE TABLE IF NOT EXISTS tasks(id INTEGER PRIMARY KEY, name TEXT UNIQUE, status INTEGER);"
            "CREATE INDEX IF NOT EXISTS pending ON tasks(id) WHERE status = 0;"
        )

    def submit(self, names: Sequence[str]) -> None:
        rows = [(name,) for name in names]
        self._change("INSERT INTO tasks(name, status) VALUES(?, 0)", rows)

    def acquire(self, count: int) -> list:
        rows = self._base.execute(
            "SELECT id FROM tasks WHERE status = 0 ORDER BY id LIMIT ?", (count,)
        ).fetchall()
        self._change("UPDATE tasks SET status = 1 WHERE id = ?", rows)
        return rows

    def complete(self, leases: Sequence) -> None:
        self._change("UPDATE tasks SET status = 2 WHERE id = ?", leases)

    def _change(self, statement: str, rows: Sequence) -> None:
        with self._lock:
            self._base.execute("BEGIN IMMEDIATE")
            self._base.executemany(statement, rows)
            self._base.execute("COMMIT")

    def close(self) -> None:
        self._base.close()


MODULES = {"ours": "spillover.queue", "http": "spillover.queue", "peer": "straw", "raw": "sqlite3"}
"""What a side imports before its clock runs."""
SIDES = {"ours": Ours, "http": OverHttp, "peer": Peer, "raw": Raw}


class Calls:
    """What the benchmark may ask. Rates are tasks per second."""

    def __init__(self, side: str) -> None:
        self._make = SIDES[side]
        importlib.import_module(MODULES[side])
        self._names = (f"task-{os.getpid()}-{number}" for number in itertools.count())

    def open(self, folder: str) -> list[float]:
        """Seconds to open the queue, and megabytes that the process has grown by then."""
        before, start = _resident(), time.perf_counter()
        self._queue = self._make(folder)
        taken = time.perf_counter() - start
        return [taken, (_resident() - before) / 1e6]

    def close(self) -> None:
        self._queue.close()

    def fill(self, tasks: int, complete: bool = False) -> float:
        """Add so many tasks, and complete them if asked; megabytes of memory at the most."""
        for start in range(0, tasks, 1000):
            self._queue.submit([*itertools.islice(self._names, min(1000, tasks - start))])
            if complete:
                self._queue.complete(self._queue.acquire(1000))
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3

    def cycle(self, size: int, rounds: int) -> list[float]:
        """Rates of submitting, acquiring and completing in calls of ``size``."""
        rates = []
        names = [[*itertools.islice(self._names, size)] for _ in range(rounds)]
        rates.append(size * _rate([lambda part=part: self._queue.submit(part) for part in names]))
        leases: list = []
        rates.append(size * _rate([lambda: leases.append(self._queue.acquire(size))] * rounds))
        rates.append(size * _rate([lambda part=part: self._queue.complete(part) for part in leases]))
        return rates

    def acquire_one(self, calls: int) -> float:
        """Rate of acquiring one by one; the leases are then completed."""
        leases: list = []
        rate = _rate([lambda: leases.extend(self._queue.acquire(1))] * calls)
        self._queue.complete(leases)
        return rate

    def complete_one(self, calls: int, clients: int = 1) -> float:
        """Rate of completing one by one, by so many threads."""
        self._queue.submit([*itertools.islice(self._names, calls)])
        leases = self._queue.acquire(calls)
        with ThreadPoolExecutor(clients) as threads:
            start = time.perf_counter()
            done = [threads.submit(self._some, leases[number::clients]) for number in range(clients)]
            for each in done:
                each.result()
            return len(leases) / (time.perf_counter() - start)

    def _some(self, leases: Sequence) -> None:
        for lease in leases:
            self._queue.complete([lease])


def _rate(operations: Sequence[Callable[[], object]]) -> float:
    start = time.perf_counter()
    for operation in operations:
        operation()
    return len(operations) / (time.perf_counter() - start)


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def main() -> None:
    answers, calls = os.fdopen(os.dup(1), "w"), Calls(sys.argv[1])
    os.dup2(2, 1)  # whatever a queue prints is not an answer
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"value": getattr(calls, request.pop("call"))(**request)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
