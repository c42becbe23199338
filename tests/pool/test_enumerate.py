"""Every disk call of every operation fails, loses its answer, meets a full disk, or is its process's last."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pool.scenarios import ALL, named

TESTS = Path(__file__).resolve().parents[1]
KINDS = ["before", "after", "full", "kill", "killed"]
NAMES = [kind.__name__.lower() for kind in ALL]


def run(name: str, folder: Path, stride: int) -> None:
    words = [sys.executable, "-m", "pool.faulty_disk", name, str(folder), str(stride), *KINDS]
    done = subprocess.run(words, cwd=TESTS, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)
    shown = "\n\n".join(found["failures"][:5])
    assert not found["failures"], f"{len(found['failures'])} of {found['cases']} cases:\n{shown}"
    assert found["cases"] >= found["calls"] // stride > 0
    assert found["missed"] <= found["cases"] * (0.5 if named(name).unsteady else 0.05), found


@pytest.mark.parametrize("name", NAMES)
def test_some_fault_at_every_call(name: str, memory: Path) -> None:
    run(name, memory / "cases", 17)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_fault_at_every_call(name: str, memory: Path) -> None:
    """Every fourth case, or all of them with ``SPILL_EVERY_FAULT=1``."""
    run(name, memory / "cases", 1 if os.environ.get("SPILL_EVERY_FAULT") else 4)
