"""One LoRA step on the demo model against PEFT on transformers with ``torch.optim.AdamW``: the same batch.

Rank 16 on all seven linear layers, a micro-batch of 4 sequences of about 128 tokens, loss on the last half of
each. Each side runs in a process of its own, on all processors; steps alternate, and medians are compared.

The arithmetic of a step is what no implementation can leave out: every weight once forward and once for the
gradient of its input (2 operations each per token), the head on target rows alone, adapters three times, and
the visible half of the attention scores (2 products forward, 4 backward). Divided by the rate of a large
product, measured between the steps, it is the least time that a step can take.

    python benchmarks/tune_step.py [--quick] [--json FILE]
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from pathlib import Path

import torch
from peer import Process
from report import Report, arguments
from tune_side import DTYPES, micro_batch

from spillover.models import LoraConfig, Model, resolve
from spillover.models.index import linears

SIDE = Path(__file__).with_name("tune_side.py")
THREADS = len(os.sched_getaffinity(0))


def operations(model: Model) -> float:
    """Multiplications and additions of a step, each one counted."""
    config, rank = model.config, LoraConfig().rank
    batch = micro_batch(config.vocab_size)
    tokens = int(batch.lengths.sum())
    targets = sum(int(mask[1:length].sum()) for mask, length in zip(batch.mask, batch.lengths, strict=True))
    shapes = [shape for layer in range(config.layers) for shape in linears(config, layer).values()]
    weights = sum(inputs * outputs for inputs, outputs in shapes)
    adapters = sum(rank * (inputs + outputs) for inputs, outputs in shapes)
    pairs = sum(int(length) * (int(length) + 1) // 2 for length in batch.lengths)
    head = config.vocab_size * config.hidden_size * targets
    attention = pairs * config.heads * config.head_dim * config.layers
    return 4 * weights * tokens + 4 * head + 6 * adapters * tokens + 12 * attention


def rate(dtype: torch.dtype) -> float:
    """Operations per second in products of ``[2048, 2048]``; the best of a few."""
    one = torch.randn(2048, 2048).to(dtype)
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        one @ one
        seconds.append(time.perf_counter() - start)
    return 2 * 2048**3 / min(seconds)


def compare(report: Report, model: Model, numerics: str, rounds: int) -> None:
    settings = {"OMP_NUM_THREADS": str(THREADS)}
    ours, peer = (
        Process(sys.executable, SIDE, side, numerics, settings=settings) for side in ("ours", "peft")
    )
    with ours, peer:
        ours.ask("step"), peer.ask("step")
        seconds: list[tuple[float, float]] = []
        rates = []
        for _ in range(rounds):
            seconds.append((ours.ask("step")[0], peer.ask("step")[0]))
            rates.append(rate(DTYPES[numerics]))
        mine, theirs = (statistics.median(side) for side in zip(*seconds, strict=True))
        report.add(f"LoRA step, {numerics}", mine, theirs, "s", higher_is_better=False)
        least = operations(model) / max(rates)
        print(
            f"  arithmetic {least:.3f} s at {max(rates) / 1e9:.0f} GFLOP/s: share {least / mine:.0%}",
            flush=True,
        )
        peaks = ours.ask("peak_mb"), peer.ask("peak_mb")
        report.add(f"peak memory, {numerics}", *peaks, "MB", higher_is_better=False)


def main() -> None:
    args = arguments(__doc__)
    torch.set_num_threads(THREADS)
    model, report = resolve("demo"), Report()
    for numerics in DTYPES:
        compare(report, model, numerics, 2 if args.quick else 9)
    report.save(args.json)


if __name__ == "__main__":
    main()
