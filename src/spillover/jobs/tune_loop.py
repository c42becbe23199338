"""The loop of ``tune``: restore, step, save, until the last step or the next interruption."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from spillover.engine import MicroBatch, StepResult, Trainer
from spillover.engine.estimate import Traffic
from spillover.errors import Corrupt, EngineError, ModelError
from spillover.jobs.checkpoint import KIND, TuneRecord, read_checkpoint, write_checkpoint
from spillover.jobs.data import collate
from spillover.jobs.interrupts import Abandoned, Ending
from spillover.jobs.pace import Pace, Share
from spillover.jobs.saving import Saver
from spillover.jobs.schedule import lr_at
from spillover.jobs.tensorboard import EventFile
from spillover.models import initial
from spillover.models.lora import Adapter
from spillover.state import Reference

if TYPE_CHECKING:
    from spillover.jobs.job import Session
    from spillover.jobs.tune import TuneWork

__all__ = ["Trained", "Training"]

SAVE_SECONDS = 300.0
"""The most work that a slow model can lose, whatever the number of steps between checkpoints."""


@dataclass(frozen=True)
class Trained:
    """The adapter as it stands, and the loss of every step that led to it."""

    adapter: Adapter
    losses: list[float]


class Training:
    """One process's share of a tune: from the newest checkpoint to the end or the next interruption."""

    def __init__(self, work: TuneWork, session: Session) -> None:
        self.work = work
        self.session = session
        self.record = self._new_record()
        with session.interrupts.preparation():
            self._basis, self._trainer = self._restored()
        self._pace = Pace()
        self._share = Share(self.work.plan.speed)
        self._traffic = Traffic()
        self._saved = time.monotonic()
        self._in_save = (self.record.step, len(self.record.validation))
        self._curves = self._drawn()
        self._complain()

    def run(self) -> tuple[Ending, Trained]:
        """Train; afterwards everything that was done is durable, and complete if it was all."""
        with closing(self._curves), Saver(self.session.owned, KIND, self._basis, self._durable) as saver:
            try:
                ending = self._steps(saver)
            except (ModelError, EngineError):  # a weight file that is gone, say: the steps are still good
                self._save_if_worth(saver)
                raise
            saver.finish()
            if not self.session.interrupts.give_up:
                self._save_if_worth(saver)
        if ending is Ending.DONE:
            self.session.owned.complete({"step": self.record.step})
        params = self._trainer.state().params
        work = self.work
        adapter = Adapter(work.lora, params, work.model.ref.base, work.model.fingerprint)
        return ending, Trained(adapter, self.record.losses)

    def _steps(self, saver: Saver) -> Ending:
        """Step until the end or a reason to stop; an abandoned step leaves no trace."""
        quanta = 0
        try:
            while True:
                with self.session.interrupts.quantum():
                    self._validate_if_due()
                if self.record.step == self.work.steps.total:
                    return Ending.DONE
                if (ending := self.session.ending(quanta)) is not None:
                    return ending
                with self.session.interrupts.quantum():
                    self._step()
                quanta += 1
                saver.check()
                if self._save_is_due():
                    self._save(saver)
        except Abandoned:
            self.session.events.emit("stage", stage="abandoned", message="the unfinished step is given up")
            return self.session.interrupts.ending or Ending.PREEMPTED

    def _step(self) -> None:
        work, step = self.work, self.record.step
        numbers = work.steps.micro_batches_of(step)
        chosen = [work.order.batch(number) for number in numbers]
        settings = work.settings
        lr = lr_at(step, work.steps.total, settings.lr, settings.warmup, settings.schedule)
        batches = [self._micro_batch(indices) for indices in chosen]
        result = self._trainer.step(batches, lr=lr)
        # The trainer's update has called `finishing`: from here to the end this cannot be abandoned.
        self.record.advance(result.loss, numbers.stop)
        rows = [int(work.examples.rows[index]) for indices in chosen for index in indices]
        self._traffic += self._moved(batches, result.tokens)
        self._report(result, lr, rows, sum(int(batch.lengths.sum()) for batch in batches))

    def _moved(self, batches: Sequence[MicroBatch], targets: int) -> Traffic:
        """What a step moves and multiplies at least, as far as the plan knows the model's speed."""
        speed = self.work.plan.speed
        if speed is None:
            return Traffic()
        lengths = np.concatenate([batch.lengths for batch in batches])
        most = self.work.plan.pass_tokens
        passes = sum(-(-int(batch.lengths.sum()) // most) for batch in batches)
        return speed.trained(passes, int(lengths.sum()), targets, int((lengths**2).sum()) // 2)

    def _micro_batch(self, indices: np.ndarray) -> MicroBatch:
        return collate([self.work.examples.example(int(index)) for index in indices])

    def _report(self, result: StepResult, lr: float, rows: list[int], tokens: int) -> None:
        seconds = self._pace.add(tokens)
        remaining = self.work.steps.total - self.record.step
        self.session.events.emit(
            "step",
            step=self.record.step,
            total=self.work.steps.total,
            loss=result.loss,
            grad_norm=result.grad_norm,
            lr=lr,
            tokens=result.tokens,
            tokens_per_s=self._pace.per_second,
            step_s=round(seconds, 4),
            eta_s=self._pace.eta(remaining),
            rows=rows,
            **self._share.of(self._traffic),
        )
        self._complain()

    def _complain(self) -> None:
        if (message := self._curves.complaint()) is not None:
            self.session.events.emit("stage", stage="tensorboard", message=message)

    def _validate_if_due(self) -> None:
        """Measure the loss on the validation file at the end of each epoch, unless that is done."""
        validation, step = self.work.validation, self.record.step
        if validation is None or not self._validation_is_due():
            return
        batch = self.work.settings.batch
        groups = [
            range(start, min(start + batch, len(validation))) for start in range(0, len(validation), batch)
        ]
        loss = self._trainer.evaluate([collate([validation.example(i) for i in group]) for group in groups])
        message = f"validation loss {loss:.4f} after step {step}"
        with self.session.interrupts.finishing():  # what is kept is told, too
            self.record.validation.append((step, loss))
            self.session.events.emit("stage", stage="validation", step=step, loss=loss, message=message)

    def _validation_is_due(self) -> bool:
        step, per_epoch = self.record.step, self.work.order.per_epoch
        if self.work.validation is None or step == 0 or any(step == at for at, _ in self.record.validation):
            return False
        before, now = (self.work.steps.micro_batches_of(n).stop for n in (step - 2, step - 1))
        return now // per_epoch > before // per_epoch or step == self.work.steps.total

    def _save_is_due(self) -> bool:
        overdue = time.monotonic() - self._saved > SAVE_SECONDS
        return overdue or self.record.step % self.work.settings.ckpt_every == 0

    def _save(self, saver: Saver) -> None:
        self._saved = time.monotonic()
        self._in_save = (self.record.step, len(self.record.validation))
        state, record = self._trainer.state(), msgspec.json.encode(self.record)
        progress = {"step": state.step, "total": self.work.steps.total, "loss": self.record.losses[-1]}
        owned = self.session.owned
        saver.save(lambda: (write_checkpoint(owned, state, record), progress))

    def _save_if_worth(self, saver: Saver) -> None:
        """Save if a step or a validation came after the newest save."""
        if (self.record.step, len(self.record.validation)) != self._in_save:
            self._save(saver)
            saver.finish()

    def _durable(self, reference: Reference) -> None:
        uri = f"{self.session.owned.store.uri}/{reference.folder}"
        message = f"durable at {uri}, step {reference.step}"
        self.session.events.emit("checkpoint", step=reference.step, uri=uri, message=message)

    def _drawn(self) -> EventFile:
        """The event file of this process.

        A validation that is due again may have been drawn before. It is dropped with its whole step, which
        is then drawn anew.
        """
        step, again = self.record.step, self._validation_is_due()
        curves = EventFile(self.session.run.folder, first=step if again else step + 1)
        if again:
            s, known = self.work.settings, self.session.run.last_step(step) or {}
            lr = lr_at(step - 1, self.work.steps.total, s.lr, s.warmup, s.schedule)
            sure = {"event": "step", "step": step, "loss": self.record.losses[-1], "lr": lr}
            curves.record({"time": time.time()} | known | sure)
        self.session.events.add(curves.record)
        return curves

    def _restored(self) -> tuple[Reference | None, Trainer]:
        """The checkpoint to continue from, and a trainer that stands where it was written."""
        work, owned = self.work, self.session.owned
        loaded = work.engine.load(work.model, work.plan)
        start = initial(work.lora, work.model.config, work.settings.seed)
        trainer = loaded.trainer(work.lora, start, work.settings.optimizer, seed=work.settings.seed)
        trainer.protected = self.session.interrupts.finishing
        basis = self._basis_reference()
        if basis is not None:
            self.record, state = read_checkpoint(owned.open(basis))
            trainer.restore(state)
            message = f"continuing after step {state.step} of {work.steps.total}"
            uri = f"{owned.store.uri}/{basis.folder}"
            self.session.events.emit("restore", step=state.step, uri=uri, message=message)
        self.record.begin_range(work.plan, work.engine.version)
        return basis, trainer

    def _basis_reference(self) -> Reference | None:
        document = self.session.owned.document
        current = document.current.get(KIND)
        if not self.session.options.from_previous or current is None:
            return current
        previous = document.previous.get(KIND)
        if previous is None:
            raise Corrupt(f"{current.folder} is the only checkpoint", hint="start anew with another --state")
        lost = current.step - previous.step
        message = f"steps {previous.step + 1} to {current.step} are given up and computed again"
        self.session.events.emit("stage", stage="previous", message=message if lost else "nothing is lost")
        return previous

    def _new_record(self) -> TuneRecord:
        s, model = self.work.settings, self.work.model
        lora = self.work.lora
        return TuneRecord(
            seed=s.seed,
            model={"id": model.ref.spec, "weight_fingerprint": model.fingerprint},
            data={"sha256": self.work.summary.sha256, "rows": self.work.summary.rows},
            adapter={
                "rank": lora.rank,
                "alpha": lora.alpha,
                "dropout": lora.dropout,
                "targets": list(lora.targets),
            },
            hyperparameters={
                key: value
                for key, value in self.work.identity.items()
                if key not in ("command", "weights", "data", "rank", "alpha", "targets", "dropout", "seed")
            },
        )
