"""``eval``: the answers of some models to one file, scored and compared.

Each model's answers are a row job like ``run``, with durable state of its own, so that they are computed
once, whatever interrupts them and whatever is asked of them later. A judge is one more such job, over a file
made of the answers. Scores follow from the answers: they are computed anew each time, and take seconds.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from spillover.errors import InputError
from spillover.evaluate import Judge
from spillover.jobs.answering import Answering, Tally
from spillover.jobs.data import FileSummary, check_file
from spillover.jobs.events import Events
from spillover.jobs.interrupts import Abandoned, Ending, Interrupts
from spillover.jobs.job import (
    JobOptions,
    Result,
    Session,
    done_so_far,
    owning,
    recorded,
    rehearsal,
    unprepared,
)
from spillover.jobs.kept import AnswerSettings
from spillover.jobs.report import (
    Evaluated,
    Report,
    disagreement_lines,
    report_of,
    score_lines,
    table,
)
from spillover.jobs.reuse import recalling, store_of
from spillover.jobs.run import Inputs, RunWork, inputs_of, planned
from spillover.jobs.runs import JobFile, Run, atomic_file, run_id
from spillover.jobs.scheme import Scheme
from spillover.jobs.scoring import Sheet
from spillover.jobs.segments import KIND, Segments
from spillover.models import parse
from spillover.state import Identity, State
from spillover.store import Store

__all__ = ["EvalSettings", "evaluate"]

ANSWERS = "answers"
DEFAULT_METRIC = "exact_match"


@dataclass(frozen=True)
class EvalSettings:
    """Which models answer what, and how the answers are scored. A row's own options and metric win."""

    data: Path
    models: tuple[str, ...]
    metric: tuple[str, ...] = ()
    baseline: str | None = None
    judge: str | None = None
    judge_prompt: Path | None = None
    judge_max_tokens: int = 256
    script_timeout: float = 60.0
    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    samples: int = 1
    batch: int = 64

    def __post_init__(self) -> None:
        help_ = "spill eval --help"
        if not self.models:
            raise InputError("eval needs a model", hint=f"spill eval {self.data} demo")
        for given, what in ((self.models, "model"), (self.metric, "--metric")):
            if twice := next((one for one in given if given.count(one) > 1), None):
                raise InputError(f"{what} {twice} is given twice", hint="name it once")
        if self.baseline is not None and self.baseline not in self.models:
            raise InputError(
                f"--baseline {self.baseline} is none of the models", hint=f"--baseline {self.models[0]}"
            )
        if self.judge_prompt is not None and self.judge is None:
            raise InputError("--judge-prompt needs a judge", hint="--judge MODEL")
        if self.judge_max_tokens < 1:
            raise InputError(f"--judge-max-tokens {self.judge_max_tokens} makes no sense", hint=help_)
        if not (self.script_timeout > 0 and math.isfinite(self.script_timeout)):
            raise InputError(f"--script-timeout {self.script_timeout} makes no sense", hint=help_)
        self.answering(self.models[0])

    def answering(self, model: str) -> AnswerSettings:
        """How one model answers."""
        names = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "samples", "batch")
        return AnswerSettings(model, self.data, **{name: getattr(self, name) for name in names})

    def judging(self, data: Path) -> AnswerSettings:
        """How the judge answers what it is asked in ``data``."""
        assert self.judge is not None
        return AnswerSettings(self.judge, data, max_tokens=self.judge_max_tokens, batch=self.batch)

    @cached_property
    def metrics(self) -> tuple[str, ...]:
        """What rows without a metric of their own are scored by."""
        judged = ("judge",) if self.judge is not None and "judge" not in self.metric else ()
        return (*self.metric, *judged) or (DEFAULT_METRIC,)


@dataclass
class Evaluation:
    """One evaluation: what it is given, where its answers are, and the process's part in it."""

    settings: EvalSettings
    options: JobOptions
    events: Events
    job: JobFile
    interrupts: Interrupts
    summary: FileSummary
    judge: Judge | None
    scheme: Scheme
    parts: list[Inputs]
    quanta: int = 0
    begun: bool = False
    planned: dict[str, RunWork] = field(default_factory=dict)

    @property
    def root(self) -> str:
        """Where the answers of all models are durable."""
        return self.options.state or str(self.options.runs / ANSWERS)

    @cached_property
    def identity(self) -> Identity:
        """What the report is a function of."""
        s = self.settings
        first = self.parts[0].identity
        models = [[part.identity["weights"], part.identity["adapter"]] for part in self.parts]
        return {key: value for key, value in first.items() if key not in ("weights", "adapter")} | {
            "models": [[name, *which] for name, which in zip(s.models, models, strict=True)],
            "metrics": [*s.metrics],
            "files": [_sha256(Path(m.argument)) for m in self.scheme.given if m.kind in FILED and m.argument],
            "baseline": s.baseline or s.models[0],
            "judge": s.judge and [s.judge, s.judge_max_tokens, self.judge and self.judge.template],
        }

    @cached_property
    def run(self) -> Run:
        label = f"{self.settings.data.stem}-{'-'.join(self.settings.models)}"
        return Run(self.options.runs / run_id("eval", label, self.identity))

    def facts(self, work: RunWork | None) -> dict[str, Any]:
        """What the run's manifest says beside the identity."""
        facts: dict[str, Any] = {
            "model": ", ".join(self.settings.models),
            "data": str(self.summary.path),
            "rows": self.summary.rows,
        }
        return facts if work is None else {**work.facts, **facts, "answering": work.model.ref.spec}

    def store(self, part: Inputs) -> Store:
        return store_of(self.root, part)

    def done(self, part: Inputs) -> int | None:
        """How many rows of a part are durable; None if it is complete.

        Raises:
            Mismatch: other work is there.
        """
        document = recorded(self.store(part), part.identity, self.options)
        return None if document is not None and document.status == "completed" else done_so_far(document)

    def results(self, part: Inputs) -> Segments:
        """The answers of a part that is complete."""
        state = State(self.store(part))
        document = state.read()
        assert document is not None
        return Segments(state.open, document.current[KIND])


