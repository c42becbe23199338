"""``distill``: what a teacher says, or thinks of what was said, as rows that ``tune`` learns from.

A row job like ``run``: rows may finish in any order on any number of machines, and come out in the order of
the input, each once.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spillover.errors import InputError
from spillover.jobs.data import Row
from spillover.jobs.data.rows import Purpose
from spillover.jobs.results import Distilled, Format, Target, last_reply
from spillover.jobs.run import RunSettings, RunWork
from spillover.models import Tokenizer
from spillover.state import Identity

__all__ = ["DistillSettings"]

TOP = 20
"""Tokens whose log-probabilities are kept unless asked otherwise: of a usual model all but a percent."""


@dataclass(frozen=True)
class DistillSettings(RunSettings):
    """`RunSettings`, with log-probabilities always.

    ``score`` generates nothing: the rows' own replies are scored, the last one of each conversation.
    """

    logprobs: int | None = TOP
    score: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.samples != 1:
            raise InputError("distill writes one completion a row", hint="spill run --samples K")
        if self.logprobs is None:
            raise InputError("distill needs log-probabilities", hint=f"--logprobs {TOP}")

    @property
    def command(self) -> str:
        """What a person types for it."""
        return "distill"

    @property
    def purpose(self) -> Purpose:
        """What rows must have: with ``score`` a reply."""
        return "train" if self.score else "prompt"

    @property
    def more(self) -> Identity:
        """What its identity has beside the settings that all row jobs share."""
        return {"score": self.score}

    def answers(self, work: RunWork, run: str) -> Format:
        """How results are written down."""
        return Distilled(work.tokenizer, work.shared_facts(run), given=self.score)

    def published(self, line: bytes) -> bool:
        """Whether a result line goes to where people look: all that can be learned from."""
        return Distilled.learnable(line)

    def next(self, results: Path) -> str:
        """What to type after a finished job."""
        return f"spill tune MODEL {self.out or results} --name NAME"

    @property
    def how(self) -> str:
        """How rows are answered, for people."""
        return "given replies are scored" if self.score else super().how

    def decoding(self, row: Row) -> dict[str, Any]:
        """The decoding that applies to ``row``, which has as many log-probabilities as all or more."""
        found = super().decoding(row)
        return found | {"logprobs": max(found["logprobs"] or 0, self.logprobs or 0)}

    def target(self, row: Row, tokenizer: Tokenizer) -> Target | None:
        """With ``score``, the last reply of the conversation, through its end of turn."""
        if not self.score:
            return None
        before, reply = last_reply(row)
        # earlier replies are part of what was asked
        turns = [*({**message, "weight": 0} for message in before), {**reply, "weight": 1}]
        tokens, mask = tokenizer.training(turns, tools=row.tools)
        end = len(mask) - mask[::-1].index(True)
        start = mask.index(True)
        return Target(tuple(tokens[:start]), tuple(tokens[start:end]))
