"""Memory does not grow with the number of rows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent
ALLOWED_MB = 24

MEASURE = """
import sys
from pathlib import Path
from jobs.scenarios import run_job
from spillover.jobs.events import peak_memory

folder, model, rows = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
state = str(folder / f"state-{rows}")
_, events = run_job(folder, model, data=folder / rows, state=state, stop_after=90)
print(sum(event["event"] == "row" for event in events), peak_memory() / 1e6)
"""


def test_the_peak_is_of_the_process_alone() -> None:
    """Not of the one that started it, which on Linux its resource usage begins with."""
    code = """
import subprocess, sys
held = bytearray(600_000_000)
child = "from spillover.jobs.events import peak_memory; print(peak_memory())"
print(subprocess.run([sys.executable, "-c", child], check=True, capture_output=True, text=True).stdout)
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert 5e6 < int(out) < 300e6


@pytest.mark.slow
def test_300000_rows_take_no_more_memory_than_3000(folder: Path, tiny: Path) -> None:
    peaks = {}
    for count in (3_000, 300_000):
        name = f"{count}.jsonl"
        with (folder / name).open("w") as file:
            for n in range(count):
                file.write(
                    json.dumps({"custom_id": f"id-{n}", "prompt": f"row {n % 997}", "max_tokens": 2}) + "\n"
                )
        command = [sys.executable, "-c", MEASURE, str(folder), str(tiny), name]
        out = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, check=True).stdout
        answered, peak = out.split()
        assert int(answered) >= 90
        peaks[count] = float(peak)
    assert peaks[300_000] - peaks[3_000] < ALLOWED_MB, peaks


SCORE = """
import contextlib, sys
from pathlib import Path
from jobs.scenarios import eval_job
from spillover.jobs import evaluate
from spillover.jobs.events import peak_memory
from spillover.jobs.kept import KeptCompletion

class Known:
    rows = 0

    def __call__(self, row, decoding):
        return {0: KeptCompletion(row.id, [row.index % 400] * 40, "length", None, 5, 0.0, "before")}

evaluate.recalling = lambda *given: contextlib.nullcontext(Known())  # so that nothing need be generated
folder, model, data = Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[1]) / sys.argv[3]
metrics = ("exact_match", "contains", "regex:[a-m]")
result, events = eval_job(folder, model, data=data, state=str(data.with_suffix("")), metric=metrics)
assert result.message.startswith("done") and not any(event["event"] == "row" for event in events)
print(peak_memory() / 1e6)
"""


@pytest.mark.slow
def test_scoring_holds_numbers_and_no_answers(folder: Path, tiny: Path) -> None:
    """Less than the answers alone would take: some 700 bytes a row, as they are written."""
    peaks = {}
    for count in (3_000, 150_000):
        name = f"evals-{count}.jsonl"
        with (folder / name).open("w") as file:
            file.writelines(
                json.dumps({"prompt": f"row {n}", "expected": str(n % 97)}) + "\n" for n in range(count)
            )
        command = [sys.executable, "-c", SCORE, str(folder), str(tiny), name]
        out = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, check=True).stdout
        peaks[count] = float(out)
    assert peaks[150_000] - peaks[3_000] < 80, peaks
