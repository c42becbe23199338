"""From answers to scores. Rows stream by; what stays in memory is numbers.

Every pass reads the evals file and the answers of all models side by side, in the order of the file.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from spillover.errors import Corrupt, InputError
from spillover.evaluate import Judge, Metric, ScriptFault, Unfit, script_scores, verdict
from spillover.jobs.data import FileSummary, Row, read_rows
from spillover.jobs.kept import Answered
from spillover.jobs.scheme import Scheme, question_of
from spillover.jobs.segments import Segments

__all__ = ["Item", "Scores", "Sheet", "conversation_text"]

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Item:
    """A row with the answers of each model, and what the judge said of them.

    ``judged`` maps model and sample to the judge's words, None where it could not answer.
    """

    row: Row
    answers: list[Answered]
    judged: dict[tuple[int, int], str | None]


@dataclass(frozen=True)
class Scores:
    """``values`` ``[models, columns, rows, samples]``, NaN where there is no score; ``applies``
    ``[columns, rows]``: whether a row has that metric at all."""

    values: Floats
    applies: NDArray[np.bool_]

    def rows(self) -> Floats:
        """The mean of each row's samples that have a score, ``[models, columns, rows]``, NaN without any."""
        seen = ~np.isnan(self.values)
        counts = seen.sum(axis=3)
        sums = np.where(seen, self.values, 0.0).sum(axis=3)
        return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


