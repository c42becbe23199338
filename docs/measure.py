"""Measure the numeric gates on the demo model and write ``docs/numerics.md``.

Prompts and training rows are those that the package ships. The peers are transformers, PEFT and
``torch.optim.AdamW``, so it needs the ``dev`` extra, and some minutes; with the names of sections it measures
those and keeps the rest of the page.

    python docs/measure.py [generation] [invariance] [streaming] [training] [tune] [float64]
"""

from __future__ import annotations

import json
import platform
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata, resources
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

from spillover.engine import (
    Completion,
    LoadedModel,
    MicroBatch,
    Optimizer,
    Placement,
    Request,
    Sampling,
    Scheduler,
    Trainer,
    Work,
    engine,
)
from spillover.engine.ring import Drive, LayerIndex, Layout
from spillover.jobs.data import Example, collate, read_rows
from spillover.jobs.runs import hardware
from spillover.jobs.schedule import lr_at
from spillover.models import LoraConfig, Model, initial, resolve

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))
from engine.torch.peer import leaves, peer_gradient, peer_in, tune  # noqa: E402  (found through the line above)

PAGE = ROOT / "docs" / "numerics.md"
TOKENS, STEPS, STOP, FIRST, BATCH = 32, 50, 45, 20, 2
FORCED = 4  # tokens that follow each prompt where bits are compared
RATES = [lr_at(step, STEPS, 1e-4, 0.03, "cosine") for step in range(STEPS)]  # what a tune does by default
CONFIG = LoraConfig()
KERNELS = ("compiled", "torch")
FREE, UNKNOWN = "none claimed", "not measured"


@dataclass(frozen=True)
class Gate:
    """One line of the page. `bounds` has one for each of its columns: a number, ``all``, or `FREE`."""

    text: str
    bounds: tuple[str, ...]

    def missed(self, cells: Sequence[str]) -> list[str]:
        """Those of `cells` that are not within their bounds."""
        return [cell for cell, bound in zip(cells, self.bounds, strict=True) if not _within(cell, bound)]


def _within(cell: str, bound: str) -> bool:
    if cell == UNKNOWN or bound == FREE:
        return cell != UNKNOWN
    first, _, of = cell.replace(",", "").partition(" of ")
    return first == of if bound == "all" else float(first) <= float(bound)


Table = list[tuple[str, ...]]


@dataclass(frozen=True)
class Section:
    """A table of the page; `measure` gives a cell per column, line after line, in the order of `gates`."""

    title: str
    columns: tuple[str, ...]
    gates: tuple[Gate, ...]
    measure: Callable[[Model, Any], Iterator[tuple[str, ...]]]


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
    examples = [Example(np.array(ids, np.int32), np.array(mask, np.bool_)) for ids, mask in chosen]
    return [collate(examples[start : start + size]) for start in range(0, len(examples), size)]


def loaded(model: Model, longest: int, numerics: str, kernels: str, batch: int = 20) -> LoadedModel:
    work = Work("generate", batch, longest + TOKENS, numerics=numerics, device="cpu")
    return engine("torch").load(model, replace(engine("torch").plan(model, work), kernels=kernels))


def streamed(model: Model, work: Work) -> LoadedModel:
    """Every pass reads every layer: three have room."""
    plan = engine("torch").plan(model, replace(work, placement="streamed"))
    layout = Layout.of(LayerIndex(model.index(), model.config), Drive(), slots=3)
    return engine("torch").load(model, replace(plan, layout=layout))


def answer(
    model: Model, asked: Sequence[list[int]], numerics: str, kernels: str, batch: int = 20
) -> list[Completion]:
    computing = loaded(model, max(map(len, asked)), numerics, kernels, batch)
    requests = [Request(str(n), tuple(ids), TOKENS, Sampling(), frozenset()) for n, ids in enumerate(asked)]
    return sorted(Scheduler(computing).run(requests), key=lambda completion: int(completion.id))


