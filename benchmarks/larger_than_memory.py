"""Generation with a model larger than the memory, against accelerate's disk offload and AirLLM.

A model with random weights, by default 4 GB of bf16 under a limit of 2 GB, and the same prompts of 16 random
tokens for every side. Each side is a process of its own in a memory cgroup with that limit (`confined.py`),
page cache included, where cgroups can be made; a line says so where not. They take turns, and medians are
compared.

accelerate    ``AutoModelForCausalLM.from_pretrained(..., device_map="auto", offload_folder=...)``: as many
              weights in memory as ``max_memory`` says, the rest in the model's files. Shares of the limit are
              tried, and the fastest counts
airllm        PyPI's AirLLM, which first splits the model into a file for each layer; not with ``--quick``

A pass makes one token of every row. Its seconds are those of the passes after the first, which computes the
prompts and is told beside it. The share of the drive is the time that the weights which a side does not keep
take at the rate of a plain reader (`ring.py`: a few threads, O_DIRECT) of the same files in the same run, by
the time of a pass. Peak memory is what cannot be given back; page cache comes on top, up to the limit.

    python benchmarks/larger_than_memory.py [--quick] [--json FILE] [--memory N] [--gigabytes N | --model DIR]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from confined import CannotConfine, Group
from peer import Process, environment
from random_model import write_model
from report import Report
from ring import plain

from spillover.engine.ring import known_drive
from spillover.models import ModelConfig, WeightIndex

SCRIPT = Path(__file__).with_name("larger_side.py")
ACCELERATE = ("accelerate", "1.15.0")
AIRLLM = ("airllm", "4.0.0", "accelerate==1.15.0")
PROMPT = 16
SHARES = (0.6, 0.3, 0.0)  # of the limit, for the weights that accelerate keeps
AIM = 5.0  # times as fast as accelerate


class Failed(Exception):
    """What `side` cannot do, in a line."""

    def __init__(self, side: str, reason: str) -> None:
        super().__init__(reason)
        self.side = side


@dataclass
class Side:
    """A confined process, and the figures of its runs over the present prompts."""

    name: str
    model: Path
    process: Process
    group: Group | None
    runs: list[dict[str, float]] = field(default_factory=list)

    def ask(self, call: str, **arguments: Any) -> Any:
        """See `Process.ask`; `Failed` where the process answers an error or ends."""
        try:
            return self.process.ask(call, **arguments)
        except SystemExit as error:
            if self.group is not None and self.group.usage().killed:
                raise Failed(self.name, "ended for lack of memory") from None
            reason = str(error).partition(f" {self.model}: ")[2]  # after the command, which ends with it
            raise Failed(self.name, f"{call}: {reason}") from None

    def median(self, figure: str) -> float:
        return statistics.median(run[figure] for run in self.runs)

    def memory(self) -> tuple[int, int]:
        """Peaks without and with page cache; where the side is not confined, what was resident is both."""
        if self.group is None:
            resident = self.ask("peak")
            return resident, resident
        usage = self.group.usage()
        return usage.held, usage.charged

    def close(self) -> None:
        self.process.close()
        if self.group is not None:
            self.group.close()


class Bench:
    """The model, the limit, and the sides that can be had."""

    def __init__(self, args: argparse.Namespace, model: Path, folder: Path) -> None:
        self.quick, self.limit = args.quick, int(args.memory * 1e9)
        self.tokens = 3 if args.quick else 4
        self.batches = (1, 8) if args.quick else (1, 32)
        self.model, self._folder = model, folder
        self.files = WeightIndex(model).files
        self._vocabulary = ModelConfig.read(model).vocab_size
        self._confined = True

    def prompts(self, count: int) -> list[list[int]]:
        source = np.random.default_rng(count)
        return source.integers(100, self._vocabulary, (count, PROMPT)).tolist()

    def start(self, name: str, python: str | Path = sys.executable, *, confine: bool = True) -> Side:
        """A new process on all cores, which has loaded nothing."""
        cores = {"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))}
        command, group = [python, SCRIPT, name, self.model], None
        if confine and self._confined:
            try:
                group = Group(self.limit)
                command = group.command(*command)
            except CannotConfine as reason:
                print(f"not confined: {reason}", flush=True)
                self._confined = False
        return Side(name, self.model, Process(*command, settings=cores), group)

    def forget(self) -> None:
        """Drop the model's files from the page cache: whoever read them first would pay for all."""
        forget(self.files)

    def warm(self, side: Side, batch: int, tokens: int = 1) -> tuple[str, float]:
        """Hand out `batch` prompts, and run once; a line about the side, and the seconds of a pass."""
        about = side.ask("open", prompts=self.prompts(batch), tokens=self.tokens)
        figures = side.ask("generate", tokens=tokens)
        side.runs = []
        return about, figures["seconds"]

    def ours(self) -> Side:
        side = self.start("ours")
        side.ask("load", limit=self.limit)
        return side

    def accelerate(self) -> Side:
        """With the share of the limit for weights that makes it fastest, the first that works if quick."""
        best, fastest = None, float("inf")
        for share in SHARES:
            try:
                side, seconds = self._offloading(share)
            except Failed as reason:
                print(f"accelerate with {share:.0%} of the limit for weights: {reason}", flush=True)
                continue
            if seconds >= fastest:
                side.close()
                continue
            if best is not None:
                best.close()
            best, fastest = side, seconds
            if self.quick:
                break
        if best is None:
            raise Failed("accelerate", "nothing fits")
        return best

    def _offloading(self, share: float) -> tuple[Side, float]:
        """accelerate with that share of the limit for weights, and its seconds of a pass over one row."""
        python = environment(*ACCELERATE)
        self.forget()
        side = self.start("accelerate", python)
        try:
            folder = str(self._folder / "offload")
            about = side.ask("load", weights=int(share * self.limit), folder=folder)
            self.warm(side, self.batches[-1])
            _, seconds = self.warm(side, 1, tokens=2)
        except Failed:
            side.close()
            raise
        print(f"accelerate: {about}, {seconds:.2f} s a pass", flush=True)
        return side, seconds

    def airllm(self) -> Side:
        """Splitting the model takes the memory of a whole shard, so that is not confined."""
        if self.quick:
            raise Failed("airllm", "it takes longer than a quick run may")
        python, folder = environment(*AIRLLM), self._folder / "airllm"
        splitting = self.start("airllm", python, confine=False)
        try:
            splitting.ask("load", folder=str(folder))
        finally:
            splitting.close()
        os.sync()
        forget(folder.glob("**/*.safetensors"))
        side = self.start("airllm", python)
        try:
            print(f"airllm: {side.ask('load', folder=str(folder))}", flush=True)
            self.warm(side, self.batches[-1])
        except Failed:
            side.close()
            raise
        return side


