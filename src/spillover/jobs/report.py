"""What an evaluation leaves behind: a report, every score, and the rows on which models differ."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

from spillover.evaluate import RESAMPLES, compared, intervals, pass_at
from spillover.jobs.scoring import Floats, Item, Scores, Sheet, conversation_text

__all__ = ["Evaluated", "Report", "disagreement_lines", "disagreements", "report_of", "score_lines", "table"]


class Evaluated(msgspec.Struct, frozen=True):
    """A model: its name, what it is, and how many rows it has answers to, and has none to."""

    model: str
    weights: str
    adapter: str | None
    answered: int
    failed: int


class Score(msgspec.Struct, frozen=True):
    """The mean of one model on one metric over ``n`` rows, with its 95 % interval.

    ``unscored`` counts answers without a score; rows without any are not in ``n``. ``pass_at`` has, for k
    samples where scores are 0 or 1, the mean chance that one of k is right.
    """

    model: str
    metric: str
    n: int
    unscored: int
    mean: float | None
    low: float | None
    high: float | None
    pass_at: dict[str, float]


class Compared(msgspec.Struct, frozen=True):
    """How far a model is ahead of the baseline on the ``n`` rows on which both have a score.

    ``better`` and ``worse`` count rows; ``p`` is McNemar's, where all scores are 0 or 1.
    """

    model: str
    baseline: str
    metric: str
    n: int
    difference: float | None
    low: float | None
    high: float | None
    better: int
    worse: int
    p: float | None


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """``report.json``: the same answers have the same report, to the byte."""

    run: str
    evals: str
    input: str
    rows: int
    samples: int
    decoding: dict[str, Any]
    judge: str | None
    resamples: int = RESAMPLES
    models: tuple[Evaluated, ...]
    scores: tuple[Score, ...]
    comparisons: tuple[Compared, ...]
    disagreements: int
    spill_report: int = 1


def report_of(
    sheet: Sheet, scores: Scores, models: tuple[Evaluated, ...], baseline: int, **facts: Any
) -> Report:
    """The report on ``scores``; ``facts`` are the fields that do not follow from them."""
    rows = scores.rows()
    return Report(
        input=sheet.summary.sha256,
        evals=str(sheet.summary.path),
        rows=sheet.summary.rows,
        samples=sheet.samples,
        models=models,
        scores=tuple(_scores(sheet, scores, rows)),
        comparisons=tuple(_comparisons(sheet, rows, baseline)),
        disagreements=int(_differing(rows).sum()),
        **facts,
    )


def disagreements(scores: Scores) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Whether two models differ on a row in some metric, ``[rows]``; no score differs from any."""
    return _differing(scores.rows())


def _differing(rows: Floats) -> np.ndarray[Any, np.dtype[np.bool_]]:
    first = rows[:1]
    same = (rows == first) | (np.isnan(rows) & np.isnan(first))
    found: np.ndarray[Any, np.dtype[np.bool_]] = ~same.all(axis=(0, 1))
    return found


def score_lines(sheet: Sheet, scores: Scores) -> Iterator[bytes]:
    """``scores.jsonl``: a line for each row, model, sample and metric, in the order of the input."""
    for item in sheet.items():
        for model, name in enumerate(sheet.models):
            for sample in range(sheet.samples):
                for column, metric in sheet.scheme.of(item.row):
                    line = {"custom_id": item.row.id, "row": item.row.index, "model": name, "sample": sample}
                    line["metric"] = sheet.scheme.columns[column]
                    line["score"] = _number(scores.values[model, column, item.row.index, sample])
                    line["answer"] = _answer(item, model, sample)
                    if metric.kind == "judge":
                        line["judge"] = item.judged.get((model, sample))
                    yield msgspec.json.encode(line) + b"\n"


def disagreement_lines(sheet: Sheet, scores: Scores) -> Iterator[bytes]:
    """``disagreements.jsonl``: a line for each row on which models differ, in the order of the input."""
    differing = disagreements(scores)
    for item in sheet.items():
        if differing[item.row.index]:
            line = {
                "custom_id": item.row.id,
                "row": item.row.index,
                "prompt": conversation_text(item.row),
                "expected": item.row.expected,
                "models": [_opinion(sheet, scores, item, model) for model in range(len(sheet.models))],
            }
            yield msgspec.json.encode(line) + b"\n"


