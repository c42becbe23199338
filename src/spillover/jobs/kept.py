"""Answers as they are kept for scoring: every sample with its tokens, found again by what decides it.

An answer's key is the sha256 of all that it is a function of: the model's fingerprint, the adapter, the
conversation and its tools, and the decoding; with a temperature also the row's id, which draws its random
numbers. Rows with equal keys have equal answers, in whichever file and place they stand.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from spillover.engine import Completion
from spillover.jobs.data import Row
from spillover.jobs.results import Format, RowFailure, text_of
from spillover.jobs.run import Inputs, RunSettings, RunWork
from spillover.models import Tokenizer
from spillover.state import Identity

__all__ = ["Answer", "AnswerSettings", "Answered", "Kept", "KeptCompletion", "answer_key"]

Key = Callable[[Row, dict[str, Any]], str]


class Answer(msgspec.Struct, frozen=True):
    """One sample. ``by`` says what computed it: engine, version, device and numerics."""

    text: str
    token_ids: list[int]
    finish_reason: str
    by: str


class Mark(msgspec.Struct, frozen=True):
    """The row's number in its file, and the key of its answers; empty where there are none."""

    row: int
    key: str = ""


class Answered(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line of kept answers: those of one row, or why it has none."""

    custom_id: str
    spillover: Mark
    answers: tuple[Answer, ...] = ()
    prompt_tokens: int = 0
    error: dict[str, str] | None = None


@dataclass
class KeptCompletion(Completion):
    """A completion that was computed before, by ``by``."""

    by: str = ""


@dataclass(frozen=True)
class AnswerSettings(RunSettings):
    """`RunSettings` of one model whose answers are to be scored."""

    @property
    def command(self) -> str:
        """What a person types for it."""
        return "eval"

    @property
    def more(self) -> Identity:
        """What its identity has beside the settings that all row jobs share."""
        return {}

    def decoding(self, row: Row) -> dict[str, Any]:
        """The decoding that applies to ``row``; log-probabilities are of no use here."""
        return super().decoding(row) | {"logprobs": None}

    def answers(self, work: RunWork, run: str) -> Format:
        """How results are written down."""
        plan = work.plan
        by = f"{plan.engine} {work.engine.version}, {plan.device}, {plan.numerics}"
        return Kept(work.tokenizer, by, answer_key(work))


@dataclass(frozen=True)
class Kept:
    """Builds lines of kept answers, each an `Answered`."""

    tokenizer: Tokenizer
    by: str
    key: Key

    def line(self, row: Row, completions: list[Completion], decoding: dict[str, Any]) -> tuple[str, bytes]:
        """The first sample's text, and the line for a row with one completion a sample."""
        answers = tuple(
            Answer(
                text_of(self.tokenizer, one, decoding["stop"]),
                one.tokens,
                one.finish,
                one.by if isinstance(one, KeptCompletion) else self.by,
            )
            for one in completions
        )
        mark = Mark(row.index, self.key(row, decoding))
        line = Answered(row.id, mark, answers, completions[0].prompt_tokens)
        return answers[0].text, msgspec.json.encode(line)

    def failure(self, row: Row, failure: RowFailure) -> bytes:
        """The line for a row that cannot be answered."""
        error = {"code": failure.code, "message": failure.message}
        return msgspec.json.encode(Answered(row.id, Mark(row.index), error=error))


def answer_key(inputs: Inputs) -> Key:
    """A function from a row and its decoding to the key of its answers by this model."""
    identity = inputs.identity
    maker = [identity["weights"], identity["adapter"]]
    encode = msgspec.json.Encoder(order="deterministic").encode

    def key(row: Row, decoding: dict[str, Any]) -> str:
        names = ["max_tokens", "stop", "temperature"]
        drawn = None
        if decoding["temperature"] > 0:
            names += ["top_p", "top_k", "min_p", "seed"]
            drawn = row.id
        chosen = {name: decoding[name] for name in names}
        chosen["temperature"] = float(chosen["temperature"])
        return hashlib.sha256(encode([maker, row.messages, row.tools, chosen, drawn])).hexdigest()

    return key