def generation(model: Model, theirs: Any) -> Iterator[tuple[str, ...]]:
    """Greedy tokens and log-probabilities in float32 against transformers, and in bf16 against float32."""
    asked = prompts(model)
    ours = [answer(model, asked, "float32", one) for one in KERNELS]
    found = [against_transformers(asked, one, theirs) for one in ours]
    yield tuple(f"{equal} of {len(asked)}" for equal, _ in found)
    yield tuple(f"{worst:.1e}" for _, worst in found)
    narrow = [answer(model, asked, "bf16", one) for one in KERNELS]
    yield tuple(map(shared, narrow, ours))
    single = [answer(model, asked, "bf16", one, batch=1) for one in KERNELS]
    yield tuple(map(shared, narrow, single))


def against_transformers(
    asked: Sequence[list[int]], ours: list[Completion], theirs: Any
) -> tuple[int, float]:
    """How many answers are those of transformers, and the largest difference of a log-probability."""
    equal, worst = 0, 0.0
    for ids, completion in zip(asked, ours, strict=True):
        with torch.inference_mode():
            logits = theirs(torch.tensor([ids + completion.tokens[:-1]])).logits[0, len(ids) - 1 :]
        equal += logits.argmax(-1).tolist() == completion.tokens
        want = torch.log_softmax(logits.float(), -1)
        found = torch.tensor([one.logprob for one in completion.logprobs or ()])
        places = torch.tensor(completion.tokens)[:, None]
        worst = max(worst, float((want.gather(1, places)[:, 0] - found).abs().max()))
    return equal, worst


def shared(some: list[Completion], others: list[Completion]) -> str:
    """The share of tokens up to the first that differs, over all answers."""
    same = 0
    for one, other in zip(some, others, strict=True):
        equal = np.equal(one.tokens, other.tokens)
        same += len(equal) if equal.all() else int(np.argmin(equal))
    return f"{same / sum(len(one.tokens) for one in some):.0%}"


Logits = NDArray[np.float32]


def invariance(model: Model, theirs: Any) -> Iterator[tuple[str, ...]]:
    """Bits of logits that differ when only the company, the cut or the threads do."""
    asked = prompts(model)
    follow = [one.tokens[:FORCED] for one in answer(model, asked, "float32", "compiled")]
    longest, threads = max(map(len, asked)), torch.get_num_threads()
    for numerics in ("float32", "bf16"):
        lines: list[list[str]] = [[], [], []]
        for kernels in KERNELS:
            computing = loaded(model, longest, numerics, kernels)
            together = forced(computing, asked, follow)
            alone = [forced(computing, [ids], [rest]) for ids, rest in zip(asked, follow, strict=True)]
            lines[0].append(differing(together, np.concatenate(alone, axis=1)))
            lines[1].append(differing(together, by_token(computing, asked, follow)))
            other = []
            for count in (1, 3):
                torch.set_num_threads(count)
                other.append(forced(loaded(model, longest, numerics, kernels), asked, follow))
            torch.set_num_threads(threads)
            lines[2].append(differing(np.concatenate([together] * 2), np.concatenate(other)))
        yield from map(tuple, lines)


def forced(computing: LoadedModel, asked: Sequence[list[int]], follow: Sequence[list[int]]) -> Logits:
    """Logits after each prompt and each of the tokens that follow it, ``[1 + FORCED, rows, V]``."""
    session = computing.session()
    rows = range(len(asked))
    steps = [session.admit(asked)]
    kept = [[steps[0].numpy(row).copy() for row in rows]]
    for number in range(FORCED):
        logits = session.decode([rest[number] for rest in follow])
        kept.append([logits.numpy(row).copy() for row in rows])
    return np.array(kept)


def by_token(computing: LoadedModel, asked: Sequence[list[int]], follow: Sequence[list[int]]) -> Logits:
    """`forced`, of which all but the first token of each prompt comes alone."""
    texts = [[*ids, *rest] for ids, rest in zip(asked, follow, strict=True)]
    session = computing.session()
    found: list[list[Logits]] = [[] for _ in texts]
    for place in range(max(map(len, texts))):
        tokens = [text[place] if place < len(text) else 0 for text in texts]
        logits = session.decode(tokens) if place else session.admit([[token] for token in tokens])
        for row, text in enumerate(texts):
            if len(asked[row]) - 1 <= place < len(text):
                found[row].append(logits.numpy(row).copy())
    return np.array(found).swapaxes(0, 1)


