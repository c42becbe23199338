"""Work that is given up at any line of the loop: no row is lost, none is doubled, none is damaged."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from jobs.scenarios import eval_job, write_evals
from models.folders import tiny_llama
from spillover.jobs import answering
from spillover.jobs.interrupts import Ending

ROWS = 12
POINTS = 24
LOOP = ("_begin", "_take", "_note", "_fail", "_between_takes", "_save", "_hand_over")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model") / "one", initializer_range=1.0)


@pytest.fixture
def answered(folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Rows of which most were answered before: they are taken over, in a few saves. One is too long."""
    monkeypatch.setattr(answering, "TAKEN_ROWS", 4)
    path = write_evals(folder / "evals.jsonl", ROWS)
    eval_job(folder, model)
    rows = path.read_text().splitlines()
    new = [json.dumps({"prompt": text, "expected": "x"}) for text in ("a first", "word " * 2000, "a last")]
    path.write_text("\n".join([*new[:2], *rows, new[2]]) + "\n")
    return path


class SignalAt:
    """Sends two SIGTERMs, the second of which gives up what is under way, at a line of the loop."""

    def __init__(self, point: int) -> None:
        self.point, self.lines = point, 0

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            self.lines += 1
            if self.lines == self.point:
                os.kill(os.getpid(), signal.SIGTERM)
                os.kill(os.getpid(), signal.SIGTERM)
        return self._line

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        inside = frame.f_code.co_filename == answering.__file__ and frame.f_code.co_name in LOOP
        return self._line if inside else None


@pytest.fixture(autouse=True)
def untraced() -> Iterator[None]:
    before = sys.gettrace()
    yield
    sys.settrace(before)


def left(folder: Path) -> list[bytes]:
    (run,) = [path for path in (folder / "runs").glob("eval-*") if len(rows_of(path)) == ROWS + 3]
    return [(run / name).read_bytes() for name in ("scores.jsonl", "report.json")]


def rows_of(run: Path) -> list[str]:
    path = run / "scores.jsonl"
    return path.read_text().splitlines() if path.exists() else []


@pytest.mark.slow
def test_given_up_at_any_line_of_the_loop(folder: Path, model: Path, answered: Path) -> None:
    before = folder / "before"
    shutil.copytree(folder / "runs", before)
    counting = SignalAt(0)
    sys.settrace(counting)
    eval_job(folder, model, headless=True)
    sys.settrace(None)
    whole, points = left(folder), counting.lines
    assert points > 100
    luck = random.Random(20261201)
    ended = []
    for point in sorted(luck.sample(range(1, points + 1), POINTS)):
        shutil.rmtree(folder / "runs")
        shutil.copytree(before, folder / "runs")
        sys.settrace(SignalAt(point))
        result, _ = eval_job(folder, model, headless=True)
        sys.settrace(None)
        ended.append(result.ending)
        again, _ = eval_job(folder, model, headless=True)
        assert again.ending is Ending.DONE, f"line {point}"
        assert left(folder) == whole, f"line {point}"
    assert ended.count(Ending.PREEMPTED) > POINTS // 2
