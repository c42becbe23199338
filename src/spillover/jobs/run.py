"""``run``: answers to the rows of a file, one finished row a quantum.

Rows may finish in any order, on any number of machines one after the other; the results come out in the
order of the input, each row once. What was begun and not finished keeps its tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

import numpy as np

from spillover.engine import Engine, Plan, Sampling, engine
from spillover.engine.estimate import Generation
from spillover.errors import InputError, ModelError
from spillover.jobs.answering import Answering, Tally
from spillover.jobs.data import FileSummary, Row, check_file, read_rows
from spillover.jobs.data.rows import Purpose
from spillover.jobs.events import Events
from spillover.jobs.interrupts import Abandoned, Ending, Interrupts
from spillover.jobs.job import (
    JobOptions,
    Result,
    done_so_far,
    open_session,
    recorded,
    rehearsed,
    reporter,
    run_for,
    unprepared,
)
from spillover.jobs.pace import forecast
from spillover.jobs.results import Answers, Format, Target
from spillover.jobs.runs import JobFile, Run, atomic_file
from spillover.jobs.segments import KIND, Segments
from spillover.models import Adapter, Model, Tokenizer, resolve
from spillover.models import adapters as adapter_folders
from spillover.state import Control, Identity, State
from spillover.store import Store

__all__ = ["Inputs", "RunSettings", "RunWork", "adapter_of", "digest", "inputs_of", "planned", "run_rows"]

ROUND = 64
"""Sequence lengths are planned in steps of this many tokens."""


@dataclass(frozen=True)
class RunSettings:
    """What to answer and how. A row's own decoding options win over these."""

    model: str
    data: Path
    out: Path | None = None
    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    samples: int = 1
    batch: int = 64

    @property
    def command(self) -> str:
        """What a person types for it."""
        return "run"

    @property
    def purpose(self) -> Purpose:
        """What rows must have."""
        return "prompt"

    @property
    def more(self) -> Identity:
        """What its identity has beside the settings that all row jobs share."""
        return {}

    def answers(self, work: RunWork, run: str) -> Format:
        """How results are written down."""
        return Answers(work.model.ref.spec, work.tokenizer, work.shared_facts(run))

    @property
    def how(self) -> str:
        """How rows are answered, for people."""
        return "greedy" if self.temperature == 0 else f"temperature {self.temperature:g}, seed {self.seed}"

    def published(self, line: bytes) -> bool:
        """Whether a result line goes to where people look."""
        return True

    def next(self, results: Path) -> str:
        """What to type after a finished job."""
        return f"head -n 1 {results}"

    def target(self, row: Row, tokenizer: Tokenizer) -> Target | None:
        """What a row is to say, where that is given; None: the model decides."""
        return None

    def __post_init__(self) -> None:
        limits = {
            "--max-tokens": (self.max_tokens, self.max_tokens >= 1),
            "--temperature": (self.temperature, 0 <= self.temperature <= 100),
            "--top-p": (self.top_p, 0 < self.top_p <= 1),
            "--top-k": (self.top_k, self.top_k >= 0),
            "--min-p": (self.min_p, 0 <= self.min_p < 1),
            "--logprobs": (self.logprobs, self.logprobs is None or 0 <= self.logprobs <= 64),
            "--samples": (self.samples, self.samples >= 1),
            "--batch": (self.batch, self.batch >= 1),
        }
        for flag, (value, allowed) in limits.items():
            if not allowed:
                raise InputError(f"{flag} {value} makes no sense", hint=f"spill {self.command} --help")
        if self.out is not None and self.out.is_dir():
            raise InputError(f"--out {self.out} is a folder", hint="name a file")
        if self.samples > 1 and self.temperature == 0:
            raise InputError(f"{self.samples} samples at temperature 0 are the same", hint="--temperature 1")

    def decoding(self, row: Row) -> dict[str, Any]:
        """The decoding that applies to ``row``."""
        own = row.options

        def first(value: Any, otherwise: Any) -> Any:
            return otherwise if value is None else value

        return {
            "max_tokens": first(row.max_tokens, self.max_tokens),
            "temperature": first(own.temperature, self.temperature),
            "top_p": first(own.top_p, self.top_p),
            "top_k": first(own.top_k, self.top_k),
            "min_p": first(own.min_p, self.min_p),
            "seed": first(own.seed, self.seed),
            "stop": list(first(own.stop, self.stop)),
            "logprobs": first(own.logprobs, self.logprobs),
        }

    def sampling(self, decoding: dict[str, Any]) -> Sampling:
        return Sampling(*(decoding[key] for key in ("temperature", "top_p", "top_k", "min_p", "seed")))