def differing(some: Logits, others: Logits) -> str:
    assert some.shape == others.shape
    bits = int(np.bitwise_count(some.view(np.uint32) ^ others.view(np.uint32)).sum(dtype=np.int64))
    return f"{bits:,} of {32 * some.size:,}"


def streaming(model: Model, theirs: Any) -> Iterator[tuple[str, ...]]:
    """Streamed against resident: answers with their log-probabilities, and a tune."""
    asked, columns = prompts(model), []
    requests = [Request(str(n), tuple(ids), TOKENS, Sampling(), frozenset()) for n, ids in enumerate(asked)]
    steps = [[batch] for batch in micro_batches(model, FIRST, BATCH)]
    for numerics in ("float32", "bf16"):
        work = Work("generate", 20, max(map(len, asked)) + TOKENS, numerics=numerics, device="cpu")
        found = sorted(Scheduler(streamed(model, work)).run(requests), key=lambda one: int(one.id))
        pairs = list(zip(found, answer(model, asked, numerics, "compiled"), strict=True))
        equal = sum(one.tokens == other.tokens for one, other in pairs)
        scores = [(a, b) for one, other in pairs for a, b in zip(one.logprobs, other.logprobs, strict=True)]
        tunes = trainer(model, numerics), trainer(model, numerics, placement="streamed")
        losses = [[one.step(s, lr=r).loss for one in tunes] for s, r in zip(steps, RATES, strict=False)]
        columns.append(
            (
                f"{equal} of {len(asked)}",
                f"{sum(a != b for a, b in scores)} of {len(scores)}",
                f"{sum(a != b for a, b in losses)} of {len(losses)}",
            )
        )
    yield from zip(*columns, strict=True)


def trainer(
    model: Model,
    numerics: str = "float32",
    *,
    clip: float = 1.0,
    start: Any = None,
    placement: Placement = "resident",
) -> Trainer:
    computing = engine("torch")
    work = Work("train", 8, 512, CONFIG, numerics=numerics, device="cpu", placement=placement)
    if placement == "resident":
        ready = computing.load(model, computing.plan(model, work))
    else:
        ready = streamed(model, work)
    return ready.trainer(CONFIG, start or initial(CONFIG, model.config, 0), Optimizer(clip=clip))


def training(model: Model, theirs: Any) -> Iterator[tuple[str, ...]]:
    """One step: its rounding, its split into micro-batches, and what bf16 does to its gradient."""
    for found in rounding(model):
        yield (found,)
    eight, fours = micro_batches(model, 1, 8), micro_batches(model, 2, 4)
    one, two = (trainer(model).step(batches, lr=0.0).loss for batches in (eight, fours))
    yield (f"{abs(one - two) / one:.1e}",)
    gradients = {}
    for name, numerics, batches in (
        ("float32", "float32", eight),
        ("bf16", "bf16", eight),
        ("split", "bf16", fours),
    ):
        training = trainer(model, numerics, clip=0.0)
        training.step(batches, lr=0.0)
        gradients[name] = training.state().m  # a tenth of the gradient, after one step from zero
    for name in ("float32", "split"):
        yield (f"{1 - _cosine(gradients['bf16'], gradients[name]):.1e}",)


def rounding(model: Model) -> Iterator[str]:
    """How far float32 gradients, ours and PEFT's, are from float64's: the floor under every comparison."""
    source, batch = np.random.default_rng(0), micro_batches(model, 1, BATCH)[0]
    start = {
        name: array if name.endswith("_a") else source.normal(0, 0.01, array.shape).astype(np.float32)
        for name, array in initial(CONFIG, model.config, 0).items()
    }
    exact, theirs = (
        peer_gradient(model.path, CONFIG, batch, start, kind) for kind in (torch.float64, torch.float32)
    )
    training = trainer(model, clip=0.0, start=start)
    training.step([batch], lr=0.0)
    # the first moment is a tenth of the gradient, after one step
    for found, scale in ((training.state().m, 10), (theirs, 1)):
        off = np.concatenate([(scale * found[name] - exact[name]).ravel() for name in exact])
        norm = np.linalg.norm(np.concatenate([array.ravel() for array in exact.values()]))
        yield f"{np.linalg.norm(off) / norm:.1e}"


