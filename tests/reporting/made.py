"""Run folders as jobs leave them, of any size and with any names in them."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

COMMON = dict.fromkeys(("step", "loss", "tokens_per_s", "peak_mem_gb", "eta_s", "engine"))
START = 1_800_000_000.0


class Made:
    """A run folder in the making; each event comes a second after the one before."""

    def __init__(self, folder: Path, command: str, total: int, **facts: Any) -> None:
        self.folder, self.command, self.total = folder, command, total
        self.now = START
        self.lines: list[str] = []
        self._random = random.Random(1)
        self.facts = {"model": "tiny", "data": "train.jsonl", "rows": 16, "engine": "torch"} | facts

    def event(self, kind: str, **fields: Any) -> None:
        self.now += 1
        event = {"event": kind, "time": self.now, "command": self.command} | COMMON | {"engine": "torch"}
        self.lines.append(json.dumps(event | fields))

    def start(self, host: str = "here", device: str = "cpu") -> None:
        where = {"host": host, "hardware": "x86_64, 2 cores", "device": device, "numerics": "float32"}
        self.event("start", message="tune tiny", total=self.total, **where)

    def steps(self, first: int, last: int, **changes: Any) -> None:
        for step in range(first, last + 1):
            figures = {
                "loss": 3 * math.exp(-3 * step / self.total) + self._random.uniform(0, 0.4),
                "lr": 1e-3 * (1 - step / (self.total + 1)),
                "grad_norm": self._random.uniform(0.5, 2.0),
                "tokens_per_s": 1000 + self._random.uniform(-50, 50),
            }
            self.event("step", step=step, total=self.total, **figures | changes)

    def rows(self, first: int, last: int, finish: str = "stop", tokens: int | None = None) -> None:
        for row in range(first, last + 1):
            size = self._random.randint(1, 60) if tokens is None else tokens
            self.event("row", step=row, total=self.total, custom_id=f"r{row}", finish=finish, tokens=size,
                       tokens_per_s=200.0 + row)  # fmt: skip

    def write(self, status: str = "completed", **changes: Any) -> Path:
        self.folder.mkdir(parents=True, exist_ok=True)
        manifest = {
            "run": self.folder.name,
            "command": self.command,
            "state": str(self.folder / "state"),
            "identity": {"command": self.command},
            "facts": self.facts,
            "started": START,
            "status": status,
            "host": "here",
            "pid": 1,
        }
        (self.folder / "manifest.json").write_text(json.dumps(manifest | changes))
        (self.folder / "events.jsonl").write_text("".join(line + "\n" for line in self.lines))
        return self.folder


def a_tune(folder: Path, total: int = 120, **facts: Any) -> Made:
    """Killed at 40 % after a durable point at 30 %, preempted at 70 %, then done: two machines."""
    made = Made(folder, "tune", total, **facts)
    tenth = total // 10
    made.start()
    made.steps(1, 4 * tenth)
    made.event("checkpoint", step=3 * tenth, uri="x", message="durable")
    made.start("there", "cuda")
    made.event("restore", step=3 * tenth, uri="x", message="continuing")
    made.steps(3 * tenth + 1, 7 * tenth)
    made.event("stage", stage="validation", step=5 * tenth, loss=1.5, message="validation")
    made.event("checkpoint", step=7 * tenth, uri="x", message="durable")
    made.event("preempted", message="preempted at step", signal="SIGTERM")
    made.start()
    made.event("restore", step=7 * tenth, uri="x", message="continuing")
    made.steps(7 * tenth + 1, total)
    made.event("stage", stage="validation", step=total, loss=0.5, message="validation")
    made.event("checkpoint", step=total, uri="x", message="durable")
    made.event("done", message="done", complete=True)
    return made


def a_row_job(folder: Path, command: str = "run", **facts: Any) -> Made:
    """100 rows by two processes; the first is stopped on purpose, and of its 60 rows 50 are durable."""
    made = Made(folder, command, 100, **facts)
    made.start()
    made.rows(1, 50)
    made.event("checkpoint", step=50, uri="x", message="durable")
    made.rows(51, 60)
    made.start()
    made.event("restore", step=50, uri="x", message="continuing")
    made.rows(51, 90)
    made.rows(91, 97, "length", 64)
    made.rows(98, 100, "error", 0)
    made.event("checkpoint", step=100, uri="x", message="durable")
    made.event("done", message="done", complete=True)
    return made
