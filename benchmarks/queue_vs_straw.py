"""The queue beside the peer and beside bare SQLite, on the same tasks in one run.

The peer (PyPI `straw-queue`) runs in process with its online collection. Its results have to be published
before they are completed, one a task; its rate of completing includes that, and it has no form for many. Raw
is one table and one index in SQLite with the same durability: no leases, no receipts, no ownership. The sides
take turns, one round each. The 15 ms are added to every sync by `slow_sync.c`, on all sides.

    python benchmarks/queue_vs_straw.py [--quick] [--json FILE]

It prints medians and, last, what ours is to reach; missing that fails nothing. ``--quick`` leaves the million
tasks out.
"""

from __future__ import annotations

import contextlib
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
AT_MOST = {"open 1,000,000 pending": 50, "memory, 1,000,000 pending": 150}


class Bench:
    """A scratch folder, the sides' commands, and how many rounds."""

    def __init__(self, scratch: Path, quick: bool) -> None:
        self.scratch, self.rounds = scratch, 1 if quick else 5
        self._python = {"ours": sys.executable, "peer": environment(), "raw": sys.executable}

    @contextlib.contextmanager
    def process(self, side: str, folder: str, settings: dict[str, str] | None = None):
        with Process(self._python[side], HERE / "queue_side.py", side, settings=settings) as process:
            process.ask("open", folder=str(self.scratch / f"{side}-{folder}"))
            yield process

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
        for side in sides.values():
            side.ask("fill", tasks=100_000)
        found = bench.medians(sides, lambda side: [side.ask("acquire_one", calls=200)])
        add(report, "acquire one of 100,000", {side: each[0] for side, each in found.items()})


def slow(bench: Bench, report: Report) -> None:
    """Eight clients on a disk whose syncs take `SLOW_MS` longer."""
    shim = bench.scratch / "slow_sync.so"
    command = ["cc", "-O2", "-shared", "-fPIC", "-o", str(shim), str(HERE / "slow_sync.c"), "-ldl"]
    subprocess.run(command, check=True)
    settings = {"LD_PRELOAD": str(shim), "SLOW_SYNC_MS": str(SLOW_MS)}
    with contextlib.ExitStack() as stack:
        sides = {side: stack.enter_context(bench.process(side, "slow", settings)) for side in SIDES}
        found = bench.medians(sides, lambda side: [side.ask("complete_one", calls=80, clients=8)])
        add(
            report, f"{SLOW_MS} ms sync: complete, 8 clients", {side: each[0] for side, each in found.items()}
        )


def large(bench: Bench, report: Report) -> None:
    """A million pending tasks: memory while they are added, and how long it takes to open the queue again."""
    memory = {}
    for side in ("ours", "peer"):
        with bench.process(side, "large") as process:
            memory[side] = process.ask("fill", tasks=1_000_000)
            process.ask("close")
        opened = []
        for _ in range(3):
            with Process(bench._python[side], HERE / "queue_side.py", side) as process:
                opened.append(process.ask("open", folder=str(bench.scratch / f"{side}-large")))
                process.ask("close")
        memory[f"{side} open"] = 1e3 * statistics.median(taken for taken, _ in opened)
    report.add("memory, 1,000,000 pending", memory["ours"], memory["peer"], "MB", higher_is_better=False)
    report.add(
        "open 1,000,000 pending", memory["ours open"], memory["peer open"], "ms", higher_is_better=False
    )


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
        if not args.quick:
            large(bench, report)
    bars(report)
    report.save(args.json)


if __name__ == "__main__":
    main()