def forget(files: Iterable[Path]) -> None:
    """Drop files that were synced from the page cache."""
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def peers(bench: Bench, stack: contextlib.ExitStack) -> list[Side]:
    """Those that can be had; a line says why another cannot."""
    found = []
    for name, start in (("accelerate", bench.accelerate), ("airllm", bench.airllm)):
        try:
            side = start()
        except (Failed, OSError, subprocess.CalledProcessError) as reason:
            print(f"{name} is left out: {reason}", flush=True)
            continue
        stack.callback(side.close)
        found.append(side)
    return found


def compare(bench: Bench, sides: list[Side], batch: int, rounds: int, report: Report) -> None:
    """Rounds over one batch of prompts: the plain reader, then every side."""
    rates = []
    for side in sides:
        bench.forget()
        about, _ = bench.warm(side, batch)
        if about:
            print(f"  {side.name}: {about}", flush=True)
    for _ in range(rounds):
        bench.forget()
        rates.append(plain(bench.files, known_drive(bench.model)))
        for side in sides:
            side.runs.append(side.ask("generate", tokens=bench.tokens))
    rate, shares = statistics.median(rates), {}
    for side in sides:
        seconds, streamed = side.median("seconds"), side.ask("streamed")
        read = side.median("read") or streamed  # less where the ring was ahead when the time began
        shares[side.name] = min(streamed, read) / rate / seconds
        print(
            f"  {side.name}: {seconds:.2f} s a pass, the first {side.median('first'):.2f} s; "
            f"has to read {streamed / 1e9:.2f} GB, {shares[side.name]:.0%} of the drive's "
            f"{rate / 1e9:.2f} GB/s; reads {read / 1e9:.2f} GB",
            flush=True,
        )
    ours, *others = sides
    for side in others:
        named = f"batch {batch}, {side.name}"
        for figure, measure in (("seconds", f"{named}, a pass"), ("first", f"{named}, first token")):
            report.add(measure, ours.median(figure), side.median(figure), "s", higher_is_better=False)
        share = {name: round(shares[name], 3) for name in (ours.name, side.name)}
        report.figures[f"{named}, a pass"] |= {"drive share": share["ours"], "peer's": share[side.name]}
        pairs = zip(ours.ask("answers"), side.ask("answers"), strict=True)
        equal = sum(mine[0] == other[0] for mine, other in pairs)
        print(f"  {equal} of {batch} rows begin with the token that {side.name} chose", flush=True)


