"""``tune``: a LoRA adapter, one optimizer step a quantum.

A run is a function of its identity (`TuneWork.identity`), so it may stop after
any step, on any machine, and the next one continues from the newest checkpoint. Whatever is not in the
identity (engine, device, numerics, machine) may change on the way and is recorded.
"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

from spillover.engine import Engine, Optimizer, Plan, engine
from spillover.engine.estimate import Tuning
from spillover.errors import InputError, ModelError
from spillover.jobs.checkpoint import KIND, read_checkpoint
from spillover.jobs.data import FileSummary, Order, TrainingSet, check_file
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
from spillover.jobs.runs import JobFile, Run
from spillover.jobs.schedule import Schedule, Steps
from spillover.jobs.tune_loop import Trained, Training
from spillover.models import LoraConfig, Model, Tokenizer, parse, parse_targets, resolve
from spillover.models import adapters as adapter_folders
from spillover.models.lora import Adapter
from spillover.state import Control, Identity, State
from spillover.store import Store

__all__ = ["Loss", "TuneSettings", "TuneWork", "tune"]

Loss: TypeAlias = Literal["text", "kl"]


@dataclass(frozen=True)
class TuneSettings:
    """What to train and how. ``epochs`` and ``steps`` exclude each other; neither means one epoch.

    ``loss`` text learns what rows say, kl what a teacher held likely at each of its tokens. A validation file
    is measured by what it says either way, so that the two can be compared.
    """

    model: str
    data: Path
    name: str
    rank: int = 16
    alpha: float = 32.0
    targets: str = "all"
    dropout: float = 0.0
    lr: float = 1e-4
    schedule: Schedule = "cosine"
    warmup: float = 0.03
    weight_decay: float = 0.01
    clip: float = 1.0
    epochs: float | None = None
    steps: int | None = None
    loss: Loss = "text"
    batch: int = 4
    grad_accum: int = 1
    max_seq: int = 2048
    seed: int = 0
    ckpt_every: int = 50
    val: Path | None = None
    overwrite: bool = False

    def __post_init__(self) -> None:
        limits = {
            "--lr": (self.lr, 0 < self.lr < 10),
            "--warmup": (self.warmup, 0 <= self.warmup <= 1),
            "--weight-decay": (self.weight_decay, 0 <= self.weight_decay < 1),
            "--clip": (self.clip, self.clip >= 0),
            "--batch": (self.batch, self.batch >= 1),
            "--grad-accum": (self.grad_accum, self.grad_accum >= 1),
            "--max-seq": (self.max_seq, self.max_seq >= 8),
            "--ckpt-every": (self.ckpt_every, self.ckpt_every >= 1),
        }
        for flag, (value, allowed) in limits.items():
            if not allowed:
                raise InputError(f"{flag} {value} makes no sense", hint="spill tune --help")
        if self.schedule not in ("cosine", "linear", "constant"):
            raise InputError(f"--schedule {self.schedule} is unknown", hint="cosine, linear or constant")
        if self.loss not in ("text", "kl"):
            raise InputError(f"--loss {self.loss} is unknown", hint="text or kl")

    @property
    def lora(self) -> LoraConfig:
        return LoraConfig(self.rank, self.alpha, parse_targets(self.targets), self.dropout)

    @property
    def optimizer(self) -> Optimizer:
        return Optimizer(self.weight_decay, self.clip)


@dataclass(frozen=True)
class TuneWork:
    """Checked inputs, the order of the data and the model's plan: all there is before state is touched."""

    settings: TuneSettings
    model: Model
    summary: FileSummary
    examples: TrainingSet
    validation: TrainingSet | None
    order: Order
    steps: Steps
    engine: Engine
    plan: Plan

    @property
    def lora(self) -> LoraConfig:
        """The adapter's configuration, by the names of the model's own modules."""
        return self.settings.lora.on(self.model.config)

    @property
    def identity(self) -> Identity:
        """What makes this the same work on any engine and machine."""
        s = self.settings
        more: Identity = {} if s.loss == "text" else {"loss": s.loss}
        return more | {
            "command": "tune",
            "weights": self.model.fingerprint,
            "data": self.summary.sha256,
            "steps": self.steps.total,
            "learning_rate": s.lr,
            "schedule": s.schedule,
            "warmup": s.warmup,
            "weight_decay": s.weight_decay,
            "clip": s.clip,
            "batch": s.batch,
            "grad_accum": s.grad_accum,
            "max_seq": s.max_seq,
            "rank": s.rank,
            "alpha": s.alpha,
            "targets": ",".join(self.lora.targets),
            "dropout": s.dropout,
            "seed": s.seed,
        }

    @property
    def facts(self) -> dict[str, Any]:
        """What the run's manifest says beside the identity."""
        return {
            "name": self.settings.name,
            "model": self.model.ref.spec,
            "data": str(self.summary.path),
            "rows": self.summary.rows,
            "examples": len(self.examples),
            "engine": self.plan.engine,
            "device": self.plan.device,
            "numerics": self.plan.numerics,
            "plan": self.plan.why,
        }

    @property
    def total(self) -> int:
        """Optimizer steps in all."""
        return self.steps.total

    def line(self, state: str, done: int) -> str:
        """The line before the work: what, with what, how much, how long, where to."""
        s, longest = self.settings, int(self.examples.lengths.max())
        accumulated = f" x {s.grad_accum}" if s.grad_accum > 1 else ""
        parts = [
            f"tune {self.model.ref.spec} ({self.model.bytes / 1e6:,.0f} MB), {self.plan.why}",
            f"{len(self.examples):,} examples of up to {longest:,} tokens",
            *self.examples.notes(),
            f"{self.steps.total:,} steps of {s.batch}{accumulated}, rank {s.rank}, lr {s.lr:g} {s.schedule}"
            + (", loss KL(teacher || student)" if s.loss == "kl" else ""),
            *self._forecast(self.steps.total - done),
            f"state at {state}",
        ]
        return "; ".join(parts)

    def _forecast(self, steps: int) -> list[str]:
        """What bounds the rest of the tune, and how long that takes, if the machine was measured."""
        speed, examples = self.plan.speed, self.examples
        if speed is None or steps < 1:
            return []
        sequences = len(examples) / self.order.per_epoch
        sites = self.lora.sites(self.model.config)
        work = Tuning(
            steps=steps,
            micro_batches=round(self.steps.micro_batches * steps / self.steps.total),
            sequences=sequences,
            length=examples.tokens / len(examples),
            targets=sequences * examples.targets / len(examples),
            adapter=self.lora.rank * sum(inputs + outputs for _, _, inputs, outputs in sites),
            pass_tokens=self.plan.pass_tokens,
            recompute=self.plan.recompute,
        )
        return [forecast(speed.tuning(work), steps, "steps")]


