"""Batches: each is a ``spill run`` over an uploaded file, and survives the server like one.

    batches/batch_5f2c.../   batch.json   run/   state/

Guarantee: a batch that was accepted is answered, each row once, however often the server is killed and
started again on the same folder. ``batch.json`` says where it stands; what its rows were answered is in
``state``, with one fenced owner (`spillover.jobs.segments`). Results become files under names that follow
from the batch's, so that writing them twice is writing them once. Batches run one after the other, in the
order in which they came, and their rows behind those of requests that somebody waits for.
"""

from __future__ import annotations

import re
import secrets
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from spillover.errors import EngineError, InputError, ModelError, SpillError
from spillover.jobs.answering import Answering
from spillover.jobs.data import JsonLines, check_file
from spillover.jobs.data.parse import Fault, parse_object
from spillover.jobs.events import Event, Events
from spillover.jobs.interrupts import Ending, Interrupts
from spillover.jobs.job import JobOptions, open_session, recorded
from spillover.jobs.run import Extent, RunSettings, RunWork
from spillover.jobs.runs import JobFile, Run, atomic_file
from spillover.jobs.segments import KIND, Segments
from spillover.models import parse
from spillover.serve.files import Files
from spillover.serve.lane import Lane
from spillover.serve.service import Service
from spillover.state import State
from spillover.store import open_store

__all__ = ["ENDPOINT", "Batch", "Batches", "Counts", "Problem"]

ENDPOINT = "/v1/chat/completions"
FINAL = ("completed", "failed", "cancelled")
TRIES = 3
"""How often a batch is begun again by one process after the engine failed in it."""
_ID = re.compile(r"batch_[A-Za-z0-9]{1,64}")
_PLACE = re.compile(r"^.*?:(\d+): (.*)$", re.DOTALL)


class Counts(msgspec.Struct, kw_only=True):
    """Rows of a batch: all, those with an answer, those with an error."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class Problem(msgspec.Struct, kw_only=True):
    """Why a batch failed; ``line`` is of its file."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class Problems(msgspec.Struct, kw_only=True):
    """A list of them, as the API has lists."""

    data: list[Problem]
    object: str = "list"


class Batch(msgspec.Struct, kw_only=True):
    """A batch as the API describes it, and as ``batch.json`` keeps it; times are Unix seconds."""

    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    status: str = "validating"
    object: str = "batch"
    model: str | None = None
    errors: Problems | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    expires_at: int | None = None
    expired_at: int | None = None
    request_counts: Counts = msgspec.field(default_factory=Counts)
    metadata: dict[str, str] | None = None
    max_tokens: int | None = None
    """Most tokens of an answer whose row does not say: what the server had when it accepted the batch."""


class _Elsewhere(Exception):
    """The batch is not for this server; it waits for one that it is for."""