def memory(bench: Bench, sides: list[Side], report: Report) -> None:
    """Peaks of the whole run, loading included."""
    peaks = {side.name: side.memory() for side in sides}
    listed = "; ".join(f"{name} {held / 1e9:.2f} GB" for name, (_, held) in peaks.items())
    print(f"  with page cache, of {bench.limit / 1e9:.2f} GB: {listed}", flush=True)
    for side in sides[1:]:
        held = (peaks[name][0] / 1e6 for name in ("ours", side.name))
        report.add(f"peak memory, {side.name}", *held, "MB", higher_is_better=False)


def verdict(bench: Bench, report: Report) -> None:
    """Whether ours is as much faster than accelerate as it is to be."""
    measures = [f"batch {batch}, accelerate, a pass" for batch in bench.batches]
    ratios = [float(report.figures[name]["ratio"]) for name in measures if name in report.figures]
    if ratios:
        reached = "reached" if min(ratios) >= AIM else "not reached"
        print(f"at least {AIM:.0f} times as fast as accelerate: {reached}, {min(ratios):.1f} times")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a small model, one round, without AirLLM")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    parser.add_argument("--gigabytes", type=float, help="size of the random model; 4, or 1 with --quick")
    parser.add_argument("--memory", type=float, help="the limit, in 10^9 bytes; 2, or 0.7 with --quick")
    parser.add_argument("--model", type=Path, help="a folder with bf16 weights, instead of a random model")
    parser.add_argument("--folder", type=Path, help="where the random model goes: the drive to look at")
    args = parser.parse_args()
    args.gigabytes = args.gigabytes or (1 if args.quick else 4)
    args.memory = args.memory or (0.7 if args.quick else 2)
    return args


def main() -> None:
    args, report = arguments(), Report()
    with tempfile.TemporaryDirectory(dir=args.folder) as name, contextlib.ExitStack() as stack:
        folder, model = Path(name), args.model
        if model is None:
            model = folder / "model"
            write_model(model, size=int(args.gigabytes * 1e9))
            os.sync()
        bench = Bench(args, model.absolute(), folder)
        size = sum(file.stat().st_size for file in bench.files)
        print(f"{size / 1e9:.2f} GB of weights under {bench.limit / 1e9:.2f} GB", flush=True)
        try:
            ours = bench.ours()
            stack.callback(ours.close)
            sides = [ours, *peers(bench, stack)]
            for batch in bench.batches:
                compare(bench, sides, batch, 1 if args.quick else 3, report)
            memory(bench, sides, report)
        except Failed as error:
            raise SystemExit(f"{error.side}: {error}") from None
    verdict(bench, report)
    report.save(args.json)


if __name__ == "__main__":
    main()
