"""The pool beside the peer and beside bare system calls, on the same bytes in one run.

The peer (PyPI `straw-queue`) runs with its online collection, since ours always knows what is owned; its
figure without is printed where it is cheap to get. Every side is a process of its own (`pool_side.py`) with
an open store, and the sides take turns, one round each, so that all of them meet the same machine. Raw is
one write of the same bytes at the end of a file and one fdatasync a call; it keeps no index, no checksum
and no reference.

Sixteen threads: the peer's store refuses a second call while one runs, so its figure is that of one thread;
raw writes the sixteen records at once, from one. Beside it stands what sixteen threads reach that share raw
writes and syncs, with no pool around them: what the machine allows. The 15 ms are added to every sync by
`slow_sync.c`, on all sides. Peak memory is how far the resident size rises in one load in a fresh process,
the buffer included, in sizes of the tensor. Space is what lies on disk, in sizes of what is alive, after one
record of 16 is kept and after everything was done that frees space.

    python benchmarks/pool_vs_straw.py [--quick] [--json FILE]

It prints medians and, last, what ours is to reach; missing that fails nothing. The first run installs the
peer (3 MB) into an environment of its own under ``XDG_CACHE_HOME``.
"""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from peer import Process, environment
from report import Report, arguments

HERE = Path(__file__).parent
KIB, MIB = 1024, 1024**2
SIDES = ("ours", "peer", "raw")
TMPFS = Path("/dev/shm")
SLOW_MS = 15

AT_LEAST = {
    "publish 1 KiB, one caller": 2500,
    "publish 1 KiB, 16 threads": 20_000,
    "100 x 1 KiB, 100 publications": 80_000,
    "100 x 1 KiB, one publication": 80_000,
    "16 MiB tensor, tmpfs": 1.5,
    "load 256 MiB, reused buffer": 1.2,
    "15 ms sync: 8 writers, 1 KiB": 400,
}
AT_MOST = {
    "peak memory, reused buffer": 1.05,
    "256 tensors, in a session": 15,
    "one row of 12.6 MB": 0.15,
    "space, one by one, collected": 2,
    "space, in batches, collected": 2,
}
SHARE_OF_RAW = {"16 MiB tensor, disk": 0.8}

Ask = Callable[[Process], float]


class Figures(Report):
    """Figures with the raw ones beside them."""

    def write(self, measure: str, found: dict[str, float], unit: str) -> None:
        """A rate of writing: ours, the peer's, and what the bare system calls reach."""
        self.add(measure, found["ours"], found["peer"], unit, higher_is_better=True)
        share = found["ours"] / found["raw"]
        self.figures[measure]["raw"] = round(found["raw"], 4)
        off = f"; peer without collection {found['off']:.0f}" if "off" in found else ""
        print(f"{'':<34} raw  {found['raw']:9.3f}, ours is {share:.0%} of it{off}", flush=True)
        if "grouped" in found:
            self.figures[measure]["grouped"] = round(found["grouped"], 4)
            share = found["ours"] / found["grouped"]
            line = f"raw, as many threads, group commit, no pool {found['grouped']:9.0f}"
            print(f"{'':<34} {line}, ours is {share:.0%} of it", flush=True)

    def bars(self) -> None:
        """What the pool is to reach, and whether it did here."""
        print("\nours is to reach                   bar              here")
        for measure, bar in AT_LEAST.items():
            self._bar(measure, f"at least {bar:g}", self._ours(measure), self._ours(measure) >= bar)
        for measure, bar in AT_MOST.items():
            self._bar(measure, f"at most {bar:g}", self._ours(measure), self._ours(measure) <= bar)
        for measure, bar in SHARE_OF_RAW.items():
            share = self._ours(measure) / float(self.figures[measure]["raw"])
            self._bar(measure, f"{bar:.0%} of raw", share, share >= bar)

    def _ours(self, measure: str) -> float:
        return float(self.figures[measure]["ours"])

    def _bar(self, measure: str, bar: str, here: float, met: bool) -> None:
        print(f"{measure:<34} {bar:<15} {here:9.3f}  {'met' if met else 'NOT MET'}")


