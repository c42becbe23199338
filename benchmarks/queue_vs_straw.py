"""The queue beside the peer and beside bare SQLite, on the same tasks in one run.

The peer (PyPI `straw-queue`) runs in process with its online collection. Its results have to be published
before they are completed, one a task; its rate of completing includes that, and it has no form for many. Raw
is one table and one index in SQLite with the same durability: no leases, no receipts, no ownership. The sides
take turns, one round each. The 15 ms are added to every sync by `slow_sync.c`, on all sides.

    python benchmarks/queue_vs_straw.py [--quick] [--json FILE]

It prints medians and, last, what ours is to reach; missing that fails nothing. ``--quick`` runs one round
each, and leaves out the million tasks and the peer's hundred thousand completed ones.
"""

from __future__ import annotations

import contextlib
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from peer import Process, environment
from report import Report, arguments

HERE = Path(__file__).parent
SIDES = ("ours", "peer", "raw")
SLOW_MS = 15
AT_LEAST = {
    "submit, in hundreds": 100_000,
    "acquire, in hundreds": 100_000,
    "complete, in hundreds": 100_000,
    "complete one at a time": 2500,
    "complete, 8 clients": 8000,
    "acquire one of 100,000": 3000,
    "15 ms sync: complete, 8 clients": 500,
}
AT_MOST = {
    "open, 1,000,000 pending": 50,
    "memory, 1,000,000 pending": 150,
    "open, 100,000 completed": 50,
    "memory, 100,000 completed": 150,
}


class Bench:
    """A scratch folder, the sides' commands, and how many rounds."""

    def __init__(self, scratch: Path, quick: bool) -> None:
        self.scratch, self.quick, self.rounds = scratch, quick, 1 if quick else 5
        self.python = {"ours": sys.executable, "peer": environment(), "raw": sys.executable}

    @contextlib.contextmanager
    def process(self, side: str, folder: str, settings: dict[str, str] | None = None):
        with Process(self.python[side], HERE / "queue_side.py", side, settings=settings) as process:
            process.ask("open", folder=str(self.scratch / f"{side}-{folder}"))
            yield process

    def opening(self, side: str, folder: str) -> float:
        """Milliseconds that a process takes to open what is there."""
        opened = []
        for _ in range(1 if self.quick else 3):
            with Process(self.python[side], HERE / "queue_side.py", side) as process:
                opened.append(process.ask("open", folder=str(self.scratch / f"{side}-{folder}"))[0])
                process.ask("close")
        return 1e3 * statistics.median(opened)

    def medians(self, processes: dict[str, Process], ask) -> dict[str, list[float]]:
        """Medians, figure by figure, of rounds in which every side takes its turn."""
        rounds = [{side: ask(process) for side, process in processes.items()} for _ in range(self.rounds)]
        return {
            side: [
                statistics.median(column) for column in zip(*(found[side] for found in rounds), strict=True)
            ]
            for side in processes
        }


def rates(bench: Bench, report: Report) -> None:
    """Calls of a hundred, calls of one, and eight clients."""
    with contextlib.ExitStack() as stack:
        sides = {side: stack.enter_context(bench.process(side, "rates")) for side in SIDES}
        found = bench.medians(sides, lambda side: side.ask("cycle", size=100, rounds=20))
        for at, name in enumerate(("submit", "acquire", "complete")):
            add(report, f"{name}, in hundreds", {side: each[at] for side, each in found.items()})
        for name, clients in (("complete one at a time", 1), ("complete, 8 clients", 8)):
            asked = {"calls": 400 * clients, "clients": clients}
            found = bench.medians(sides, lambda side, asked=asked: [side.ask("complete_one", **asked)])
            add(report, name, {side: each[0] for side, each in found.items()})


def slow(bench: Bench, report: Report) -> None:
    """Eight clients on a disk whose syncs take `SLOW_MS` longer."""
    shim = bench.scratch / "slow_sync.so"
    command = ["cc", "-O2", "-shared", "-fPIC", "-o", str(shim), str(HERE / "slow_sync.c"), "-ldl"]
    subprocess.run(command, check=True)
    settings = {"LD_PRELOAD": str(shim), "SLOW_SYNC_MS": str(SLOW_MS)}
    with contextlib.ExitStack() as stack:
        sides = {side: stack.enter_context(bench.process(side, "slow", settings)) for side in SIDES}
        calls = {"ours": 1600, "peer": 40, "raw": 200}  # of ours, eight share a commit: as many rounds as raw
        rounds = [
            {side: sides[side].ask("complete_one", calls=calls[side], clients=8) for side in SIDES}
            for _ in range(bench.rounds)
        ]
        rates = {side: statistics.median(found[side] for found in rounds) for side in SIDES}
        add(report, f"{SLOW_MS} ms sync: complete, 8 clients", rates)


