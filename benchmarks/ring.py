"""The rate at which the weight ring delivers layers, beside a plain reader of the same files.

    python benchmarks/ring.py [--quick] [--json FILE] [--gigabytes N | --model FOLDER] [--measure]

The plain reader is a few threads that read whole files with O_DIRECT and throw the bytes away: what the drive
gives. Both read with as many threads and as large reads, alternately, in one run. The ring's consumer does
nothing, or multiplies matrices for half the time that its layer, or each of its experts, takes to read. The
model is random, written for this and deleted, or given. ``--measure`` measures the drive first, and keeps it.
"""

from __future__ import annotations

import argparse
import mmap
import os
import resource
import tempfile
import threading
import time
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
from random_model import write_model
from report import Report, alternate

from spillover.engine.ring import Drive, LayerIndex, Layout, Ring, forward, known_drive, measure_drive
from spillover.models import ModelConfig, WeightIndex

PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


def plain(files: list[Path], drive: Drive) -> float:
    """Bytes per second of reading `files` once, in pieces that threads take in turn."""
    descriptors = [os.open(file, os.O_RDONLY | os.O_DIRECT) for file in files]
    pieces = iter(
        [
            (descriptor, start)
            for descriptor, file in zip(descriptors, files, strict=True)
            for start in range(0, file.stat().st_size, drive.read_bytes)
        ]
    )
    lock, done = threading.Lock(), [0] * drive.threads
    buffers = [mmap.mmap(-1, drive.read_bytes, flags=PRIVATE) for _ in range(drive.threads)]
    for buffer in buffers:
        buffer.madvise(mmap.MADV_HUGEPAGE)  # small pages take several times as long on some drives

    def read(number: int) -> None:
        while True:
            with lock:
                descriptor, start = next(pieces, (-1, 0))
            if descriptor < 0:
                return
            done[number] += os.preadv(descriptor, [buffers[number]], start)

    threads = [threading.Thread(target=read, args=(number,)) for number in range(drive.threads)]
    begin = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - begin
    for descriptor in descriptors:
        os.close(descriptor)
    return sum(done) / seconds


class Streaming:
    """A ring that goes on from turn to turn, reading nothing in between, and its consumer."""

    def __init__(self, model: Path, drive: Drive) -> None:
        self.config = ModelConfig.read(model)
        self.files = WeightIndex(model).files
        self.layers = LayerIndex(WeightIndex(model), self.config)
        self.layout = Layout.of(self.layers, drive)
        self.ring = Ring(self.layers, self.layout, drive, ())
        self._matrix = np.ones((512, 512), np.float32)

    def rate(self, compute: float) -> float:
        """Bytes per second of one pass, with `compute` seconds of multiplying in each layer."""
        before = self.ring.statistics()
        self.ring.follow(islice(forward(self.config.layers), self.config.layers))
        for number in range(self.config.layers):
            experts = range(len(self.layers.experts[number]))
            with self.ring.layer() as layer:
                for _ in layer.experts(experts):
                    self._compute(compute / len(experts))
                if not experts:
                    self._compute(compute)
        assert self.ring.direct
        return (self.ring.statistics() - before).rate

    def _compute(self, seconds: float) -> None:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            self._matrix @ self._matrix


def compare(model: Path, drive: Drive, report: Report, rounds: int) -> None:
    streaming = Streaming(model, drive)
    files = streaming.files
    size = sum(file.stat().st_size for file in files)
    per_layer = streaming.layout.pass_bytes / streaming.config.layers
    print(
        f"{size / 1e9:.2f} GB, {streaming.config.layers} layers of {per_layer / 1e6:.0f} MB; "
        f"{drive.threads} threads of {drive.read_bytes >> 20} MiB, {streaming.layout.slots} buffers, "
        f"{streaming.layout.bytes / 1e9:.2f} GB",
        flush=True,
    )
    sustained = plain(files, drive)
    for name, share in (("consumer does nothing", 0.0), ("consumer computes half the time", 0.5)):
        ours = partial(streaming.rate, share * per_layer / sustained)
        rates = alternate(ours, partial(plain, files, drive), rounds)
        report.add(name, *(rate / 1e9 for rate in rates), "GB/s", higher_is_better=True)
    streaming.ring.close()
    usage = resource.getrusage(resource.RUSAGE_SELF)
    print(f"peak memory {usage.ru_maxrss / 1e6:.2f} GB; system time {usage.ru_stime:.1f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="end within a minute")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    parser.add_argument("--gigabytes", type=float, help="size of the random model; 4, or 2 with --quick")
    parser.add_argument("--family", default="llama")
    parser.add_argument("--model", type=Path, help="a model folder, instead of a random one")
    parser.add_argument("--folder", type=Path, help="where the random model goes: the drive to look at")
    parser.add_argument("--measure", action="store_true", help="measure the drive first")
    args, report = parser.parse_args(), Report()
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        model = args.model
        if model is None:
            model = Path(name)
            size = args.gigabytes or (2 if args.quick else 4)
            write_model(model, args.family, int(size * 1e9))
            os.sync()
        drive = known_drive(model)
        if args.measure:
            drive = measure_drive(WeightIndex(model).files)
            print(f"the drive sustains {drive.rate / 1e9:.2f} GB/s", flush=True)
        compare(model, drive, report, 3 if args.quick else 7)
    report.save(args.json)


if __name__ == "__main__":
    main()
