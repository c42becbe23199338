"""Measure the numeric gates on the demo model and write ``docs/numerics.md``.

Prompts and training rows are those that the package ships. The peers are transformers, PEFT and
``torch.optim.AdamW``, so it needs the ``dev`` extra, and some minutes.

    python docs/measure.py
"""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Sequence
from importlib import metadata, resources
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from spillover.engine import (
    Completion,
    MicroBatch,
    Optimizer,
    Request,
    Sampling,
    Scheduler,
    Trainer,
    Work,
    engine,
)
from spillover.jobs.data import collate, read_rows
from spillover.jobs.runs import hardware
from spillover.models import LoraConfig, Model, initial, resolve

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))
from engine.torch.peer import adapted, leaves, tune  # noqa: E402  (found through the line above)

PAGE = ROOT / "docs" / "numerics.md"
TOKENS, STEPS, BATCH = 32, 50, 2
RATES = [1e-4 * min(1.0, (step + 1) / 5) for step in range(STEPS)]
CONFIG = LoraConfig()


class Gates:
    """The rows of the page, as they are measured."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, str, str]] = []

    def add(self, gate: str, measured: str, bound: str) -> None:
        self.rows.append((gate, measured, bound))
        print(f"{gate}: {measured} (bound: {bound})", flush=True)


def prompts(model: Model) -> list[list[int]]:
    lines = (resources.files("spillover.examples") / "sample.jsonl").read_text(encoding="utf-8").splitlines()
    tokenizer = model.tokenizer()
    questions = [json.loads(line)["prompt"] for line in lines if line.strip()]
    return [tokenizer.prompt_ids([{"role": "user", "content": question}]) for question in questions]


def micro_batches(model: Model, count: int, size: int) -> list[MicroBatch]:
    """The first rows of the tickets example, in the order of the file."""
    tokenizer = model.tokenizer()
    with resources.as_file(resources.files("spillover.examples") / "tickets" / "train.jsonl") as path:
        rows = [tokenizer.training(row.conversation) for row in read_rows(path, "train")]
    chosen = [rows[number % len(rows)] for number in range(count * size)]
    examples = [(np.array(ids, np.int32), np.array(mask, np.bool_)) for ids, mask in chosen]
    return [collate(examples[start : start + size]) for start in range(0, len(examples), size)]


def answer(model: Model, asked: Sequence[list[int]], numerics: str, batch: int) -> list[Completion]:
    computing = engine("torch")
    work = Work("generate", batch, max(map(len, asked)) + TOKENS, numerics=numerics, device="cpu")
    loaded = computing.load(model, computing.plan(model, work))
    requests = [Request(str(n), tuple(ids), TOKENS, Sampling(), frozenset()) for n, ids in enumerate(asked)]
    return sorted(Scheduler(loaded).run(requests), key=lambda completion: int(completion.id))


def trainer(model: Model, numerics: str = "float32", *, clip: float = 1.0, start: Any = None) -> Trainer:
    computing = engine("torch")
    plan = computing.plan(model, Work("train", 8, 512, CONFIG, numerics=numerics, device="cpu"))
    tensors = start or initial(CONFIG, model.config, 0)
    return computing.load(model, plan).trainer(CONFIG, tensors, Optimizer(clip=clip))


def generation(gates: Gates, model: Model, theirs: Any) -> None:
    """Greedy tokens and log-probabilities in float32 against transformers."""
    asked = prompts(model)
    ours = answer(model, asked, "float32", len(asked))
    equal, worst = 0, 0.0
    for ids, completion in zip(asked, ours, strict=True):
        with torch.inference_mode():
            logits = theirs(torch.tensor([ids + completion.tokens[:-1]])).logits[0, len(ids) - 1 :]
        equal += logits.argmax(-1).tolist() == completion.tokens
        want = torch.log_softmax(logits.float(), -1)
        found = torch.tensor([one.logprob for one in completion.logprobs])
        places = torch.tensor(completion.tokens)[:, None]
        worst = max(worst, float((want.gather(1, places)[:, 0] - found).abs().max()))
    gates.add(f"greedy answers equal transformers', {TOKENS} tokens", f"{equal} of {len(asked)}", "all")
    gates.add("log-probability of a token against transformers'", f"{worst:.1e}", "1e-4")
    bf16, single = answer(model, asked, "bf16", len(asked)), answer(model, asked, "bf16", 1)
    gates.add("bf16 against float32, equal tokens before the first other", shared(bf16, ours), "none claimed")
    gates.add("bf16 at batch 20 against batch 1, the same", shared(bf16, single), "none claimed")


def shared(some: list[Completion], others: list[Completion]) -> str:
    """The share of tokens up to the first that differs, over all answers."""
    same = 0
    for one, other in zip(some, others, strict=True):
        equal = np.equal(one.tokens, other.tokens)
        same += len(equal) if equal.all() else int(np.argmin(equal))
    return f"{same / sum(len(one.tokens) for one in some):.0%}"


def training(gates: Gates, model: Model, theirs: Any) -> None:
    """A tune in float32 against PEFT, a stop in its middle, the split into micro-batches, and bf16."""
    steps = [[batch] for batch in micro_batches(model, STEPS, BATCH)]
    whole = trainer(model)
    losses = []
    for number, (step, rate) in enumerate(zip(steps, RATES, strict=True)):
        if number == STEPS // 2:
            middle = whole.state()
        losses.append(whole.step(step, lr=rate).loss)
    again = trainer(model)
    again.restore(middle)
    rest = [again.step(step, lr=rate).loss for step, rate in [*zip(steps, RATES, strict=True)][STEPS // 2 :]]
    off = max(abs(a - b) for a, b in zip(rest, losses[STEPS // 2 :], strict=True))
    gates.add(f"continued at step {STEPS // 2} of {STEPS}, loss difference", f"{off:g}", "0")
    against_peft(gates, model, theirs, steps, losses, whole.state().params)
    splits(gates, model)


def against_peft(
    gates: Gates,
    model: Model,
    theirs: Any,
    steps: list[list[MicroBatch]],
    losses: list[float],
    params: dict[str, np.ndarray],
) -> None:
    """Our tune beside PEFT's; and PEFT's beside itself, when only the order of its sums changes."""
    start = initial(CONFIG, model.config, 0)
    peer = adapted(theirs, CONFIG, start)
    wanted = tune(peer, steps, RATES)
    gates.add(f"loss of {STEPS} steps against PEFT and AdamW, relative", apart(losses, wanted), "1e-5")
    found = {name: leaf.detach().T.numpy() for name, leaf in leaves(peer).items()}
    gates.add("adapter after them, 1 - cosine", f"{1 - _cosine(params, found):.1e}", "1e-4")
    for name, leaf in leaves(peer).items():
        leaf.data = torch.from_numpy(start[name].T.copy())
    alone = [[one for batch in step for one in single(batch)] for step in steps]
    again = tune(peer, alone, RATES)
    gates.add("PEFT against PEFT, one sequence at a time, the same", apart(again, wanted), "none claimed")


def rounding(gates: Gates, model: Model) -> None:
    """How far float32 gradients, ours and PEFT's, are from float64's: the floor under every comparison."""
    source, batch = np.random.default_rng(0), micro_batches(model, 1, BATCH)[0]
    start = {
        name: array if name.endswith("_a") else source.normal(0, 0.01, array.shape).astype(np.float32)
        for name, array in initial(CONFIG, model.config, 0).items()
    }
    exact, theirs = (peer_gradient(model, batch, start, kind) for kind in (torch.float64, torch.float32))
    training = trainer(model, clip=0.0, start=start)
    training.step([batch], lr=0.0)
    for whose, found in (("ours", training.state().m), ("PEFT's", theirs)):
        scale = 10 if whose == "ours" else 1  # the first moment is a tenth of the gradient, after one step
        off = np.concatenate([(scale * found[name] - exact[name]).ravel() for name in exact])
        norm = np.linalg.norm(np.concatenate([array.ravel() for array in exact.values()]))
        gates.add(f"gradient against float64, {whose}", f"{np.linalg.norm(off) / norm:.1e}", "none claimed")


def peer_gradient(
    model: Model, batch: MicroBatch, start: dict[str, np.ndarray], dtype: torch.dtype
) -> dict[str, np.ndarray]:
    """The gradient that PEFT computes in ``dtype``, by our names."""
    theirs = transformers.AutoModelForCausalLM.from_pretrained(model.path, dtype=dtype)
    peer = adapted(theirs.requires_grad_(False).eval(), CONFIG, start).to(dtype)
    ids, mask = torch.from_numpy(batch.tokens), torch.from_numpy(batch.mask)[:, 1:]
    present = (torch.arange(ids.shape[1]) < torch.from_numpy(batch.lengths)[:, None]).long()
    logits = peer(input_ids=ids, attention_mask=present).logits[:, :-1]
    # the logits stay in `dtype`: rounding them would hide what is measured
    torch.nn.functional.cross_entropy(logits[mask], ids[:, 1:][mask]).backward()
    return {name: leaf.grad.T.numpy().astype(np.float64) for name, leaf in leaves(peer).items()}


def single(batch: MicroBatch) -> list[MicroBatch]:
    """A micro-batch as micro-batches of one sequence each, without padding."""
    rows = zip(batch.tokens, batch.mask, batch.lengths, strict=True)
    return [MicroBatch(ids[None, :size], mask[None, :size], np.array([size])) for ids, mask, size in rows]


def apart(some: list[float], others: list[float]) -> str:
    """The largest relative difference of two courses of losses."""
    return f"{max(abs(a - b) / b for a, b in zip(some, others, strict=True)):.1e}"


def splits(gates: Gates, model: Model) -> None:
    eight, fours = micro_batches(model, 1, 8), micro_batches(model, 2, 4)
    one, two = (trainer(model).step(batches, lr=0.0).loss for batches in (eight, fours))
    gates.add("loss of a micro-batch of 8 against 2 x 4, relative", f"{abs(one - two) / one:.1e}", "1e-6")
    gradients = {}
    for name, numerics, batches in (
        ("float32", "float32", eight),
        ("bf16", "bf16", eight),
        ("split", "bf16", fours),
    ):
        training = trainer(model, numerics, clip=0.0)
        training.step(batches, lr=0.0)
        gradients[name] = training.state().m  # a tenth of the gradient, after one step from zero
    exact, split = (_cosine(gradients["bf16"], gradients[name]) for name in ("float32", "split"))
    gates.add("gradient in bf16 against float32, 1 - cosine", f"{1 - exact:.1e}", "none claimed")
    gates.add("gradient in bf16, 8 against 2 x 4, 1 - cosine", f"{1 - split:.1e}", "none claimed")


def _cosine(some: dict[str, np.ndarray], others: dict[str, np.ndarray]) -> float:
    a, b = (
        np.concatenate([part[name].ravel() for name in some]).astype(np.float64) for part in (some, others)
    )
    return float(a @ b / np.sqrt((a @ a) * (b @ b)))


def page(gates: Gates, model: Model) -> str:
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "transformers", "peft"))
    rows = "".join(f"| {gate} | {measured} | {bound} |\n" for gate, measured, bound in gates.rows)
    return (
        "# Measured numerics\n\n"
        f"On the `demo` model (fingerprint `{model.fingerprint[:12]}`), in float32 unless a line says bf16; "
        f"written by\n`python docs/measure.py`. What is exact and what is not, and why, is in "
        f"[design/numerics.md](design/numerics.md).\n\n"
        f"| gate | measured | bound |\n| --- | --- | --- |\n{rows}\n"
        "Two correct float32 tunes drift apart, for a reason given there. Where the loss differs from PEFT's "
        "by\nmore than its bound, the two lines against float64 tell whose rounding is the larger.\n\n"
        f"Machine: {hardware()}; Python {platform.python_version()}, {versions}.\n"
    )


def main() -> None:
    transformers.logging.set_verbosity_error()
    model, gates = resolve("demo"), Gates()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(model.path, dtype=torch.float32)
    theirs.requires_grad_(False).eval()
    rounding(gates, model)
    generation(gates, model, theirs)
    training(gates, model, theirs)
    PAGE.write_text(page(gates, model), encoding="utf-8")


if __name__ == "__main__":
    main()