class Sheet:
    """The evals file and all answers to it.

    Args:
        models: names, each with its results in ``answers`` at the same place.
    """

    def __init__(
        self,
        summary: FileSummary,
        scheme: Scheme,
        models: Sequence[str],
        answers: Sequence[Segments],
        samples: int,
    ) -> None:
        self.summary = summary
        self.scheme = scheme
        self.models = models
        self.samples = samples
        self._answers = answers
        self._judged: Segments | None = None

    def judged_by(self, segments: Segments) -> None:
        """From here on, items have what the judge said: its answers to `judge_rows`."""
        self._judged = segments

    def items(self) -> Iterator[Item]:
        """Every row with its answers.

        Raises:
            Corrupt: the answers are not those to the rows.
        """
        streams = [map(_decoded, segments.lines()) for segments in self._answers]
        said = map(_decoded, self._judged.lines()) if self._judged else None
        for row in read_rows(self.summary.path, "prompt", stamp=self.summary.stamp):
            answers = [next(stream, None) for stream in streams]
            found = [one for one in answers if one is not None and one.spillover.row == row.index]
            if len(found) < len(answers):
                raise Corrupt(f"{self.summary.path}:{row.line}: an answer is missing")
            judged = {} if said is None else self._said(row, found, said)
            yield Item(row, found, judged)
        for stream in (*streams, *([] if said is None else [said])):
            if next(stream, None) is not None:  # also what has the last segment's checksum compared
                raise Corrupt(f"{self.summary.path}: there are answers to more rows than it has")

    def judge_rows(self, judge: Judge) -> Iterator[bytes]:
        """A line to answer for each answer that the judge is to grade."""
        for item in self.items():
            asked = conversation_text(item.row)
            for model, sample in self._to_judge(item.row, item.answers):
                answer = item.answers[model].answers[sample].text
                prompt = judge.asking(asked, answer, item.row.expected)
                line = {"custom_id": f"{item.row.index}/{model}/{sample}", "prompt": prompt}
                yield msgspec.json.encode(line) + b"\n"

    def scores(self, script_timeout: float) -> Scores:
        """Score every answer; one that does not exist scores 0.

        Raises:
            InputError: a pattern, schema or script failed on an answer, with the row's file and line.
        """
        shape = len(self.scheme.columns), self.summary.rows
        values = np.full((len(self.models), *shape, self.samples), np.nan)
        scores = Scores(values, np.zeros(shape, np.bool_))
        for item in self.items():
            for column, metric in self.scheme.of(item.row):
                scores.applies[column, item.row.index] = True
                for model, answered in enumerate(item.answers):
                    cell = values[model, column, item.row.index]
                    cell[:] = 0.0 if answered.error is not None else self._cell(item, metric, model)
        for column, metric in enumerate(self.scheme.given):
            if metric.kind == "script":
                self._run(metric, column, script_timeout, values)
        return scores

    def _cell(self, item: Item, metric: Metric, model: int) -> list[float]:
        """The scores of a model's samples; NaN from a script, which runs later."""
        if metric.kind == "judge":
            said = [item.judged.get((model, sample)) for sample in range(self.samples)]
            graded = [None if text is None else verdict(text) for text in said]
            return [np.nan if score is None else score for score in graded]
        if metric.score is None:
            return [np.nan] * self.samples
        question = question_of(item.row)
        try:
            return [metric.score(one.text, question) for one in item.answers[model].answers]
        except Unfit as fault:
            where = f"{self.summary.path}:{item.row.line}"
            raise InputError(f"{where}: {fault.message} of {self.models[model]}", hint=fault.hint) from None

    def _run(self, metric: Metric, column: int, timeout: float, values: Floats) -> None:
        """Let a script score what it applies to."""
        places, lines = array("q"), array("q")

        def given() -> Iterator[bytes]:
            for item in self.items():
                if item.row.metric is not None:
                    continue
                for model, answered in enumerate(item.answers):
                    for sample in range(len(answered.answers)):
                        places.extend((model, item.row.index, sample))
                        lines.append(item.row.line)
                        yield msgspec.json.encode(_asked(item, self.models, model, sample))

        try:
            for number, score in enumerate(script_scores(Path(metric.argument), given(), timeout)):
                model, row, sample = places[3 * number : 3 * number + 3]
                values[model, column, row, sample] = score
        except ScriptFault as fault:
            where = f"{self.summary.path}:{lines[fault.number]}" if lines else str(self.summary.path)
            of = f" (the answer of {self.models[places[3 * fault.number]]})" if lines else ""
            raise InputError(
                f"{where}: {metric.argument} {fault.message}{of}",
                hint="repair the script and run the command again: no answer is computed twice",
            ) from None

    def _to_judge(self, row: Row, answers: list[Answered]) -> list[tuple[int, int]]:
        """Model and sample of the answers to a row that the judge grades."""
        if not any(metric.kind == "judge" for _, metric in self.scheme.of(row)):
            return []
        return [(m, s) for m, answered in enumerate(answers) for s in range(len(answered.answers))]

    def _said(
        self, row: Row, answers: list[Answered], said: Iterator[Answered]
    ) -> dict[tuple[int, int], str | None]:
        judged: dict[tuple[int, int], str | None] = {}
        for model, sample in self._to_judge(row, answers):
            line = next(said, None)
            if line is None or line.custom_id != f"{row.index}/{model}/{sample}":
                raise Corrupt(f"{self.summary.path}:{row.line}: a judge's answer is missing")
            judged[model, sample] = line.answers[0].text if line.answers else None
        return judged


def conversation_text(row: Row) -> str:
    """A row's conversation for people and judges: the user's words alone if that is all there is."""
    if len(row.messages) == 1:
        return _content(row.messages[0])
    return "\n\n".join(f"{message['role']}: {_content(message)}" for message in row.messages)


def _content(message: dict[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    rest = {key: value for key, value in message.items() if key not in ("role", "weight")}
    return msgspec.json.encode(rest).decode()


def _asked(item: Item, models: Sequence[str], model: int, sample: int) -> dict[str, Any]:
    """What a script is told of one answer."""
    return {
        "custom_id": item.row.id,
        "messages": item.row.messages,
        "expected": item.row.expected,
        "model": models[model],
        "sample": sample,
        "answer": item.answers[model].answers[sample].text,
    }


_decode = msgspec.json.Decoder(Answered).decode


def _decoded(line: bytes) -> Answered:
    try:
        return _decode(line)
    except msgspec.DecodeError as error:
        raise Corrupt(f"an answer is damaged: {error}") from None
