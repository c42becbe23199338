"""Estimated against measured seconds on the demo model: answers of 64 + 64 tokens, LoRA steps of 4 x 128.

Measures the machine first, as ``spill doctor --measure`` does. "ours" is the estimate, "peer" what the work
took, from loading the weights to the last token or step, the shortest of three runs as in the measurement;
the ratio is to stay between 0.8 and 1.25.

    python benchmarks/estimates.py [--quick] [--json FILE]
"""

from __future__ import annotations

import time

import numpy as np
from report import Report, arguments

from spillover.engine import MicroBatch, Optimizer, Request, Sampling, Scheduler, Work, engine
from spillover.engine.estimate import Generation, Speed, Tuning
from spillover.engine.torch.measure import measure
from spillover.models import LoraConfig, Model, initial, resolve

PROMPT, ANSWER = 64, 64
SEQUENCES, LENGTH, STEPS = 4, 128, 4


def generation(model: Model, rows: int) -> tuple[Speed, float]:
    """What is known of the model's speed, and the seconds of one run. Every row has a prompt of its own."""
    source, computing = np.random.default_rng(rows), engine("torch")
    plan = computing.plan(model, Work("generate", rows, PROMPT + ANSWER, device="cpu"))
    requests = [
        Request(str(row), tuple(prompt), ANSWER, Sampling(), frozenset(), logprobs=-1)
        for row, prompt in enumerate(source.integers(3, 49_000, (rows, PROMPT)).tolist())
    ]
    start = time.perf_counter()
    for _ in Scheduler(computing.load(model, plan)).run(requests):
        pass
    assert plan.speed is not None
    return plan.speed, time.perf_counter() - start


def tuning(model: Model, numerics: str) -> tuple[Speed, float]:
    """The same for `STEPS` steps."""
    source, computing, config = np.random.default_rng(0), engine("torch"), LoraConfig()
    mask = np.zeros((SEQUENCES, LENGTH), np.bool_)
    mask[:, LENGTH // 2 :] = True
    lengths = np.full(SEQUENCES, LENGTH)
    plan = computing.plan(model, Work("train", SEQUENCES, LENGTH, config, numerics=numerics, device="cpu"))
    start_values = initial(config, model.config, 0)
    start = time.perf_counter()
    trainer = computing.load(model, plan).trainer(config, start_values, Optimizer())
    for _ in range(STEPS):
        tokens = source.integers(3, 49_000, (SEQUENCES, LENGTH))
        trainer.step([MicroBatch(tokens, mask, lengths)], lr=1e-4)
    assert plan.speed is not None
    return plan.speed, time.perf_counter() - start


def main() -> None:
    args = arguments(__doc__)
    model, report, rounds = resolve("demo"), Report(), 1 if args.quick else 3
    machine, _ = measure(lambda done, total, what: None)
    print(f"measured in {machine.seconds:.1f} s, {machine.threads} threads")
    for rows in (1, 16, 64):
        runs = [generation(model, rows) for _ in range(rounds)]
        work = Generation(rows, PROMPT, ANSWER, rows, 2048)
        estimate = runs[0][0].generation(work)
        took = min(seconds for _, seconds in runs)
        name = f"generation, batch {rows}"
        report.add(name, estimate.seconds, took, "s", higher_is_better=False)
    adapter = sum(array.size for array in initial(LoraConfig(), model.config, 0).values())
    for numerics in ("bf16", "float32"):
        runs = [tuning(model, numerics) for _ in range(rounds)]
        targets = SEQUENCES * LENGTH / 2
        estimate = runs[0][0].tuning(Tuning(STEPS, STEPS, SEQUENCES, LENGTH, targets, adapter, 1 << 20))
        took = min(seconds for _, seconds in runs)
        report.add(f"{STEPS} LoRA steps, {numerics}", estimate.seconds, took, "s", higher_is_better=False)
    report.save(args.json)


if __name__ == "__main__":
    main()
