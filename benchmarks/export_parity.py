"""Exported GGUF files in llama.cpp: how many tokens it agrees on with the model that was exported.

The demo model with an adapter trained on the packaged tickets is exported as bf16 and as q8_0 (``spill
export``). The trained model, its adapter beside the weights, answers prompts in float32; llama.cpp (PyPI
``llama-cpp-python``) then says at each token of these answers what it would have said. It cuts the prompts
itself. Once over the packaged prompts, and once over the messages that the adapter was made for.

    python benchmarks/export_parity.py [--quick] [--json FILE]

"ours" is llama.cpp on our file, the "peer" is our engine on what the same file is read back into, which is
what ``spill export`` measures. ``--quick`` trains for 20 steps.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from importlib import resources
from pathlib import Path

import msgspec
from peer import Process, environment
from report import Report, arguments

from spillover.export.answers import Computing, Question, Reply, ask, questions
from spillover.export.export import Record
from spillover.jobs.run import adapter_of
from spillover.models import Model, resolve

SIDE = Path(__file__).with_name("llama_side.py")
SPILL = Path(sys.executable).with_name("spill")
LLAMA = ("llama-cpp-python", "0.3.36", "diskcache==5.6.3")
NAME = "export-parity"
TOKENS = 32
CONTEXT = 512


def spill(folder: Path, *words: str | Path) -> None:
    done = subprocess.run([SPILL, *map(str, words)], cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"spill {' '.join(map(str, words))}:\n{done.stderr}")


def train(folder: Path, quick: bool) -> Model:
    """The demo model with an adapter trained on the tickets."""
    with resources.as_file(resources.files("spillover.examples") / "tickets" / "train.jsonl") as rows:
        length = ["--steps", "20"] if quick else ["--epochs", "3"]
        spill(folder, "tune", "demo", rows, "--name", NAME, "--lr", "5e-4", "--overwrite", "--quiet", *length)
    return resolve(f"demo+{NAME}")


def tickets(folder: Path) -> Path:
    """The messages that the adapter was made for and has not seen, as many as are compared at least."""
    examples = resources.files("spillover.examples") / "tickets"
    lines = (examples / "test.jsonl").read_text().splitlines() + (
        examples / "train.jsonl"
    ).read_text().splitlines()
    path = folder / "tickets.jsonl"
    path.write_text("\n".join(lines[:64]) + "\n")
    return path


def agreement(
    llama: Process, model: Model, asked: list[Question], replies: list[Reply]
) -> tuple[float, float, int]:
    """llama.cpp's share of tokens and mean difference of log-probabilities, and the prompts it cuts alike."""
    tokenizer = model.tokenizer()
    texts = [tokenizer.render(question.messages, tools=question.tools) for question in asked]
    cut = llama.ask("tokens", texts=texts)
    alike = sum(mine == question.prompt for mine, question in zip(cut, asked, strict=True))
    same, gaps = 0, []
    for question, reply in zip(asked, replies, strict=True):
        scored = llama.ask("score", prompt=question.prompt, reply=reply.tokens)
        same += sum(best == token for (best, _), token in zip(scored, reply.tokens, strict=True))
        gaps += [abs(given - mine) for (_, given), mine in zip(scored, reply.logprobs, strict=True)]
    return same / len(gaps), sum(gaps) / len(gaps), alike


def main() -> None:
    args, report = arguments(__doc__), Report()
    python = environment(*LLAMA, note="pip compiles llama.cpp, which takes several minutes")
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = train(folder, args.quick)
        tokenizer, adapter = model.tokenizer(), adapter_of(model)
        llama = stack.enter_context(Process(python, SIDE, settings={"OMP_NUM_THREADS": str(os.cpu_count())}))
        for rows, what in ((None, "prompts"), (tickets(folder), "tickets")):
            asked = questions(rows, tokenizer, CONTEXT - TOKENS)
            replies = ask(model, adapter, tokenizer, asked, TOKENS, Computing(), lambda done, total: None)
            for kind in ("bf16", "q8_0"):
                path = folder / f"{what}-{kind}.gguf"
                given = ["--parity", rows] if rows else []
                spill(folder, "export", f"demo+{NAME}", "--to", path, "--type", kind, *given)
                record = msgspec.json.decode(
                    path.with_name(f"{path.stem}.export.json").read_bytes(), type=Record
                )
                llama.ask("open", path=str(path), length=CONTEXT)
                share, gap, alike = agreement(llama, model, asked, replies)
                parity = record.parity
                mine, difference = parity.agree / parity.tokens, parity.logprob_mean_difference
                report.add(f"{kind}, {what}, tokens", share, mine, "share", higher_is_better=True)
                report.add(f"{kind}, {what}, log-prob", gap, difference, "mean", higher_is_better=False)
                print(
                    f"  {record.parity.tokens} tokens; {alike} of {len(asked)} prompts are cut alike",
                    flush=True,
                )
    report.save(args.json)


if __name__ == "__main__":
    main()