class Bench:
    """The sides' commands, a scratch folder, and how long a round and how many rounds."""

    def __init__(self, scratch: Path, quick: bool) -> None:
        self.scratch, self.quick = scratch, quick
        self.rounds, self.seconds = (1, 0.25) if quick else (7, 0.5)
        self._python = dict.fromkeys(("ours", "raw", "grouped"), sys.executable) | {"peer": environment()}

    @contextlib.contextmanager
    def process(self, side: str, folder: Path, *, online: bool = True) -> Iterator[Process]:
        with Process(self._python[side], HERE / "pool_side.py", side) as process:
            process.ask("open", folder=str(folder), online=online)
            yield process

    @contextlib.contextmanager
    def slow_process(self, side: str, shim: Path) -> Iterator[Process]:
        """A side on a disk whose syncs take `SLOW_MS` longer, with no open store."""
        settings = {"LD_PRELOAD": str(shim), "SLOW_SYNC_MS": str(SLOW_MS)}
        with Process(self._python[side], HERE / "pool_side.py", side, settings=settings) as process:
            yield process

    def alternate(self, sides: dict[str, Process], asked: dict[str, Ask]) -> dict[str, float]:
        """Medians of rounds in which each of ``asked`` takes its turn; the first round is not counted."""
        rounds = [{name: ask(sides[name]) for name, ask in asked.items()} for _ in range(self.rounds + 1)]
        return {name: statistics.median(each[name] for each in rounds[1:]) for name in asked}


def small(bench: Bench, figures: Figures, sides: dict[str, Process]) -> None:
    """Records of 1 KiB: one a call, from threads, and a hundred a call."""
    seconds = bench.seconds

    def one(process: Process) -> float:
        return process.ask("publish", seconds=seconds, size=KIB)

    found = bench.alternate(sides, dict.fromkeys((*SIDES, "off"), one))
    figures.write("publish 1 KiB, one caller", found, "/s")

    def threads(process: Process) -> float:
        return process.ask("publish_in_threads", seconds=seconds, size=KIB, threads=16)

    found = bench.alternate(
        sides,
        {
            "ours": threads,
            "grouped": threads,
            "peer": one,
            "raw": lambda process: process.ask("publish_many", seconds=seconds, size=KIB, count=16),
        },
    )
    figures.write("publish 1 KiB, 16 threads", found, "/s")
    for name, call in (("100 publications", "publish_many"), ("one publication", "publish_records")):

        def hundred(process: Process, call: str = call) -> float:
            return process.ask(call, seconds=seconds, size=KIB, count=100)

        found = bench.alternate(sides, dict.fromkeys((*SIDES, "off"), hundred))
        figures.write(f"100 x 1 KiB, {name}", found, "records/s")


def large(bench: Bench, figures: Figures, sides: dict[str, Process], where: str, folder: Path) -> None:
    """Tensors of 16 MiB, one a call."""
    arguments = {"folder": str(folder / "large"), "count": 3 if bench.quick else 8, "size": 16 * MIB}
    found = bench.alternate(
        sides, dict.fromkeys(SIDES, lambda process: process.ask("publish_tensor", **arguments))
    )
    figures.write(f"16 MiB tensor, {where}", found, "GB/s")


def loads(bench: Bench, figures: Figures, sides: dict[str, Process], folders: dict[str, Path]) -> None:
    """One tensor of 256 MiB: how fast, and in fresh processes how much memory it takes."""
    size = 256 * MIB
    handles = {side: sides[side].ask("keep_tensors", count=1, size=size)[0] for side in ("ours", "peer")}

    def load(side: str) -> Ask:
        return lambda process: size / 1e9 / process.ask("load", handle=handles[side])

    asked = {
        "ours": lambda process: size / 1e9 / process.ask("load_into", handle=handles["ours"], size=size),
        "fresh": load("ours"),
        "peer": load("peer"),
    }
    found = bench.alternate(sides | {"fresh": sides["ours"]}, asked)
    figures.add("load 256 MiB, reused buffer", found["ours"], found["peer"], "GB/s", higher_is_better=True)
    figures.add("load 256 MiB, fresh memory", found["fresh"], found["peer"], "GB/s", higher_is_better=True)

    def peak(side: str, reuse: bool = False) -> float:
        with bench.process(side, folders[side]) as process:
            return process.ask("peak", handle=handles[side], size=size, reuse=reuse)

    peer, unit = peak("peer"), "x size"
    figures.add("peak memory, reused buffer", peak("ours", reuse=True), peer, unit, higher_is_better=False)
    figures.add("peak memory, fresh memory", peak("ours"), peer, unit, higher_is_better=False)


