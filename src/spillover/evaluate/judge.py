"""A model that grades answers: what it is asked, and what it said."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spillover.errors import InputError
from spillover.evaluate.metrics import Question, Unfit
from spillover.evaluate.text import references

__all__ = ["Judge", "verdict"]

ASKING = """\
Grade an answer to a question.

Question:
{prompt}

Answer:
{answer}
"""
REFERENCE = """
Reference answer:
{expected}
"""
ENDING = """
Is the answer correct? Say why in one sentence, then end with one of these two lines:
Verdict: correct
Verdict: incorrect
"""

_PLACE = re.compile(r"\{(prompt|answer|expected)\}")
_VERDICT = re.compile(
    r"\bverdict\W{0,8}?(in\s*correct|correct|[-+]?[\d.]+(?:e[-+]?\d+)?)(?![\w.]*\w)", re.IGNORECASE
)
_WORD = {"correct": 1.0, "incorrect": 0.0}


@dataclass(frozen=True)
class Judge:
    """What a judge is asked about an answer; ``template`` empty stands for the built-in question."""

    template: str = ""

    @classmethod
    def read(cls, path: Path) -> Judge:
        """The question in a file, with ``{prompt}``, ``{answer}`` and ``{expected}`` where these go.

        Raises:
            InputError: it cannot be read, or does not show the answer.
        """
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "is not UTF-8"
            raise InputError(f"--judge-prompt {path}: {reason}", hint="name a text file") from None
        if "{answer}" not in text:
            raise InputError(f"--judge-prompt {path} has no {{answer}}: the judge would not see it")
        return cls(text)

    def check(self, question: Question) -> None:
        """Raise `Unfit` for a row that lacks what the question shows."""
        if "{expected}" in self.template and question.expected is None:
            raise Unfit("the judge's prompt shows {expected}, which the row lacks", hint="add 'expected'")

    def asking(self, prompt: str, answer: str, expected: Any) -> str:
        """The question about one answer. What is put in is not looked through for further places."""
        template = self.template or ASKING + (ENDING if expected is None else REFERENCE + ENDING)
        texts = references(expected) or [_shown(expected)]
        values = {"prompt": prompt, "answer": answer, "expected": " / ".join(texts)}
        return _PLACE.sub(lambda place: values[place[1]], template)


def verdict(text: str) -> float | None:
    """The score in what a judge said: its last ``Verdict: correct``, ``incorrect`` or number from 0 to 1.

    The word alone counts too. None if there is no verdict, or one out of range.
    """
    if (alone := text.strip().strip(".*\"'").lower()) in _WORD:
        return _WORD[alone]
    found = _VERDICT.findall(text)
    if not found:
        return None
    said = "".join(found[-1].lower().split())
    if said in _WORD:
        return _WORD[said]
    try:
        score = float(said.rstrip("."))
    except ValueError:
        return None
    return score if math.isfinite(score) and 0 <= score <= 1 else None


def _shown(value: Any) -> str:
    import msgspec

    return "" if value is None else msgspec.json.encode(value).decode()