def course(model: Model, theirs: Any) -> Iterator[tuple[str, ...]]:
    """A tune in float32: stopped in its middle, and against PEFT."""
    steps = [[batch] for batch in micro_batches(model, STEPS, BATCH)]
    whole = trainer(model)
    losses = []
    for number, (step, rate) in enumerate(zip(steps, RATES, strict=True)):
        if number == STOP:
            middle = whole.state()
        losses.append(whole.step(step, lr=rate).loss)
    again = trainer(model)
    again.restore(middle)
    rest = [again.step(step, lr=rate).loss for step, rate in [*zip(steps, RATES, strict=True)][STOP:]]
    yield (f"{max(abs(a - b) for a, b in zip(rest, losses[STOP:], strict=True)):g}",)
    start = initial(CONFIG, model.config, 0)
    peer = peer_in(model.path, CONFIG, start, torch.float32)
    wanted = tune(peer, steps, RATES)
    yield (apart(losses, wanted),)
    found = {name: leaf.detach().T.numpy() for name, leaf in leaves(peer).items()}
    yield (f"{1 - _cosine(whole.state().params, found):.1e}",)


def truth(model: Model, theirs: Any) -> Iterator[tuple[str, ...]]:
    """The beginning of the same tune, ours and PEFT's, against PEFT's in float64."""
    steps, start = [[batch] for batch in micro_batches(model, FIRST, BATCH)], initial(CONFIG, model.config, 0)
    training = trainer(model)
    ours = [training.step(step, lr=rate).loss for step, rate in zip(steps, RATES, strict=False)]
    exact, wanted = (
        tune(peer_in(model.path, CONFIG, start, kind), steps, RATES[:FIRST])
        for kind in (torch.float64, torch.float32)
    )
    yield (apart(ours, exact),)
    yield (apart(wanted, exact),)


def apart(some: list[float], others: list[float]) -> str:
    """The largest relative difference of two courses of losses."""
    return f"{max(abs(a - b) / b for a, b in zip(some, others, strict=True)):.1e}"


def _cosine(some: dict[str, np.ndarray], others: dict[str, np.ndarray]) -> float:
    a, b = (
        np.concatenate([part[name].ravel() for name in some]).astype(np.float64) for part in (some, others)
    )
    return float(a @ b / np.sqrt((a @ a) * (b @ b)))


def both(text: str, bound: str, torchs: str = "") -> Gate:
    """A gate of both kernels; `torchs` is what torch's are bound to, if not to the same."""
    return Gate(text, (bound, torchs or bound))


def one(text: str, bound: str) -> Gate:
    return Gate(text, (bound,))


