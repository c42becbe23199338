"""The loop of ``run``: begin rows, collect answers, save, until the last row or the next interruption."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any

from spillover.engine import Completion, Request, Scheduler
from spillover.engine.estimate import Traffic
from spillover.errors import EngineError, InputError, ModelError
from spillover.jobs.data import Row, read_rows
from spillover.jobs.interrupts import Abandoned, Ending
from spillover.jobs.pace import Pace, Share
from spillover.jobs.results import RowFailure, Target
from spillover.jobs.saving import Saver
from spillover.jobs.segments import KIND, Cursor, Line, Segments
from spillover.models import StreamDecoder
from spillover.state import Reference

if TYPE_CHECKING:
    from spillover.jobs.job import Session
    from spillover.jobs.run import RunWork

__all__ = ["Answering", "Known", "Tally"]

SAVE_ROWS = 25
SAVE_SECONDS = 60.0
TAKEN_ROWS = 4000
"""Rows that need no computing are saved so many at a time."""

Known = Callable[[Row, dict[str, Any]], dict[int, Completion]]
"""Finished samples of a row with its decoding that are known already, by their numbers."""


@dataclass
class Tally:
    """Counts over all results so far, by this process and those before."""

    done: int = 0
    failed: int = 0
    expected: int = 0
    matched: int = 0
    tokens: int = 0

    @classmethod
    def of(cls, segments: Segments) -> Tally:
        cursor = segments.cursor
        return cls(segments.done, cursor.failed, cursor.expected, cursor.matched, cursor.tokens)

    def line(self, total: int) -> str:
        """For people: ``100 of 100 rows, 82 of 100 as expected, 1 failed``."""
        parts = [f"{self.done:,} of {total:,} rows"]
        if self.expected:
            parts.append(f"{self.matched:,} of {self.expected:,} as expected")
        if self.failed:
            parts.append(f"{self.failed:,} failed")
        return ", ".join(parts)


@dataclass
class _Open:
    """A row that was begun, with the samples that are finished."""

    row: Row
    decoding: dict[str, Any]
    prompt: tuple[int, ...]
    target: Target | None = None
    completions: dict[int, Completion] = field(default_factory=dict)


class Answering:
    """One process's share of a run: from what is durable to the end or the next interruption."""

    def __init__(self, work: RunWork, session: Session, known: Known = lambda row, decoding: {}) -> None:
        self.work = work
        self.session = session
        self._known = known
        self._segments = self._restored()
        self._tally = Tally.of(self._segments)
        self._next = self._segments.cursor.next
        self._unfinished = {
            *self._segments.cursor.open
        }  # rows begun and not done, by earlier processes or this
        self._partials = dict(self._segments.partials)  # of rows that are not finished yet
        self._open: dict[int, _Open] = {}
        self._requests: dict[str, tuple[int, int]] = {}  # request id -> row number, sample
        self._fresh: list[Line] = []
        self._answers = work.settings.answers(work, session.run.id)
        self._pace = Pace()
        self._share = Share(work.plan.speed)
        self._traffic = Traffic()
        self._saved = time.monotonic()
        self._quanta = 0
        self._ending: Ending | None = None
        self._scheduler: Scheduler | None = None

    @property
    def quanta(self) -> int:
        """Rows that this process computed."""
        return self._quanta

    def run(self) -> tuple[Ending, Segments]:
        """Answer; afterwards everything that was finished is durable, and complete if it was all."""
        with Saver(self.session.owned, KIND, self._segments.newest, self._durable) as saver:
            try:
                ending = self._answer(saver)
            except (ModelError, EngineError, InputError):
                # a weight file that is gone, say: what was answered is still good
                self._save_if_worth(saver)
                raise
            saver.finish()
            if not self.session.interrupts.give_up:
                self._save_if_worth(saver)
        self._scheduler = None  # the weights need not wait for the garbage collector
        if ending is Ending.DONE:
            self.session.owned.complete(self._progress())
        return ending, self._segments

    def _answer(self, saver: Saver) -> Ending:
        requests = self._begin(saver)
        try:
            with self.session.interrupts.quantum():
                first = next(requests, None)
        except Abandoned:
            return self._abandoned()
        if first is None:  # nothing is left to compute
            return self._ending or Ending.DONE
        if self._fresh:
            self._save(saver)
        scheduler = self._loaded(saver)
        try:
            return self._compute(scheduler, chain([first], requests), saver)
        except Abandoned:
            return self._abandoned()

    def _abandoned(self) -> Ending:
        self.session.events.emit("stage", stage="abandoned", message="the pass under way is given up")
        return self.session.interrupts.ending or Ending.PREEMPTED

    def _loaded(self, saver: Saver) -> Scheduler:
        """The weights in memory, ready to answer."""
        work = self.work
        with self.session.interrupts.preparation():
            loaded = work.engine.load(work.model, work.plan, [work.adapter] if work.adapter else [])
            self._scheduler = Scheduler(
                loaded,
                stream=lambda: StreamDecoder(work.tokenizer),
                should_stop=lambda: self._between_passes(saver),
            )
        return self._scheduler

    def _compute(self, scheduler: Scheduler, requests: Iterator[Request], saver: Saver) -> Ending:
        completions = scheduler.run(requests)
        self._pace, self._share = Pace(), Share(self.work.plan.speed)
        while True:
            with self.session.interrupts.quantum():
                completion = next(completions, None)
            self._traffic = scheduler.traffic
            if completion is None:
                return self._ending or Ending.DONE
            self._finish(completion)
            if len(self._fresh) >= SAVE_ROWS:
                self._save(saver)

    def _between_passes(self, saver: Saver) -> bool:
        """Whether to stop; and a save now and then, however long a row takes."""
        if time.monotonic() - self._saved > SAVE_SECONDS:
            self._save(saver)
        saver.check()
        self._ending = self.session.ending(self._quanta)
        return self._ending is not None

    def _begin(self, saver: Saver) -> Iterator[Request]:
        """Requests for the rows that earlier processes left unfinished, then for those never begun.

        Rows of which all is known are done on the way.
        """
        settings, summary = self.work.settings, self.work.summary
        start = min([*self._unfinished, self._next])
        pending, begun = set(self._unfinished), self._next
        for row in read_rows(settings.data, settings.purpose, start=start, stamp=summary.stamp):
            if row.index < begun and row.index not in pending:
                continue
            self._unfinished.add(row.index)  # first: what lies before `_next` and is not in here is done
            self._next = max(self._next, row.index + 1)
            opened = self._opened(row)
            self._open[row.index] = opened
            if len(opened.completions) == settings.samples:
                self._take(opened)
                if len(self._fresh) >= TAKEN_ROWS and self._between_takes(saver):
                    return
                continue
            need = len(opened.prompt) + opened.decoding["max_tokens"]
            if need > self.work.plan.sequence:
                del self._open[row.index]
                self._fail(row, need)
                continue
            for sample in range(settings.samples):
                if sample not in opened.completions:
                    yield self._request(opened, sample)

    def _between_takes(self, saver: Saver) -> bool:
        """Save what was taken; whether to stop."""
        self._save(saver)
        self._ending = self.session.ending(self._quanta)
        return self._ending is not None

    def _opened(self, row: Row) -> _Open:
        settings, tokenizer = self.work.settings, self.work.tokenizer
        decoding = settings.decoding(row)
        known = self._recalled(row, decoding)
        if len(known) == settings.samples:
            return _Open(row, decoding, (), completions=known)
        target = settings.target(row, tokenizer)
        if target is None:
            prompt = tuple(tokenizer.prompt_ids(row.messages, tools=row.tools))
            return _Open(row, decoding, prompt, completions=known)
        return _Open(row, decoding | {"max_tokens": len(target.tokens), "stop": []}, target.prompt, target)

    def _recalled(self, row: Row, decoding: dict[str, Any]) -> dict[int, Completion]:
        """The samples of a row that need no computing."""
        wanted = range(self.work.settings.samples)
        known = {sample: one for sample, one in self._known(row, decoding).items() if sample in wanted}
        for sample in known:
            self._partials.pop(self._name(row, sample), None)
        return known

    def _request(self, opened: _Open, sample: int) -> Request:
        """A sample's request; its id, which decides its random numbers, is the row's id for the first."""
        row, decoding = opened.row, opened.decoding
        name = self._name(row, sample)
        self._requests[name] = (row.index, sample)
        return Request(
            id=name,
            tokens=opened.prompt,
            max_tokens=decoding["max_tokens"],
            sampling=self.work.settings.sampling(decoding),
            stop_ids=frozenset() if opened.target else self.work.tokenizer.stop_ids,
            stop=tuple(decoding["stop"]),
            logprobs=-1 if decoding["logprobs"] is None else decoding["logprobs"],
            generated=opened.target.tokens if opened.target else tuple(self._partials.get(name, ())),
        )

    @staticmethod
    def _name(row: Row, sample: int) -> str:
        return row.id if sample == 0 else f"{row.id}\0{sample}"

    def _finish(self, completion: Completion) -> None:
        """Take a finished sample; the row is done with its last one."""
        number, sample = self._requests.pop(completion.id)
        self._partials.pop(completion.id, None)
        opened = self._open[number]
        opened.completions[sample] = completion
        if len(opened.completions) == self.work.settings.samples:
            finish, tokens = self._take(opened)
            self._tell(opened.row, finish, tokens)

    def _take(self, opened: _Open) -> tuple[str, int]:
        """Write down a row whose samples are all there; its finish and how many tokens it has."""
        del self._open[opened.row.index]
        completions = [opened.completions[index] for index in range(self.work.settings.samples)]
        text, data = self._answers.line(opened.row, completions, opened.decoding)
        if isinstance(expected := opened.row.expected, str):
            self._tally.expected += 1
            self._tally.matched += text.strip() == expected.strip()
        tokens = sum(len(one.tokens) for one in completions)
        self._note(opened.row, data, tokens)
        return completions[0].finish, tokens

    def _fail(self, row: Row, need: int) -> None:
        message = f"the prompt and its answer need {need} tokens, the context has {self.work.plan.sequence}"
        self._tally.failed += 1
        self._note(row, self._answers.failure(row, RowFailure("context_length_exceeded", message)), 0)
        self._tell(row, "error", 0)

    def _note(self, row: Row, data: bytes, tokens: int) -> None:
        self._fresh.append(Line(row.index, data))
        self._unfinished.discard(row.index)
        self._tally.done += 1
        self._tally.tokens += tokens

    def _tell(self, row: Row, finish: str, tokens: int) -> None:
        """Count and report a row that this process did."""
        self._quanta += 1
        self._pace.add(tokens)
        total = self.work.summary.rows
        self.session.events.emit(
            "row",
            step=self._tally.done,
            total=total,
            custom_id=row.id,
            finish=finish,
            tokens=tokens,
            tokens_per_s=self._pace.per_second,
            eta_s=self._pace.eta(total - self._tally.done),
            **self._share.of(self._traffic),
        )

    def _save_if_worth(self, saver: Saver) -> None:
        if self._fresh or self._under_way():
            self._save(saver)
            saver.finish()

    def _under_way(self) -> dict[str, list[int]]:
        """Tokens of what is being generated."""
        return self._scheduler.partials() if self._scheduler else {}

    def _save(self, saver: Saver) -> None:
        """Hand everything finished since the last save, and what is under way, to the saver."""
        saver.finish()  # the segment before must be current before this one can name it
        fresh, self._fresh = self._fresh, []
        partials = self._partials | self._under_way() | self._finished_samples()
        cursor = Cursor(
            next=self._next,
            open=tuple(sorted(self._unfinished)),
            failed=self._tally.failed,
            expected=self._tally.expected,
            matched=self._tally.matched,
            tokens=self._tally.tokens,
        )
        progress, owned = self._progress(), self.session.owned
        self._saved = time.monotonic()
        saver.save(lambda: (self._segments.write(owned, fresh, cursor, partials), progress))

    def _finished_samples(self) -> dict[str, list[int]]:
        """Samples that are complete while others of their row are not: they are replayed, not generated."""
        return {
            one.id: list(one.tokens) for opened in self._open.values() for one in opened.completions.values()
        }

    def _progress(self) -> dict[str, Any]:
        return {
            "rows": self._tally.done,
            "total": self.work.summary.rows,
            "failed": self._tally.failed,
            "tokens": self._tally.tokens,
        }

    def _durable(self, reference: Reference) -> None:
        uri = f"{self.session.owned.store.uri}/{reference.folder}"
        message = f"durable at {uri}, {reference.step} rows"
        self.session.events.emit("checkpoint", step=reference.step, uri=uri, message=message)

    def _restored(self) -> Segments:
        owned = self.session.owned
        document = owned.document
        reference = document.current.get(KIND)
        if self.session.options.from_previous and reference is not None:
            reference = document.previous.get(KIND)
        segments = Segments(owned.open, reference)
        if reference is not None:
            kept = sum(len(tokens) for tokens in segments.partials.values())
            message = f"continuing after {segments.done} rows and {kept} tokens of unfinished ones"
            uri = f"{owned.store.uri}/{reference.folder}"
            self.session.events.emit("restore", step=segments.done, uri=uri, message=message)
        return segments
