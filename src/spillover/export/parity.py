"""How far the exported files agree with the trained model, token by token of the trained model's own answers.

The exported files run in a process of their own (`spillover.export.check`), which gets the trained model's
replies and says at each position which token it would have said. Comparing under the trained model's words,
and not texts that part for good at the first near tie, makes every position count once.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec

from spillover.errors import ModelError
from spillover.export.answers import Computing, Question, Reply
from spillover.export.check import Outcome, Request, Scored

__all__ = ["Difference", "Parity", "judge", "lost", "measure"]

Report = Callable[[int, int], None]

TIE = 0.25
"""Nats between the two most likely tokens below which rounding may decide between them."""
_NAMED = 8
_PROGRESS = re.compile(r"(\d+) (\d+)")
"""Rows that an error names."""
_NOTICED = 0.01
"""A mean difference of log-probabilities below which an adapter has hardly learnt anything."""


class Difference(msgspec.Struct, frozen=True):
    """A row whose answer differs: how many of its tokens agree, and whether its prompt is the same.

    ``wrong`` of the others were no near ties.
    """

    row: str
    tokens: int
    agree: int
    wrong: int
    same_prompt: bool


class Parity(msgspec.Struct, frozen=True, kw_only=True):
    """The comparison: ``agreement`` is ``agree`` of ``tokens``; log-probabilities are those of these
    tokens."""

    rows: int
    tokens: int
    agree: int
    clear: int
    clear_agree: int
    agreement: float
    same_prompts: int
    logprob_mean_difference: float
    logprob_max_difference: float
    adapter_mean_difference: float | None
    differing: list[Difference]


def measure(
    exported: Path,
    scratch: Path,
    asked: list[Question],
    replies: list[Reply],
    computing: Computing,
    report: Report,
) -> Parity:
    """Run `exported`, a folder or a GGUF file, in a fresh process, and compare. `scratch` is left empty.

    Raises `ModelError` with the one line of that process when it cannot run the files.
    """
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        work = Path(folder) / "work"
        work.mkdir()
        request = Request(str(exported), str(work), asked, replies, computing.memory, computing.device)
        path = Path(folder) / "request.json"
        path.write_bytes(msgspec.json.encode(request))
        outcome = _run(path, report)
    if outcome.error is not None:
        raise ModelError(f"the exported files do not run: {outcome.error}", hint=outcome.hint)
    return _compare(asked, replies, outcome.rows)


def judge(parity: Parity, bound: float, *, kept: bool = True) -> None:
    """Raise `ModelError` unless enough tokens agree, naming rows that differ, and every prompt is the same.

    With `kept`, what the adapter changes must be there, too: see `lost`.
    """
    prompts = [one for one in parity.differing if not one.same_prompt]
    if prompts:
        raise ModelError(
            f"the export is refused: its tokenizer makes other tokens of {len(prompts)} of {parity.rows} "
            f"prompts: {_names(prompts)}",
            hint="export safetensors, which keeps the tokenizer as it is",
        )
    if parity.agreement < bound:
        worst = sorted(
            (one for one in parity.differing if one.wrong), key=lambda one: -one.wrong / one.tokens
        )
        raise ModelError(
            f"the export is refused: it agrees on {parity.clear_agree:,} of {parity.clear:,} clear tokens "
            f"({parity.agreement:.2%}, the bound is {bound:.2%}); {len(worst)} of {parity.rows} rows differ: "
            f"{_names(worst)}",
            hint="choose a wider --type, or a lower --bound",
        )
    if kept and lost(parity) and (parity.adapter_mean_difference or 0.0) >= _NOTICED:
        raise ModelError(
            f"the export is refused: the adapter changes log-probabilities by "
            f"{parity.adapter_mean_difference:.2g} on average, and the export is "
            f"{parity.logprob_mean_difference:.2g} off: what was trained is lost",
            hint="choose a wider --type, or give a --bound to go by that alone",
        )


def lost(parity: Parity) -> bool:
    """Whether the export is more than half as far from the trained model as the base without adapter is."""
    moved = parity.adapter_mean_difference
    return moved is not None and parity.logprob_mean_difference > moved / 2


def _names(rows: list[Difference]) -> str:
    named = ", ".join(one.row for one in rows[:_NAMED])
    return named + (f" and {len(rows) - _NAMED} more" if len(rows) > _NAMED else "")


def _run(request: Path, report: Report) -> Outcome:
    command = [sys.executable, "-m", "spillover.export.check", str(request)]
    # safe: what lies in the working folder is not what runs
    paths = os.pathsep.join(path for path in sys.path if path)
    environment = os.environ | {"PYTHONPATH": paths, "PYTHONSAFEPATH": "1"}
    with tempfile.TemporaryFile() as errors:
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment)
        try:
            assert child.stdout is not None
            last = ""
            for line in child.stdout:
                if line.startswith("{"):
                    last = line
                elif progress := _PROGRESS.fullmatch(line.strip()):
                    report(int(progress[1]), int(progress[2]))
            child.wait()
        finally:
            child.kill()  # an interruption must not leave it at work
            child.wait()
            if child.stdout is not None:
                child.stdout.close()
        errors.seek(0)
        said = errors.read().decode(errors="replace").strip().splitlines()
    if not last.startswith("{"):
        why = said[-1] if said else "without a word"
        raise ModelError(
            f"the process that runs the exported files ended with code {child.returncode}: {why}",
            hint="--memory 4GB if there was too little",
        )
    return msgspec.json.decode(last, type=Outcome)


def _compare(asked: list[Question], replies: list[Reply], rows: list[Scored]) -> Parity:
    differing, gaps, agree, wrong = [], [], 0, 0
    for question, reply, row in zip(asked, replies, rows, strict=True):
        same = [mine == theirs for mine, theirs in zip(reply.tokens, row.tokens, strict=True)]
        missed = sum(margin >= TIE and not one for margin, one in zip(reply.margins, same, strict=True))
        agree, wrong = agree + sum(same), wrong + missed
        gaps += [abs(mine - theirs) for mine, theirs in zip(reply.logprobs, row.logprobs, strict=True)]
        if not all(same) or not row.same_prompt:
            differing.append(Difference(question.id, len(same), sum(same), missed, row.same_prompt))
    clear = sum(margin >= TIE for reply in replies for margin in reply.margins)
    return Parity(
        rows=len(rows),
        tokens=len(gaps),
        agree=agree,
        clear=clear,
        clear_agree=clear - wrong,
        agreement=(clear - wrong) / clear if clear else agree / len(gaps),
        same_prompts=sum(row.same_prompt for row in rows),
        logprob_mean_difference=sum(gaps) / len(gaps),
        logprob_max_difference=max(gaps),
        adapter_mean_difference=_moved(replies),
        differing=differing,
    )


def _moved(replies: list[Reply]) -> float | None:
    """How far the adapter moves log-probabilities, on average."""
    gaps = [
        abs(mine - base)
        for reply in replies
        for mine, base in zip(reply.logprobs, reply.untrained, strict=False)  # without an adapter, none
    ]
    return sum(gaps) / len(gaps) if gaps else None