SECTIONS = {
    "generation": Section(
        "Generation",
        ("compiled kernels", "torch's kernels"),
        (
            both(f"greedy answers equal transformers', {TOKENS} tokens", "all"),
            both("log-probability of a token against transformers'", "1e-4"),
            both("bf16 against float32, equal tokens before the first other", FREE),
            both("bf16 at batch 20 against batch 1, the same", FREE),
        ),
        generation,
    ),
    "invariance": Section(
        "Bits of logits that differ",
        ("compiled kernels", "torch's kernels"),
        tuple(
            both(f"{numerics}, {text}", "0", FREE)
            for numerics in ("float32", "bf16")
            for text in (
                "20 rows together against alone",
                "prefill against token by token",
                "2 threads, 1 and 3",
            )
        ),
        invariance,
    ),
    "streaming": Section(
        "Layers streamed from the drive against resident ones",
        ("float32", "bf16"),
        (
            both(f"greedy answers equal, {TOKENS} tokens", "all"),
            both("log-probabilities that differ", "0"),
            both(f"losses of a tune of {FIRST} steps that differ", "0"),
        ),
        streaming,
    ),
    "training": Section(
        "A training step",
        ("measured",),
        (
            one("gradient against float64, ours", FREE),
            one("gradient against float64, PEFT's", FREE),
            one("loss of a micro-batch of 8 against 2 x 4, relative", "1e-6"),
            one("gradient in bf16 against float32, 1 - cosine", FREE),
            one("gradient in bf16, 8 against 2 x 4, 1 - cosine", FREE),
        ),
        training,
    ),
    "tune": Section(
        f"A tune of {STEPS} steps",
        ("measured",),
        (
            one(f"continued at step {STOP}, loss difference", "0"),
            one("loss at every step against PEFT and AdamW, relative", "1e-5"),
            one("adapter after them, 1 - cosine", "1e-4"),
        ),
        course,
    ),
    "float64": Section(
        f"Its first {FIRST} steps against float64",
        ("measured",),
        (
            one("loss at every step, relative, ours", FREE),
            one("loss at every step, relative, PEFT's", FREE),
        ),
        truth,
    ),
}
HEAD = """# Measured numerics

On the `demo` model (fingerprint `{fingerprint}`), in float32 unless a line says bf16; written by
`python docs/measure.py`. What is exact and what is not, and why, is in
[design/numerics.md](design/numerics.md).
"""
TAIL = """
In float64 means: PEFT's model with all its operators in float64, norms included, over the same tables of
rotations. Two correct float32 tunes drift apart, for a reason given in the design page; the lines against
float64 tell whose rounding is the larger.

Machine: {machine}.
"""


def page(tables: Mapping[str, Table], fingerprint: str, machine: str) -> str:
    """The whole page; `tables` has the cells of every section, line after line."""
    parts = [HEAD.format(fingerprint=fingerprint)]
    for name, section in SECTIONS.items():
        bounds = len(set(zip(*(gate.bounds for gate in section.gates), strict=True)))
        heads = ["gate", *section.columns, *(["bound"] if bounds == 1 else ["bound", "bound of torch's"])]
        lines = [" | ".join(heads), " | ".join(["---"] * len(heads))]
        rows = tables[name] or [(UNKNOWN,) * len(section.columns)] * len(section.gates)
        for gate, cells in zip(section.gates, rows, strict=True):
            assert len(cells) == len(gate.bounds)
            lines.append(" | ".join([gate.text, *cells, *gate.bounds[:bounds]]))
        parts.append(f"\n## {section.title}\n\n" + "".join(f"| {line} |\n" for line in lines))
    return "".join(parts) + TAIL.format(machine=machine)


def written(text: str) -> tuple[dict[str, Table], str, str]:
    """What a page holds that was measured: its tables, the model's fingerprint, and the machine."""
    tables: dict[str, Table] = {}
    for name, section in SECTIONS.items():
        part = text.partition(f"## {section.title}\n")[2].partition("## ")[0]
        rows = [line.strip("| ").split(" | ") for line in part.splitlines() if line.startswith("| ")][2:]
        tables[name] = [tuple(row[1 : 1 + len(section.columns)]) for row in rows]
    fingerprint = re.search(r"fingerprint `(\w+)`", text)
    machine = re.search(r"^Machine: (.*)\.$", text, re.MULTILINE)
    assert fingerprint is not None and machine is not None
    return tables, fingerprint[1], machine[1]


def main(names: Sequence[str]) -> None:
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    model = resolve("demo")
    measured: dict[str, Table] = {}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(model.path, dtype=torch.float32)
    theirs.requires_grad_(False).eval()
    for name in names or SECTIONS:
        section = SECTIONS[name]
        measured[name] = []
        for gate, cells in zip(section.gates, section.measure(model, theirs), strict=True):
            measured[name].append(cells)
            print(gate.text, *cells, *(f"MISSED {cell}" for cell in gate.missed(cells)), sep="\t", flush=True)
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "transformers", "peft"))
    machine = f"{hardware()}; Python {platform.python_version()}, {versions}"
    tables = written(PAGE.read_text(encoding="utf-8"))[0] | measured
    PAGE.write_text(page(tables, model.fingerprint[:12], machine), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