def table(report: Report) -> list[str]:
    """The report for people: models down, metrics across, then the comparisons."""
    metrics = list(dict.fromkeys(score.metric for score in report.scores))
    cells = {(score.model, score.metric): _cell(score) for score in report.scores}
    lines = [["model", *metrics]]
    lines += [[one.model, *(cells[one.model, metric] for metric in metrics)] for one in report.models]
    widths = [max(len(line[place]) for line in lines) for place in range(len(lines[0]))]
    shown = [
        "  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]
    return (
        shown
        + [_passes(one) for one in report.scores if one.pass_at]
        + [_said(one) for one in report.comparisons]
    )


def _scores(sheet: Sheet, scores: Scores, rows: Floats) -> Iterator[Score]:
    places = [(m, c) for m in range(len(sheet.models)) for c in range(len(sheet.scheme.columns))]
    columns = [rows[place][~np.isnan(rows[place])] for place in places]
    for (m, c), column, found in zip(places, columns, intervals(columns), strict=True):
        values = scores.values[m, c][scores.applies[c]]
        yield Score(
            model=sheet.models[m],
            metric=sheet.scheme.columns[c],
            n=int(column.size),
            unscored=int(np.isnan(values).sum()),
            mean=float(column.mean()) if column.size else None,
            low=found[0] if found else None,
            high=found[1] if found else None,
            pass_at=_pass_at(values, sheet.samples),
        )


def _pass_at(values: Floats, samples: int) -> dict[str, float]:
    """pass@k for k = 1, 2, 4, ... and all samples; of rows whose samples all have a score of 0 or 1."""
    values = values[~np.isnan(values).any(axis=1)]
    if samples == 1 or not values.size or not np.isin(values, (0.0, 1.0)).all():
        return {}
    right = values.sum(axis=1).astype(np.int64)
    powers = [1 << n for n in range(samples.bit_length()) if 1 << n < samples]
    return {str(k): float(pass_at(right, samples, k).mean()) for k in [*powers, samples]}


def _comparisons(sheet: Sheet, rows: Floats, baseline: int) -> Iterator[Compared]:
    others = [m for m in range(len(sheet.models)) if m != baseline]
    places = [(m, c) for m in others for c in range(len(sheet.scheme.columns))]
    found = compared([(rows[m, c], rows[baseline, c]) for m, c in places])
    for (m, c), one in zip(places, found, strict=True):
        yield Compared(
            model=sheet.models[m],
            baseline=sheet.models[baseline],
            metric=sheet.scheme.columns[c],
            n=one.n,
            difference=one.difference,
            low=one.interval[0] if one.interval else None,
            high=one.interval[1] if one.interval else None,
            better=one.better,
            worse=one.worse,
            p=one.p,
        )


def _opinion(sheet: Sheet, scores: Scores, item: Item, model: int) -> dict[str, Any]:
    """What one model answered to a row and got for it."""
    found = {
        sheet.scheme.columns[column]: [
            _number(value) for value in scores.values[model, column, item.row.index]
        ]
        for column, _ in sheet.scheme.of(item.row)
    }
    answers = [_answer(item, model, sample) for sample in range(sheet.samples)]
    return {"model": sheet.models[model], "answers": answers, "scores": found}


def _answer(item: Item, model: int, sample: int) -> str | None:
    answers = item.answers[model].answers
    return answers[sample].text if answers else None


def _number(value: float) -> float | None:
    return None if math.isnan(value) else float(value)


def _cell(score: Score) -> str:
    if score.mean is None or score.low is None or score.high is None:
        shown = "no score"
    else:
        shown = f"{score.mean:.3f} [{score.low:.3f}, {score.high:.3f}] n={score.n:,}"
    return f"{shown}, {score.unscored:,} unscored" if score.unscored else shown


def _passes(score: Score) -> str:
    shown = ", ".join(f"pass@{k} {value:.3f}" for k, value in score.pass_at.items())
    return f"{score.model} {score.metric}: {shown}"


def _said(one: Compared) -> str:
    if one.difference is None or one.low is None or one.high is None:
        return f"{one.model} against {one.baseline}, {one.metric}: no row has a score of both"
    p = "" if one.p is None else f", p = {one.p:.2g}"
    return (
        f"{one.model} against {one.baseline}, {one.metric}: {one.difference:+.3f} "
        f"[{one.low:+.3f}, {one.high:+.3f}], better on {one.better:,} rows, worse on {one.worse:,}{p}"
    )
