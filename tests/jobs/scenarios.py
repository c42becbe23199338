"""Small whole jobs on a tiny random model, for this process or for a zygote's children."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import jinja2  # noqa: F401 - what follows loads before a zygote forks, so that its children need not load it
import obstore  # noqa: F401
import safetensors.numpy  # noqa: F401
import tokenizers  # noqa: F401

import spillover.engine.torch
import spillover.store.cloud  # noqa: F401
from spillover.jobs import answering, job
from spillover.jobs.distill import DistillSettings
from spillover.jobs.evaluate import EvalSettings, evaluate
from spillover.jobs.events import Event, Events
from spillover.jobs.job import JobOptions, Result
from spillover.jobs.run import RunSettings, run_rows
from spillover.jobs.runs import JobFile
from spillover.jobs.tune import TuneSettings, tune
from spillover.store import Store

WORDS = "the capital of France is Paris and Rome is a city in Italy where the weather today is fine".split()


def write_training(path: Path, rows: int = 16) -> Path:
    """Rows of different lengths."""
    with path.open("w") as file:
        for n in range(rows):
            prompt = " ".join(WORDS[n % 7 : n % 7 + 3 + n % 5])
            file.write(
                json.dumps({"prompt": prompt, "answer": " ".join(WORDS[n % 9 : n % 9 + 1 + n % 3])}) + "\n"
            )
    return path


def write_evals(path: Path, rows: int = 12) -> Path:
    """Rows like those of `write_prompts`, with words that are expected."""
    with path.open("w") as file:
        for n in range(rows):
            prompt = " ".join(WORDS[n % 11 : n % 11 + 2 + n % 4]) + f" {n}"
            row = {"prompt": prompt, "expected": WORDS[n % 13], "max_tokens": 2 + n % 5}
            file.write(json.dumps(row) + "\n")
    return path


def write_prompts(path: Path, rows: int = 12) -> Path:
    with path.open("w") as file:
        for n in range(rows):
            row = {"prompt": " ".join(WORDS[n % 11 : n % 11 + 2 + n % 4]), "max_tokens": 2 + n % 5}
            file.write(json.dumps(row) + "\n")
    return path


def tune_job(
    folder: Path, model: Path, store: Store | None = None, **changes: Any
) -> tuple[Result, list[Event]]:
    """Tune for 12 steps (16 rows, micro-batch 2, accumulation 2, three epochs), or as changed."""
    options = _options(folder, changes)
    values: dict[str, Any] = {
        "model": str(model),
        "data": folder / "train.jsonl",
        "name": "tiny",
        "rank": 4,
        "lr": 1e-2,
        "epochs": 3,
        "batch": 2,
        "grad_accum": 2,
        "ckpt_every": 3,
        "dropout": 0.1,
        "overwrite": True,
    }
    return _through(store, lambda events, file: tune(TuneSettings(**values | changes), options, events, file))


def run_job(
    folder: Path, model: Path, store: Store | None = None, **changes: Any
) -> tuple[Result, list[Event]]:
    """Answer 12 rows, 3 at a time, a segment every 3 rows."""
    return _rows(RunSettings, folder, model, store, changes)


def distill_job(
    folder: Path, model: Path, store: Store | None = None, **changes: Any
) -> tuple[Result, list[Event]]:
    """The same with log-probabilities, as rows to learn from."""
    return _rows(DistillSettings, folder, model, store, changes)


def eval_job(folder: Path, *models: Path | str, **changes: Any) -> tuple[Result, list[Event]]:
    """Score models on ``evals.jsonl``, 3 rows at a time, a segment every 3 rows."""
    options = _options(folder, changes)
    values: dict[str, Any] = {"models": tuple(map(str, models)), "data": folder / "evals.jsonl", "batch": 3}
    before, answering.SAVE_ROWS = answering.SAVE_ROWS, 3
    try:
        return _through(
            None, lambda events, file: evaluate(EvalSettings(**values | changes), options, events, file)
        )
    finally:
        answering.SAVE_ROWS = before


def _rows(
    kind: type[RunSettings], folder: Path, model: Path, store: Store | None, changes: dict[str, Any]
) -> tuple[Result, list[Event]]:
    options = _options(folder, changes)
    values: dict[str, Any] = {"model": str(model), "data": folder / "prompts.jsonl", "batch": 3}
    before, answering.SAVE_ROWS = answering.SAVE_ROWS, 3
    try:
        return _through(store, lambda events, file: run_rows(kind(**values | changes), options, events, file))
    finally:
        answering.SAVE_ROWS = before


def _options(folder: Path, changes: dict[str, Any]) -> JobOptions:
    names = ("state", "stop_after", "takeover", "from_previous", "lease", "headless", "numerics", "placement",
             "memory", "dry_run", "runs")  # fmt: skip
    given = {name: changes.pop(name) for name in names if name in changes}
    return JobOptions(**{"runs": folder / "runs", "numerics": "float32", **given})


def _through(store: Store | None, perform: Any) -> tuple[Result, list[Event]]:
    events: list[Event] = []
    before = job.open_store
    if store is not None:
        job.open_store = lambda _: store
    try:
        return perform(Events("test", events.append), JobFile("test", {}, {})), events
    finally:
        job.open_store = before


def tune_scenario(store: Store, log: Path, folder: str, model: str, takeover: bool = False) -> None:
    """Three steps, each saved; the steps reported durable go to ``log``."""
    tune_job(
        Path(folder), Path(model), store, steps=3, epochs=None, ckpt_every=1, takeover=takeover, lease=0.5
    )


def rows_scenario(store: Store, log: Path, folder: str, model: str, takeover: bool = False) -> None:
    run_job(Path(folder), Path(model), store, takeover=takeover, lease=0.5)


def logging(function: Any) -> Any:
    """Wrap a scenario so that every durable point is appended to its log at once, not at its end."""

    def wrapped(store: Store, log: Path, **options: Any) -> None:
        def note(self: Events, kind: str, **fields: Any) -> None:
            if kind == "checkpoint":
                file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                os.write(file, f"{fields['step']}\n".encode())
                os.close(file)
            original(self, kind, **fields)  # type: ignore[arg-type]

        original, Events.emit = Events.emit, note  # type: ignore[method-assign,assignment]
        try:
            function(store, log, **options)
        finally:
            Events.emit = original  # type: ignore[method-assign]

    return wrapped


tune_logged = logging(tune_scenario)
rows_logged = logging(rows_scenario)


def drawn_scenario(
    store: Store, log: Path, folder: str, model: str, dies: tuple[int, str] | None = None, runs: str = "runs"
) -> None:
    """Eight steps with a validation after each four; dies at a write to its TensorBoard file."""
    written, count = os.pwrite, 0

    def write(file: int, data: bytes, at: int) -> int:
        nonlocal count
        count += 1
        number, how = dies or (0, "")
        if count != number:
            return written(file, data, at)
        written(file, {"before": b"", "half": data[: len(data) // 2], "after": data}[how], at)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    os.pwrite = write  # type: ignore[assignment]
    data = Path(folder)
    changes = {"steps": 8, "epochs": None, "ckpt_every": 2, "val": data / "val.jsonl", "runs": data / runs}
    tune_job(data, Path(model), store, lease=0.5, takeover=True, **changes)
    log.write_text(str(count))