@dataclass
class Extent:
    """Sums over rows: tokens of their prompts and of the longest answers they may have.

    Where replies are given they count as prompts, and ``scored`` is their tokens. ``longest`` is the most
    that a row takes with its answer, ``shared`` what all prompts begin with.
    """

    rows: int = 0
    prompts: int = 0
    answers: int = 0
    scored: int = 0
    longest: int = 0
    shared: list[int] = field(default_factory=list)

    def add(self, prompt: list[int], answer: int, scored: int = 0) -> None:
        """Count a row."""
        if not self.rows:
            self.shared = prompt
        elif prompt[: len(self.shared)] != self.shared:
            pairs = zip(prompt, self.shared, strict=False)
            self.shared = self.shared[: sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))]
        self.rows += 1
        self.prompts += len(prompt)
        self.answers += answer
        self.scored += scored
        self.longest = max(self.longest, len(prompt) + answer)


@dataclass(frozen=True)
class Inputs:
    """What a row job is given, checked and resolved."""

    settings: RunSettings
    model: Model
    adapter: Adapter | None
    summary: FileSummary

    @property
    def identity(self) -> Identity:
        """What makes this the same work on any engine and machine."""
        s = self.settings
        return s.more | {
            "command": s.command,
            "weights": self.model.fingerprint,
            "adapter": digest(self.adapter) if self.adapter else None,
            "input": self.summary.sha256,
            "max_tokens": s.max_tokens,
            "temperature": s.temperature,
            "top_p": s.top_p,
            "top_k": s.top_k,
            "min_p": s.min_p,
            "seed": s.seed,
            "stop": list(s.stop),
            "logprobs": s.logprobs,
            "samples": s.samples,
        }


@dataclass(frozen=True)
class RunWork(Inputs):
    """Inputs and the model's plan: all there is before state is touched."""

    tokenizer: Tokenizer
    engine: Engine
    plan: Plan
    extent: Extent

    @property
    def facts(self) -> dict[str, Any]:
        """What the run's manifest says beside the identity."""
        return {
            "model": self.model.ref.spec,
            "data": str(self.summary.path),
            "rows": self.summary.rows,
            "engine": self.plan.engine,
            "device": self.plan.device,
            "numerics": self.plan.numerics,
            "plan": self.plan.why,
        }

    def shared_facts(self, run: str) -> dict[str, Any]:
        """What the result lines of a run have in common."""
        return {
            "run": run,
            "model": self.model.ref.spec,
            "weights": self.model.fingerprint,
            "input": self.summary.sha256,
            "engine": f"{self.plan.engine} {self.engine.version}",
            "device": self.plan.device,
            "numerics": self.plan.numerics,
        }

    @property
    def total(self) -> int:
        """Rows in all."""
        return self.summary.rows

    def line(self, state: str, done: int) -> str:
        """The line before the work: what, with what, how much, how long, where to."""
        s = self.settings
        parts = [
            f"{s.command} {self.model.ref.spec} ({self.model.bytes / 1e6:,.0f} MB), {self.plan.why}",
            f"{self.summary.rows:,} rows, {self.plan.batch} at a time of up to {self.plan.sequence:,} tokens",
            s.how,
            *self._forecast(self.summary.rows - done),
            f"state at {state}",
        ]
        return "; ".join(parts)

    def _forecast(self, rows: int) -> list[str]:
        """What bounds the rest of the run, and how long that takes at most, if the machine was measured."""
        speed, extent, samples = self.plan.speed, self.extent, self.settings.samples
        if speed is None or not extent.rows or rows < 1:
            return []
        work = Generation(
            rows=rows * samples,
            prompt=extent.prompts / extent.rows,
            answer=extent.answers / extent.rows,
            batch=self.plan.batch,
            pass_tokens=self.plan.pass_tokens,
            shared=len(extent.shared),
            scored=extent.scored / extent.rows,
        )
        condition = " if every answer takes all its tokens" if extent.answers else ""
        return [forecast(speed.generation(work), rows, "rows", condition)]


def run_rows(settings: RunSettings, options: JobOptions, events: Events, job: JobFile) -> Result:
    """Answer every row of ``settings.data``, or continue to.

    Raises:
        InputError, ModelError, EngineError: something given cannot be used; nothing was written.
        Mismatch: the state belongs to other work.
        LockContended: another process is at it.
        Superseded: another process took over.
    """
    with Interrupts(headless=options.headless) as interrupts:
        try:
            with interrupts.preparation():
                inputs = inputs_of(settings, options, events)
                label = f"{inputs.model.ref.spec}-{settings.data.stem}"
                run, store = run_for(settings.command, label, inputs.identity, options)
                document = recorded(store, inputs.identity, options)
                if document is not None and document.status == "completed" and not options.dry_run:
                    return _already_complete(inputs, run, store, document)
                work = planned(inputs, options, events)
                events.engine = work.plan.engine
                if options.dry_run:
                    return rehearsed(work, store.uri, done_so_far(document))
            with open_session(job, run, store, work, options, events, interrupts) as session:
                ending, segments = Answering(work, session).run()
                if ending is not Ending.PREEMPTED:
                    _write_results(settings, run, segments)
        except Abandoned:
            return unprepared(interrupts)
    message = f"{ending.value}: {Tally.of(segments).line(work.total)}"
    if ending is Ending.DONE:
        return Result(ending, f"{message}; {run.results}", settings.next(run.results), run)
    message += f"; durable at {store.uri}"
    return Result(ending, message, "the same command continues", run, interrupts.signal)