def tune(settings: TuneSettings, options: JobOptions, events: Events, job: JobFile) -> Result:
    """Train the adapter ``settings.name``, or continue to.

    Raises:
        InputError, ModelError, EngineError: something given cannot be used; nothing was written.
        Mismatch: the state belongs to other work.
        LockContended: another process is at it.
        Superseded: another process took over.
    """
    with ExitStack() as cleanup, Interrupts(headless=options.headless) as interrupts:
        try:
            with interrupts.preparation():
                work = _work(settings, options, events, cleanup)
                run, store = run_for("tune", settings.name, work.identity, options)
                document = recorded(store, work.identity, options)
                events.engine = work.plan.engine
                if options.dry_run:
                    if document is None or document.status != "completed":
                        adapter_folders.check_name(settings.name, overwrite=settings.overwrite)
                    return rehearsed(work, store.uri, done_so_far(document))
                if document is not None and document.status == "completed":
                    return _already_complete(work, run, store, document)
                adapter_folders.check_name(settings.name, overwrite=settings.overwrite)
            session = open_session(job, run, store, work, options, events, interrupts)
            ending, trained = Training(work, cleanup.enter_context(session)).run()
        except Abandoned:
            return unprepared(interrupts)
        result = _result(work, run, store, ending, trained)
        return replace(result, signal=interrupts.signal)


