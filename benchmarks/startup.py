"""How long the command line takes to answer, beside an interpreter that does nothing.

``spill --help`` and ``spill status`` (in a folder with one run) against ``python -c pass``, each in a fresh
process, alternating; medians. The ratio is below 1: it says what share of the time Python alone takes.

    python benchmarks/startup.py [--quick] [--json FILE]
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from report import Report, alternate, arguments

from spillover.jobs.runs import JobFile, Run
from spillover.state import State
from spillover.store import open_store

SPILL = Path(sys.executable).with_name("spill")
IDENTITY = {"command": "tune"}


def make_run(folder: Path) -> None:
    """What a tune that was stopped leaves behind, without the tune."""
    run = Run(folder / "runs" / "tune-example-00000000")
    run.begin(JobFile("tune", {}, {}), run.default_state, IDENTITY, {"model": "demo", "rows": 1})
    with State(open_store(run.default_state)).acquire(IDENTITY) as owned:
        writer = owned.payload("ckpt", "step-000000001")
        writer.add("state.json", b"{}")
        owned.publish("ckpt", writer.commit(step=1), {"step": 1})
    run.end("stopped", {})


def timed(folder: Path, *command: str):
    """A function that runs ``command`` in ``folder`` and returns its seconds."""

    def run() -> float:
        start = time.perf_counter()
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        return time.perf_counter() - start

    return run


def main() -> None:
    args, report = arguments(__doc__), Report()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_run(folder)
        nothing = timed(folder, sys.executable, "-c", "pass")
        for words in (["--help"], ["status"]):
            mine = timed(folder, str(SPILL), *words)
            mine(), nothing()
            seconds = alternate(mine, nothing, 7 if args.quick else 31)
            report.add(f"spill {words[0]}", *seconds, "s", higher_is_better=False)
    report.save(args.json)


if __name__ == "__main__":
    main()