FILED = ("script", "json_schema")


def evaluate(settings: EvalSettings, options: JobOptions, events: Events, job: JobFile) -> Result:
    """Let every model answer, or continue to; then score, compare and write the report.

    Raises:
        InputError, ModelError, EngineError: something given cannot be used; nothing was begun. InputError
            also for a metric that fails on an answer, with the row's file and line.
        LockContended: another process is at the same answers.
        Superseded: another process took over.
    """
    with Interrupts(headless=options.headless) as interrupts:
        try:
            with interrupts.preparation():
                work = _prepared(settings, options, events, job, interrupts)
                if options.dry_run:
                    return _rehearsed(work)
            return _evaluated(work)
        except Abandoned:
            return unprepared(interrupts)


def _prepared(
    settings: EvalSettings, options: JobOptions, events: Events, job: JobFile, interrupts: Interrupts
) -> Evaluation:
    """Check and resolve everything that the settings name, and plan what is left to answer."""
    for name in (*settings.models, *([settings.judge] if settings.judge else [])):
        parse(name)
    judge = None
    if settings.judge is not None:
        judge = Judge.read(settings.judge_prompt) if settings.judge_prompt else Judge()
    scheme = Scheme(settings.metrics, judge)
    events.emit("stage", stage="input", message=f"reading {settings.data}")
    summary = check_file(settings.data, "prompt")
    scheme.check(summary)
    parts = [inputs_of(settings.answering(name), options, events, summary) for name in settings.models]
    if settings.judge is not None:  # its file does not exist yet, but the model must
        inputs_of(settings.judging(settings.data), options, events, summary)
    work = Evaluation(settings, options, events, job, interrupts, summary, judge, scheme, parts)
    for part in parts:
        if work.done(part) is not None:
            work.planned[part.settings.model] = planned(part, options, events)
    return work


def _rehearsed(work: Evaluation) -> Result:
    """What would be done, for each model that has rows left."""
    lines: list[str] = []
    for part in work.parts:
        name, done = part.settings.model, work.done(part)
        if done is None:
            lines.append(f"{name}: all {part.summary.rows:,} rows are answered")
            continue
        with recalling(work.root, part, lambda message: None) as known:
            if known.rows > done:
                lines.append(f"{name}: answers to {known.rows:,} rows are taken over")
                done = known.rows
        lines += rehearsal(work.planned[name], work.store(part).uri, done)
    lines.append("nothing was begun")
    return Result(Ending.DONE, "\n".join(lines), "the same command without --dry-run", None)


def _evaluated(work: Evaluation) -> Result:
    """Answer what is left, judge, score, and write."""
    status = "failed"
    try:
        result = _through(work)
        status = "completed" if result.ending is Ending.DONE else "stopped"
        return result
    except Abandoned:
        status = "stopped"
        if not work.begun:
            raise
        ending = work.interrupts.ending or Ending.PREEMPTED
        message = f"{ending.value}; every finished answer is durable at {work.root}"
        return Result(ending, message, "the same command continues", work.run, work.interrupts.signal)
    finally:
        if work.begun:
            work.run.end(status, {"seconds": work.events.seconds})


def _through(work: Evaluation) -> Result:
    for part in work.parts:
        if (stopped := _answered(work, part)) is not None:
            return stopped
    answers = [work.results(part) for part in work.parts]
    sheet = Sheet(work.summary, work.scheme, work.settings.models, answers, work.settings.samples)
    if (stopped := _judged(work, sheet)) is not None:
        return stopped
    return _scored(work, sheet, answers)


def _answered(work: Evaluation, part: Inputs) -> Result | None:
    """Answer the rows of one part; how it ended before its last row, or None."""
    if (done := work.done(part)) is None:
        return None
    store, options = work.store(part), work.options
    if options.stop_after is not None:
        if work.quanta >= options.stop_after:
            return _stopped(work, part, Ending.STOPPED, done, store)
        options = replace(options, stop_after=options.stop_after - work.quanta)
    ending, rows = _computed(work, part, store, options)
    gc.collect()  # the weights of one model go before those of the next come
    return None if ending is Ending.DONE else _stopped(work, part, ending, rows, store)