def parts(bench: Bench, figures: Figures, sides: dict[str, Process]) -> None:
    """Many small tensors of one publication, and single rows of one tensor."""
    both = {side: sides[side] for side in ("ours", "peer")}
    handles = {side: process.ask("keep_tensors", count=256, size=16 * KIB) for side, process in both.items()}
    rows = {side: process.ask("keep_rows") for side, process in both.items()}

    def milliseconds(call: str, arguments: Callable[[str], dict]) -> dict[str, Ask]:
        return {side: lambda process, side=side: 1e3 * process.ask(call, **arguments(side)) for side in both}

    def compare(measure: str, asked: dict[str, Ask]) -> None:
        found = bench.alternate(both, asked)
        figures.add(measure, found["ours"], found["peer"], "ms", higher_is_better=False)

    compare("256 tensors of 16 KiB", milliseconds("load_each", lambda side: {"handles": handles[side]}))
    compare("256 tensors, in a session", milliseconds("load_all", lambda side: {"handles": handles[side]}))
    one = milliseconds("rows", lambda side: {"handle": rows[side], "seconds": bench.seconds / 2})
    compare("one row of 12.6 MB", one)


def slow(bench: Bench, figures: Figures) -> None:
    """Eight processes that write to one pool on a disk with slow syncs."""
    shim = bench.scratch / "slow_sync.so"
    command = ["cc", "-O2", "-shared", "-fPIC", "-o", str(shim), str(HERE / "slow_sync.c"), "-ldl"]
    subprocess.run(command, check=True)
    seconds, rounds = (1, range(1)) if bench.quick else (4, range(3))
    found: dict[str, list[float]] = {side: [] for side in SIDES}
    for number in rounds:
        for side in SIDES:
            folder = str(bench.scratch / f"slow-{side}-{number}")
            with bench.slow_process(side, shim) as process:
                arguments = {"folder": folder, "seconds": seconds, "size": KIB, "processes": 8}
                found[side].append(process.ask("publish_in_processes", **arguments))
    medians = {side: statistics.median(rates) for side, rates in found.items()}
    figures.write(f"{SLOW_MS} ms sync: 8 writers, 1 KiB", medians, "/s")


def space(bench: Bench, figures: Figures) -> None:
    """What lies on disk when one record of sixteen is alive."""
    groups = 16 if bench.quick else 64
    for name, batched in (("one by one", False), ("in batches", True)):
        found = {}
        for side in ("ours", "peer"):
            folder = bench.scratch / f"space-{side}-{batched}"
            with bench.process(side, folder) as process:
                arguments = {"folder": str(folder), "groups": groups, "size": 64 * KIB, "batched": batched}
                found[side] = process.ask("space", **arguments)
        for when, which in (("", 0), (", collected", 1)):
            ours, peer = found["ours"][which], found["peer"][which]
            figures.add(f"space, {name}{when}", ours, peer, "x live", higher_is_better=False)


def main() -> None:
    args, figures = arguments(__doc__), Figures()
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        memory = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=TMPFS)))
        bench = Bench(scratch, args.quick)
        folders = {side: scratch / side for side in SIDES}
        with contextlib.ExitStack() as open_stores:
            sides = {side: open_stores.enter_context(bench.process(side, folders[side])) for side in SIDES}
            others = {
                "off": bench.process("peer", scratch / "off", online=False),
                "grouped": bench.process("grouped", scratch / "grouped"),
            }
            opened = {name: open_stores.enter_context(process) for name, process in others.items()}
            small(bench, figures, sides | opened)
            large(bench, figures, sides, "disk", scratch)
            large(bench, figures, sides, "tmpfs", memory)
            loads(bench, figures, sides, folders)
            parts(bench, figures, sides)
        slow(bench, figures)
        space(bench, figures)
    figures.bars()
    figures.save(args.json)


if __name__ == "__main__":
    main()
