"""Which metrics score which rows."""

from __future__ import annotations

from functools import lru_cache

from spillover.errors import InputError
from spillover.evaluate import Judge, Metric, Question, Unfit, parse_metric
from spillover.jobs.data import FileSummary, Row, read_rows

__all__ = ["Scheme", "question_of"]


class Scheme:
    """The metrics of the command line, and those that rows name themselves.

    A row with a metric of its own is scored by that alone, in the column of its kind.

    Attributes:
        columns: what scores are reported under: metrics as they were written, then kinds that rows name.
    """

    def __init__(self, specs: tuple[str, ...], judge: Judge | None) -> None:
        self.judge = judge
        self._given = [parse_metric(spec) for spec in specs]
        self.columns = [*specs]
        if judge is None and any(metric.kind == "judge" for metric in self._given):
            raise InputError("--metric judge needs a model that judges", hint="--judge MODEL")

    @property
    def given(self) -> list[Metric]:
        """The metrics of the command line."""
        return self._given

    def of(self, row: Row) -> list[tuple[int, Metric]]:
        """The metrics of a row, each with its column; `Unfit` if the row names none that there is."""
        if row.metric is None:
            return [*enumerate(self._given)]
        metric = _own(row.metric)
        if metric.kind not in self.columns:
            self.columns.append(metric.kind)
        return [(self.columns.index(metric.kind), metric)]

    def check(self, summary: FileSummary) -> None:
        """Look at every row; `InputError` with file and line for the first that cannot be scored."""
        for row in read_rows(summary.path, "prompt", stamp=summary.stamp):
            try:
                self._check(row)
            except Unfit as fault:
                raise InputError(f"{summary.path}:{row.line}: {fault.message}", hint=fault.hint) from None

    def _check(self, row: Row) -> None:
        for _, metric in self.of(row):
            metric.check(question_of(row))
            if metric.kind == "judge":
                if self.judge is None:
                    raise Unfit("the row asks for a judge", hint="--judge MODEL")
                self.judge.check(question_of(row))


def question_of(row: Row) -> Question:
    """What a row knows of its right answer."""
    return Question(row.expected, row.schema)


@lru_cache(1024)
def _own(spec: str) -> Metric:
    """A metric that a row names. Data must not choose files, least of all to run."""
    kind, _, argument = spec.partition(":")
    if kind in ("script", "json_schema") and argument:
        raise Unfit(f"a row cannot name a file, as in {spec!r}", hint=f"--metric {kind}:FILE")
    try:
        return parse_metric(spec)
    except InputError as error:
        raise Unfit(str(error), hint=error.hint) from None