def inputs_of(
    settings: RunSettings, options: JobOptions, events: Events, summary: FileSummary | None = None
) -> Inputs:
    """Check and resolve everything that the settings name; ``summary`` is of the file if it was checked."""
    if summary is None:
        events.emit("stage", stage="input", message=f"reading {settings.data}")
        summary = check_file(settings.data, settings.purpose)
    model = resolve(settings.model, weights=options.weights, report=reporter(events))
    return Inputs(settings, model, adapter_of(model), summary)


def planned(inputs: Inputs, options: JobOptions, events: Events) -> RunWork:
    """Measure the rows and ask the engine how it will answer them."""
    settings, model, summary = inputs.settings, inputs.model, inputs.summary
    tokenizer = model.tokenizer()
    computing = engine(options.engine)
    rows = read_rows(settings.data, settings.purpose, stamp=summary.stamp)
    context = model.config.max_positions
    extent = _extent(rows, settings, tokenizer, context, events)
    longest = min(context, -(-max(extent.longest, ROUND) // ROUND) * ROUND)
    batch = min(settings.batch, summary.rows * settings.samples)
    worn = inputs.adapter.config if inputs.adapter else None
    plan = computing.plan(model, options.asking("generate", batch, longest, worn, events))
    return RunWork(settings, model, inputs.adapter, summary, tokenizer, computing, plan, extent)


def adapter_of(model: Model) -> Adapter | None:
    """The adapter that the model's name asks for, checked against the base."""
    names = model.ref.adapters
    if not names:
        return None
    if len(names) > 1:
        raise InputError(f"{model.ref.spec} names {len(names)} adapters", hint="name one")
    adapter = adapter_folders.load(names[0])
    adapter.check(model.config, fingerprint=model.fingerprint, name=names[0])
    return adapter


def digest(adapter: Adapter) -> str:
    """The sha256 of what an adapter does: its scale, names, shapes and values."""
    sha = hashlib.sha256(repr(adapter.config.scale).encode())
    for name, array in sorted(adapter.tensors.items()):
        sha.update(f"{name}{array.shape}".encode())
        sha.update(np.ascontiguousarray(array).data)
    return sha.hexdigest()


def _extent(
    rows: Iterator[Row], settings: RunSettings, tokenizer: Tokenizer, context: int, events: Events
) -> Extent:
    """Measure the rows that the context can hold with their answers."""
    extent, count = Extent(), 0
    while batch := [*islice(rows, 1000)]:
        for row in batch:
            try:
                prompt, answer, scored = _tokens(row, settings, tokenizer)
            except ModelError as error:  # the chat template refuses the conversation
                raise ModelError(f"{settings.data}:{row.line}: {error}", hint=error.hint) from None
            if len(prompt) + answer <= context:
                extent.add(prompt, answer, scored)
        count += len(batch)
        if count % 20_000 == 0:
            events.emit("stage", stage="input", message=f"{count:,} rows measured")
    return extent


def _tokens(row: Row, settings: RunSettings, tokenizer: Tokenizer) -> tuple[list[int], int, int]:
    """What is computed at once for a row, the most tokens that follow one by one, and those to score."""
    target = settings.target(row, tokenizer)
    if target is not None:
        return [*target.prompt, *target.tokens], 0, len(target.tokens)
    return tokenizer.prompt_ids(row.messages, tools=row.tools), row.max_tokens or settings.max_tokens, 0


def _already_complete(inputs: Inputs, run: Run, store: Store, document: Control) -> Result:
    segments = Segments(State(store).open, document.current[KIND])
    _write_results(inputs.settings, run, segments)
    message = f"already complete: {Tally.of(segments).line(inputs.summary.rows)}; {run.results}"
    return Result(Ending.DONE, message, inputs.settings.next(run.results), run)


def _write_results(settings: RunSettings, run: Run, segments: Segments) -> None:
    """Put the results, in the order of the input, where people look for them."""
    for path in (run.results, *([settings.out] if settings.out is not None else [])):
        atomic_file(path, filter(settings.published, segments.lines()))