def _computed(work: Evaluation, part: Inputs, store: Store, options: JobOptions) -> tuple[Ending, int]:
    """Own the answers of a part and work on them; how that ended, and how many rows there are."""

    def report(message: str) -> None:
        work.events.emit("stage", stage="reuse", message=message)

    with contextlib.ExitStack() as stack:
        with work.interrupts.preparation():
            plan = work.planned.pop(part.settings.model, None)
            if plan is None or plan.settings != part.settings:
                plan = planned(part, options, work.events)
            known = stack.enter_context(recalling(work.root, part, report))
        if known.rows:
            report(f"{part.settings.model} has answered {known.rows:,} of these rows before")
        owned = stack.enter_context(owning(store, part.identity, options, work.events, work.interrupts))
        _begin(work, plan, store.uri, max(done_so_far(owned.document), known.rows))
        answering = Answering(plan, Session(owned, work.run, work.events, work.interrupts, options), known)
        ending, segments = answering.run()
        work.quanta += answering.quanta
        return ending, Tally.of(segments).done


def _begin(work: Evaluation, plan: RunWork, uri: str, done: int) -> None:
    """Record that this process works on the run, and on which part of it."""
    _record(work, uri, work.facts(plan))
    work.events.engine = plan.plan.engine
    work.events.emit("start", message=plan.line(uri, done), run=work.run.id, state=uri, total=plan.total)


def _record(work: Evaluation, uri: str, facts: dict[str, Any]) -> None:
    work.run.begin(work.job, uri, work.identity, facts)
    if not work.begun:
        work.begun = True
        work.events.add(work.run.record)


def _stopped(work: Evaluation, part: Inputs, ending: Ending, rows: int, store: Store) -> Result:
    message = f"{ending.value}: {part.settings.model} has answered {rows:,} of {part.summary.rows:,} rows"
    message += f"; durable at {store.uri}"
    return Result(ending, message, "the same command continues", work.run, work.interrupts.signal)


def _judged(work: Evaluation, sheet: Sheet) -> Result | None:
    """Let the judge grade the answers; how that ended before its last one, or None."""
    if work.judge is None or "judge" not in work.scheme.columns:
        return None
    path = work.run.folder / "judge.jsonl"
    with work.interrupts.preparation():
        # Another process may have it open: it would not go on with rows that changed under it.
        atomic_file(path, sheet.judge_rows(work.judge), keep_equal=True)
        if not path.stat().st_size:  # no answer to grade
            return None
        part = inputs_of(work.settings.judging(path), work.options, work.events)
    stopped = _answered(work, part)
    if stopped is None:
        sheet.judged_by(work.results(part))
    return stopped


def _scored(work: Evaluation, sheet: Sheet, answers: list[Segments]) -> Result:
    """Score the answers and write everything down, the report last."""
    run, rows = work.run, work.summary.rows
    if not work.begun:
        uri = work.store(work.parts[-1]).uri
        _record(work, uri, work.facts(None))
        message = f"every answer is at {work.root}"
        work.events.emit("start", message=message, run=run.id, state=uri, total=rows)
    with work.interrupts.preparation():
        work.events.emit("stage", stage="scoring", message=f"scoring {rows:,} rows")
        scores = sheet.scores(work.settings.script_timeout)
        report = report_of(sheet, scores, _models(work, answers), _baseline(work), **_given(work))
        atomic_file(run.folder / "disagreements.jsonl", disagreement_lines(sheet, scores))
        atomic_file(run.folder / "scores.jsonl", score_lines(sheet, scores))
        atomic_file(run.folder / "report.json", [_pretty(report)])
    looked = "disagreements" if report.disagreements else "scores"
    message = f"done: {rows:,} rows, {len(sheet.models)} model{'s' if len(sheet.models) > 1 else ''}"
    if len(sheet.models) > 1:
        message += f", which differ on {report.disagreements:,} rows"
    return Result(
        Ending.DONE,
        f"{message}; {run.folder / 'report.json'}",
        f"head -n 1 {run.folder / looked}.jsonl",
        run,
        details=tuple(table(report)),
        document=msgspec.json.encode(report),
    )


def _models(work: Evaluation, answers: list[Segments]) -> tuple[Evaluated, ...]:
    def one(part: Inputs, segments: Segments) -> Evaluated:
        failed, identity = segments.cursor.failed, part.identity
        answered = part.summary.rows - failed
        return Evaluated(part.settings.model, identity["weights"], identity["adapter"], answered, failed)

    return tuple(map(one, work.parts, answers))


def _baseline(work: Evaluation) -> int:
    models = work.settings.models
    return models.index(work.settings.baseline or models[0])


def _given(work: Evaluation) -> dict[str, Any]:
    """The parts of the report that were given."""
    names = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop")
    decoding = {name: getattr(work.settings, name) for name in names}
    return {"run": work.run.id, "decoding": decoding, "judge": work.settings.judge}


def _pretty(report: Report) -> bytes:
    return msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n"


def _sha256(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None