def growth(bench: Bench, report: Report) -> None:
    """What a call costs with ever more tasks pending, and how long the queue then takes to open."""
    for tasks in (10_000, 100_000) if bench.quick else (10_000, 100_000, 1_000_000):
        rates, memory, opened = {}, {}, {}
        for side in SIDES:
            with bench.process(side, f"{tasks}-pending") as process:
                memory[side] = process.ask("fill", tasks=tasks)
                rates[side] = statistics.median(process.ask("acquire_one", calls=200) for _ in range(3))
                process.ask("close")
            opened[side] = bench.opening(side, f"{tasks}-pending")
        add(report, f"acquire one of {tasks:,}", rates)
        costs(report, f"{tasks:,} pending", memory, opened)
    tasks = 10_000 if bench.quick else 100_000
    memory, opened = {}, {}
    for side in ("ours", "peer"):
        with bench.process(side, f"{tasks}-completed") as process:
            memory[side] = process.ask("fill", tasks=tasks, complete=True)
            process.ask("close")
        opened[side] = bench.opening(side, f"{tasks}-completed")
    costs(report, f"{tasks:,} completed", memory, opened)


def costs(report: Report, state: str, memory: dict[str, float], opened: dict[str, float]) -> None:
    """The most memory of the process that worked, and the time that the next one takes to open the queue."""
    for measure, found, unit in (("memory", memory, "MB"), ("open", opened, "ms")):
        report.add(f"{measure}, {state}", found["ours"], found["peer"], unit, higher_is_better=False)


def served(bench: Bench, report: Report) -> None:
    """`spill queue serve` on this machine; its clients are threads of one process. The peer has no server."""
    folder, token = bench.scratch / "served", "benchmark"
    program = "from spillover.cli import main; main()"
    command = [sys.executable, "-c", program, "queue", "serve", str(folder), "--port", "0"]
    command += ["--queue", "rollout"]
    environ = os.environ | {"SPILL_QUEUE_TOKEN": token}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ) as server:
        try:
            assert server.stdout is not None
            (url,) = re.findall(r"http://[^\s,]+", server.stdout.readline())
            for clients in (1, 8, 64):
                with Process(bench.python["ours"], HERE / "queue_side.py", "http") as process:
                    process.ask("open", folder=f"{url} {token}")
                    asked = {"calls": 320 if clients == 1 else 1280, "clients": clients}
                    rates = [process.ask("complete_one", **asked) for _ in range(bench.rounds)]
                rate = statistics.median(rates)
                measure = f"HTTP: complete, {clients} client{'s' * (clients > 1)}"
                report.figures[measure] = {"ours": round(rate, 4), "unit": "/s"}
                print(f"{measure:<34} ours {rate:9.3f} /s", flush=True)
        finally:
            server.terminate()


def add(report: Report, measure: str, found: dict[str, float]) -> None:
    report.add(measure, found["ours"], found["peer"], "/s", higher_is_better=True)
    report.figures[measure]["raw"] = round(found["raw"], 4)
    print(
        f"{'':<34} SQLite alone {found['raw']:9.0f}, ours is {found['ours'] / found['raw']:.0%} of it",
        flush=True,
    )


def bars(report: Report) -> None:
    """What the queue is to reach, and whether it did here."""
    print("\nours is to reach                   bar              here")
    for bar, table in (("at least", AT_LEAST), ("at most", AT_MOST)):
        for measure, limit in table.items():
            if measure in report.figures:
                here = float(report.figures[measure]["ours"])
                met = here >= limit if bar == "at least" else here <= limit
                print(f"{measure:<34} {bar} {limit:<8,} {here:12,.1f}  {'met' if met else 'NOT MET'}")


def main() -> None:
    args, report = arguments(__doc__), Report()
    with tempfile.TemporaryDirectory() as name:
        bench = Bench(Path(name), args.quick)
        rates(bench, report)
        slow(bench, report)
        served(bench, report)
        growth(bench, report)
    bars(report)
    report.save(args.json)


if __name__ == "__main__":
    main()
