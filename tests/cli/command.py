"""The real command line in child processes, and what it leaves behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from jobs.scenarios import write_prompts, write_training
from spillover.state import State
from spillover.store import open_store

SPILL = Path(sys.executable).with_name("spill")
PATIENCE = 120.0
"""Seconds after which something that was waited for is missing; a machine under load needs many."""

STEPS, ROWS, SAVE_ROWS = 40, 200, 25
TUNE = (
    "tune tiny train.jsonl --name tiny --rank 4 --lr 0.01 --dropout 0.1 --batch 2 --ckpt-every 3 "
    f"--steps {STEPS} --numerics float32"
).split()
RUN = "run tiny prompts.jsonl --batch 4 --numerics float32".split()


@dataclass(frozen=True)
class Outcome:
    """How a process ended and what it said."""

    code: int
    out: str
    err: str

    @property
    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.splitlines()]

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == kind]

    @property
    def kinds(self) -> list[str]:
        return [event["event"] for event in self.events]


class Process:
    """A command at work. It writes to files, so that nothing it does depends on how fast it is read."""

    def __init__(self, words: tuple[str, ...], folder: Path, environment: dict[str, str], log: Path) -> None:
        self._out, self._err = log.with_suffix(".out"), log.with_suffix(".err")
        with self._out.open("w") as out, self._err.open("w") as err:
            self.child = subprocess.Popen(
                [SPILL, *words], cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=err
            )

    def until(self, kind: str, count: int = 1) -> None:
        """Return once the process has told ``count`` events of this kind, or has ended."""

        def seen() -> bool:
            kinds = Counter(event["event"] for event in self._whole_lines())
            return kinds[kind] >= count or self.child.poll() is not None

        eventually(seen, lambda: f"no {count} {kind}: {self._err.read_text()}")

    def send(self, number: signal.Signals) -> None:
        if self.child.poll() is None:
            self.child.send_signal(number)

    def end(self) -> Outcome:
        """Wait for the process to end."""
        code = self.child.wait(PATIENCE)
        return Outcome(code, self._out.read_text(), self._err.read_text())

    def _whole_lines(self) -> list[dict[str, Any]]:
        text = self._out.read_text()
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


@dataclass
class Shell:
    """A working folder, with a home of its own, in which commands are typed."""

    folder: Path
    home: Path
    logs: Path
    changes: dict[str, str] = field(default_factory=dict)
    started: list[Process] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        """This process's environment, without what would change how commands behave."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("SPILL_")}
        kept.pop("PYTHONUNBUFFERED", None)
        return kept | {"SPILL_HOME": str(self.home), "OMP_NUM_THREADS": "1"} | self.changes

    def start(self, *words: str) -> Process:
        log = self.logs / f"{len(self.started)}.log"
        process = Process(words, self.folder, self.environment, log)
        self.started.append(process)
        return process

    def __call__(self, *words: str) -> Outcome:
        return self.start(*words).end()

    def run_folder(self, command: str) -> Path:
        """The folder of the one run of ``command`` here."""
        [folder] = (self.folder / "runs").glob(f"{command}-*")
        return folder

    def losses(self, state: Path | None = None) -> list[float]:
        """The losses in the current checkpoint, after checking its every byte."""
        payload = current(state or self.run_folder("tune") / "state", "ckpt")
        return json.loads(payload.read("state.json"))["losses"]

    def adapter(self) -> dict[str, np.ndarray]:
        return load_file(self.home / "adapters" / "tiny" / "adapter_model.safetensors")


def shell_in(folder: Path, model: Path) -> Shell:
    """A shell in the new folder ``folder/work``, where ``tiny`` is the model and the data files are."""
    work, logs = folder / "work", folder / "logs"
    work.mkdir(parents=True)
    logs.mkdir()
    (work / "tiny").symlink_to(model)
    write_training(work / "train.jsonl")
    write_prompts(work / "prompts.jsonl", ROWS)
    return Shell(work, folder / "home", logs)


def eventually(true: Callable[[], bool], otherwise: Callable[[], str]) -> None:
    """Look until something is true."""
    end = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < end, otherwise()
        time.sleep(0.01)


def current(state: Path, name: str) -> Any:
    """The current payload of a state, every byte of it verified."""
    found = State(open_store(state))
    document = found.read()
    assert document is not None
    payload = found.open(document.current[name])
    payload.verify()
    return payload


def answers(path: Path) -> list[dict[str, Any]]:
    """Result lines without what differs from run to run: times."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        line["spillover"].pop("latency_s")
        line["response"]["body"].pop("created")
    return lines


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, and its content."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def same_tensors(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)
