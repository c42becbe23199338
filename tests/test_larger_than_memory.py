"""A model of 4 GB, answered from and tuned in 2 GB that the kernel enforces."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
SPILL = Path(sys.executable).with_name("spill")
LIMIT = 2 * 10**9
ROWS = 32
RUN = ("run", "rows.jsonl", "--memory", "2GB")
TUNE = ("tune", "train.jsonl", "--name", "large", "--rank", "8", "--steps", "3", "--memory", "2GB")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a model, and data."""
    folder = tmp_path_factory.mktemp("large")
    command = [sys.executable, str(BENCHMARKS / "random_model.py"), str(folder / "model"), "--gigabytes", "4"]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    with (folder / "rows.jsonl").open("w") as file:
        for n in range(ROWS):
            file.write(json.dumps({"prompt": f"What comes after the number {n}?", "max_tokens": 3}) + "\n")
    with (folder / "train.jsonl").open("w") as file:
        for n in range(12):
            file.write(json.dumps({"prompt": f"What is {n} plus {n}?", "answer": f"It is {2 * n}."}) + "\n")
    return folder


def events(process: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    assert process.returncode == 0, process.stderr[-2000:]
    return [json.loads(line) for line in process.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize("arguments", [RUN, TUNE], ids=["run", "tune"])
def test_a_4_gb_model_in_2_gb(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: tuple[str]
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    confined = importlib.import_module("confined")
    name, data, *rest = arguments
    command = [str(SPILL), name, str(folder / "model"), data, *rest, "--headless", "--quiet"]
    how: dict[str, Any] = {"cwd": folder, "text": True, "timeout": 500, "stdout": -1, "stderr": -1}
    how["env"] = os.environ | {"SPILL_HOME": str(folder / "home")}
    rehearsal = events(subprocess.run([*command, "--dry-run"], check=False, **how))[-1]["message"]
    told = re.search(r"^memory, ([\d.]+) GB in all", rehearsal, re.MULTILINE)
    assert told is not None and "streamed on cpu" in rehearsal
    planned = 1e9 * float(told[1])
    try:
        process, usage = confined.run(command, LIMIT, **how)
    except confined.CannotConfine as error:
        pytest.skip(f"no memory cgroup can be made here: {error}")
    seen = events(process)
    assert seen[-1]["complete"]
    assert sum(one["event"] == ("row" if name == "run" else "step") for one in seen) == (
        ROWS if name == "run" else 3
    )
    peak = 1e9 * max(one["peak_mem_gb"] for one in seen)
    with capsys.disabled():
        print(f"\n{name}: peak {peak / 1e9:.2f} GB, {planned / 1e9:.2f} planned", end=" ")
    assert usage.killed == 0 and usage.held <= LIMIT
    assert abs(peak - planned) <= 0.1 * planned <= 0.1 * LIMIT