def _result(work: TuneWork, run: Run, store: Store, ending: Ending, trained: Trained) -> Result:
    message = f"{ending.value} at step {len(trained.losses)} of {work.steps.total}"
    if ending is not Ending.DONE:
        return Result(ending, f"{message}; durable at {store.uri}", "the same command continues", run)
    settings = work.settings
    folder = adapter_folders.save(settings.name, trained.adapter, overwrite=settings.overwrite)
    return Result(ending, f"{message}, final loss {trained.losses[-1]:.4f}; {folder}", _next(work), run)


def _work(settings: TuneSettings, options: JobOptions, events: Events, cleanup: ExitStack) -> TuneWork:
    """Check and resolve everything that the settings name."""
    if parse(settings.model).adapters:
        raise InputError(f"{settings.model} already has an adapter", hint="name the base model alone")
    adapter_folders.check_name(settings.name, overwrite=True)
    events.emit("stage", stage="input", message=f"reading {settings.data}")
    lora = settings.lora
    summary = check_file(settings.data, "train")
    model = resolve(settings.model, weights=options.weights, report=reporter(events))
    lora = lora.on(model.config)
    tokenizer = model.tokenizer()
    if settings.loss == "kl" and summary.shape != "distill":
        raise InputError(
            f"{settings.data} has {summary.shape} rows, --loss kl learns from a teacher's",
            hint=f"spill distill TEACHER {settings.data} --out taught.jsonl",
        )
    vocabulary = model.config.vocab_size if settings.loss == "kl" else None
    examples = cleanup.enter_context(_examples(settings, settings.data, tokenizer, summary, vocabulary))
    validation = None
    if settings.val is not None:
        checked = check_file(settings.val, "train")
        validation = cleanup.enter_context(_examples(settings, settings.val, tokenizer, checked))
    order = Order(examples.lengths, settings.batch, settings.seed)
    epochs = 1.0 if settings.epochs is None and settings.steps is None else settings.epochs
    steps = Steps.of(order.per_epoch, epochs=epochs, steps=settings.steps, grad_accum=settings.grad_accum)
    computing = engine(options.engine)
    longest = max(int(part.lengths.max()) for part in (examples, validation) if part is not None)
    plan = computing.plan(model, options.asking("train", settings.batch, longest, lora, events))
    return TuneWork(settings, model, summary, examples, validation, order, steps, computing, plan)


def _examples(
    settings: TuneSettings,
    path: Path,
    tokenizer: Tokenizer,
    summary: FileSummary,
    vocabulary: int | None = None,
) -> TrainingSet:
    """Rows as tokens, with what a teacher held of them where the `vocabulary` of the model is given."""
    scratch, stamp = Path(tempfile.gettempdir()), summary.stamp
    return TrainingSet.build(path, tokenizer, settings.max_seq, scratch, stamp=stamp, vocabulary=vocabulary)


def _already_complete(work: TuneWork, run: Run, store: Store, document: Control) -> Result:
    """Install the adapter of a finished run again, if it is not there as it was."""
    reference = document.current[KIND]
    record, state = read_checkpoint(State(store).open(reference))
    adapter = Adapter(work.lora, state.params, work.model.ref.base, work.model.fingerprint)
    message = f"already complete: step {record.step}, final loss {record.losses[-1]:.4f}"
    if not _is_installed(work.settings.name, adapter):
        folder = adapter_folders.save(work.settings.name, adapter, overwrite=work.settings.overwrite)
        message += f"; installed {folder}"
    return Result(Ending.DONE, message, _next(work), run)


def _is_installed(name: str, adapter: Adapter) -> bool:
    """Whether the adapter called ``name`` is exactly this one."""
    try:
        found = adapter_folders.load(name)
    except ModelError:
        return False
    same_names = found.config == adapter.config and found.tensors.keys() == adapter.tensors.keys()
    return same_names and all(
        np.array_equal(found.tensors[key], adapter.tensors[key]) for key in found.tensors
    )


def _next(work: TuneWork) -> str:
    return f"spill run {work.model.ref.base}+{work.settings.name} sample"