class Batches:
    """The batches below one folder, and the thread that runs them; as a context manager, until it is left."""

    def __init__(self, root: Path, files: Files, service: Service) -> None:
        self._root, self._files, self._service = root, files, service
        root.mkdir(parents=True, exist_ok=True)
        self._known: dict[str, Batch] = {}
        self._changed = threading.Condition()
        self._over = False
        self._interrupts: Interrupts | None = None
        self._current: str | None = None
        self._left: set[str] = set()  # that this process will not run any more
        self._thread = threading.Thread(target=self._work, name="batches", daemon=True)
        for folder in root.iterdir():
            self._find(folder)

    def _find(self, folder: Path) -> None:
        """Know the batch of a folder; one without ``batch.json`` was never accepted."""
        try:
            batch = msgspec.json.decode((folder / "batch.json").read_bytes(), type=Batch)
        except FileNotFoundError:
            return
        except (OSError, msgspec.DecodeError) as error:
            print(f"spill: {folder / 'batch.json'} cannot be read: {error}", file=sys.stderr, flush=True)
            return
        self._known[batch.id] = batch
        if batch.status in FINAL:
            self._clear(batch)

    def create(self, file: str, window: str, metadata: dict[str, str] | None) -> Batch | None:
        """Accept a batch over a file; it is durable once this returns. None: the file is gone."""
        batch = Batch(
            # batches are begun in the order of their ids
            id=f"batch_{time.time_ns():016x}{secrets.token_hex(4)}",
            max_tokens=self._service.settings.max_tokens,
            endpoint=ENDPOINT,
            input_file_id=file,
            completion_window=window,
            created_at=int(time.time()),
            metadata=metadata,
        )
        with self._changed:  # from here on the file is in use
            if self._files.get(file) is None:
                return None
            self._known[batch.id] = batch
            self._left.add(batch.id)
        try:
            self._write(batch)
        except BaseException:
            del self._known[batch.id]
            raise
        with self._changed:
            self._left.discard(batch.id)
            self._changed.notify()
        return batch

    def delete_file(self, file: str) -> bool:
        """Delete a file, unless a batch that has not ended reads it: False."""
        with self._changed:
            if any(one.input_file_id == file and one.status not in FINAL for one in self.list()):
                return False
            self._files.delete(file)
            return True

    def get(self, name: str) -> Batch | None:
        """A batch, or None."""
        return self._known.get(name)

    def list(self) -> list[Batch]:
        """All batches, newest first."""
        return sorted([*self._known.values()], key=lambda one: (one.created_at, one.id), reverse=True)

    def cancel(self, batch: Batch) -> None:
        """Stop a batch; what was answered is kept. One that has ended stays as it is."""
        with self._changed:
            if batch.status in FINAL or batch.status == "cancelling":
                return
            before = batch.status
            batch.status, batch.cancelling_at = "cancelling", int(time.time())
            try:
                self._write(batch)
            except BaseException:  # a full disk: it may be asked again
                batch.status, batch.cancelling_at = before, None
                raise
            if self._current == batch.id and self._interrupts is not None:
                self._interrupts.ask("SIGTERM")
            self._left.discard(batch.id)
            self._changed.notify()

    @property
    def unfinished(self) -> int:
        """Batches that have not ended."""
        return sum(one.status not in FINAL for one in self.list())

    def stop(self) -> None:
        """Ask the batch under way to save what it has and end; nothing is begun after it."""
        with self._changed:
            self._over = True
            if self._interrupts is not None:
                self._interrupts.ask("SIGTERM")
            self._changed.notify()

    @property
    def stopped(self) -> bool:
        """Whether everything is saved and the thread is gone."""
        return not self._thread.is_alive()

    def __enter__(self) -> Batches:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close(0)

    def close(self, seconds: float) -> None:
        """`stop`, and wait up to ``seconds`` until everything is saved."""
        self.stop()
        self._thread.join(seconds)

    def _work(self) -> None:
        tries: dict[str, int] = {}
        while (batch := self._next()) is not None:
            try:
                self._advance(batch)
            except _Elsewhere as error:
                self._leave(batch, str(error))
            except (EngineError, OSError) as error:
                tries[batch.id] = tries.get(batch.id, 0) + 1
                if self._over or tries[batch.id] >= TRIES:
                    self._leave(batch, str(error))
            except SpillError as error:  # full disks, foreign owners: another start may do
                self._leave(batch, str(error))
            except Exception as error:  # whatever one batch does, the next ones are begun
                traceback.print_exc()
                self._leave(batch, f"{type(error).__name__}: {error}")
            with self._changed:
                self._current = self._interrupts = None

    def _next(self) -> Batch | None:
        """The oldest batch that is to be done; waits for one. None: the server ends."""

        def first() -> Batch | None:
            open_ = [
                one for one in self._known.values() if one.status not in FINAL and one.id not in self._left
            ]
            return min(open_, key=lambda one: (one.created_at, one.id), default=None)

        with self._changed:
            self._changed.wait_for(lambda: self._over or first())
            batch = None if self._over else first()
            if batch is not None:
                self._current, self._interrupts = batch.id, Interrupts(headless=True)
            return batch

    def _leave(self, batch: Batch, why: str) -> None:
        """Let a batch be, as it is, until the next start; whoever asks for it is told why."""
        batch.errors = Problems(data=[Problem(code="waiting", message=why)])
        print(f"spill: {batch.id} waits for another start: {why}", file=sys.stderr, flush=True)
        self._left.add(batch.id)

    def _advance(self, batch: Batch) -> None:
        """Bring a batch to its end, or to where the server's end left it."""
        path = self._files.path(batch.input_file_id)
        try:
            work = self._checked(batch, path)
        except (InputError, ModelError) as error:
            if batch.status == "cancelling":
                self._end(batch, "cancelled")
            else:
                self._fail(batch, error)
            return
        if batch.status == "validating":
            with self._changed:
                if batch.status == "validating":
                    batch.status, batch.in_progress_at = "in_progress", int(time.time())
                    batch.request_counts.total = work.total
                    self._write(batch)
        segments = self._answered(batch, work)
        if segments is None and batch.status != "cancelling":
            return  # the server ends
        cancelled = batch.status == "cancelling"
        self._finalize(batch, segments)
        self._end(batch, "cancelled" if cancelled else "completed")

    def _checked(self, batch: Batch, path: Path) -> RunWork:
        """The work of a batch.

        Raises:
            InputError: its file cannot be answered here.
            _Elsewhere: it was begun for a model that this server has not got.
        """
        service = self._service
        name = batch.model or _model_of(path, service)
        if name not in service.names:
            raise _Elsewhere(f"it is for {name}")
        batch.model = name
        summary = check_file(path, "prompt")
        if summary.shape != "batch":
            raise InputError(f"{path}:1: the rows are no requests of a batch", hint="spill run takes them")
        settings = RunSettings(
            name,
            path,
            max_tokens=batch.max_tokens or service.settings.max_tokens,
            temperature=1.0,
            batch=service.plan.batch,
        )
        model = replace(service.model, ref=parse(name))
        adapter, tokenizer = service.adapter_of(name), service.tokenizer
        return RunWork(settings, model, adapter, summary, tokenizer, service.engine, service.plan, Extent())

    def _answered(self, batch: Batch, work: RunWork) -> Segments | None:
        """Answer rows; the results, or None if the server ends before all are there."""
        interrupts = self._interrupts
        assert interrupts is not None
        folder = self._root / batch.id
        store = open_store(str(folder / "state"))
        options = JobOptions(headless=True, runs=folder)
        document = recorded(store, work.identity, options)
        if document is not None:
            progress = document.progress
            batch.request_counts.failed = progress.get("failed", 0)
            batch.request_counts.completed = progress.get("rows", 0) - batch.request_counts.failed
        if batch.status == "cancelling" or (document is not None and document.status == "completed"):
            return None if document is None else Segments(State(store).open, document.current.get(KIND))
        events = Events("run", lambda event: _count(batch.request_counts, event))
        job = JobFile("run", {"model": work.settings.model, "data": str(work.settings.data)}, {})
        service, run = self._service, Run(folder / "run")
        with open_session(job, run, store, work, options, events, interrupts) as session:
            adapter = service.names[work.settings.model]
            lane = partial(Lane, service.loop, adapter)
            answering = Answering(work, session, generating=lane)
            ending, segments = answering.run()
        return segments if ending is Ending.DONE or batch.status == "cancelling" else None

    def _finalize(self, batch: Batch, segments: Segments | None) -> None:
        """Write the results as files, in the order of the input: answers in one, errors in another."""
        with self._changed:
            if batch.status != "cancelling":
                batch.status = "finalizing"
            batch.finalizing_at = int(time.time())
            self._write(batch)
        if segments is None:
            return
        name = batch.id.removeprefix("batch_")
        if segments.done > segments.cursor.failed:
            answers = (line for line in segments.lines() if not _is_failure(line))
            file = self._files.add(f"{batch.id}_output.jsonl", "batch_output", answers, f"file-{name}_output")
            batch.output_file_id = file.id
        if segments.cursor.failed:
            errors = filter(_is_failure, segments.lines())
            file = self._files.add(f"{batch.id}_error.jsonl", "batch_output", errors, f"file-{name}_error")
            batch.error_file_id = file.id

    def _fail(self, batch: Batch, error: SpillError) -> None:
        place = _PLACE.match(str(error))
        line, message = (int(place[1]), place[2]) if place else (None, str(error))
        message = message.replace(str(self._files.path(batch.input_file_id)), batch.input_file_id)
        problem = Problem(code="invalid_file", message=message, line=line)
        batch.errors = Problems(data=[problem])
        self._end(batch, "failed")

    def _end(self, batch: Batch, status: str) -> None:
        with self._changed:
            batch.status = status
            setattr(batch, f"{status}_at", int(time.time()))
            self._write(batch)
        self._clear(batch)

    def _clear(self, batch: Batch) -> None:
        """Remove what an ended batch worked with: its results are files."""
        for name in ("run", "state"):
            shutil.rmtree(self._root / batch.id / name, ignore_errors=True)

    def _write(self, batch: Batch) -> None:
        atomic_file(self._root / batch.id / "batch.json", [msgspec.json.encode(batch)])


def _model_of(path: Path, service: Service) -> str:
    """The one model that the rows of a file name; the base if they name none.

    Raises:
        InputError: they name several, or one that is not served.
    """
    found: str | None = None
    for number, body in _bodies(path):
        name = service.base if body.get("model") is None else body["model"]
        if not isinstance(name, str) or name not in service.names:
            known = ", ".join(service.names)
            raise InputError(f"{path}:{number}: there is no model {str(name)[:80]!r} here, only {known}")
        if found is not None and name != found:
            raise InputError(f"{path}:{number}: a batch is for one model: {found} before, {name} here")
        found = name
    return found or service.base


def _bodies(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with JsonLines(path) as lines:
        for number, data in lines:
            try:
                row = parse_object(data)
            except Fault as fault:
                raise lines.error(number, fault.message, hint=fault.hint) from None
            body = row.get("body")
            yield number, body if isinstance(body, dict) else {}


def _count(counts: Counts, event: Event) -> None:
    if event["event"] == "row":
        if event["finish"] == "error":
            counts.failed += 1
        else:
            counts.completed += 1


def _is_failure(line: bytes) -> bool:
    return msgspec.json.decode(line, type=_Outcome).response is None


class _Outcome(msgspec.Struct):
    response: dict[str, Any] | None
