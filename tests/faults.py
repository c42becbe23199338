"""Run a scenario in fresh processes, with one store fault each, many times and quickly.

A *zygote* imports what the scenario needs once and then forks for every run, so a run costs
milliseconds and can be killed for real. It never touches a store itself: a client library's threads
would not survive the fork.

As a program: ``python -m faults MODULE:FUNCTION`` reads one JSON request a line and answers one.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

TESTS = Path(__file__).resolve().parent
KINDS = ("before", "after", "kill", "killed")


@dataclass(frozen=True)
class Outcome:
    """How one run ended: exit code (negative: signal), the store calls it made, its last error."""

    code: int
    calls: list[str]
    error: str


class Zygote:
    """Runs ``scenario(store, log, **options)`` in forked processes."""

    def __init__(self, scenario: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "faults", scenario],
            cwd=TESTS,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, uri: str, log: Path, fault: tuple[int, str] | None = None, **options: Any) -> Outcome:
        environment = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
        request = {"uri": uri, "log": str(log), "fault": fault, "options": options, "env": environment}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return Outcome(**json.loads(self._process.stdout.readline()))

    def __enter__(self) -> Zygote:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()


def main(scenario: str) -> None:
    module, _, function = scenario.partition(":")
    run = getattr(importlib.import_module(module), function)
    for line in sys.stdin:
        request = json.loads(line)
        scratch = Path(request["log"] + ".calls")
        child = os.fork()
        if child == 0:
            os._exit(_child(run, request, scratch))
        _, status = os.waitpid(child, 0)
        lines = scratch.read_text().splitlines() if scratch.exists() else []
        calls = [line for line in lines if not line.startswith("error ")]
        errors = [line.removeprefix("error ") for line in lines if line.startswith("error ")]
        scratch.unlink(missing_ok=True)
        answer = {
            "code": os.waitstatus_to_exitcode(status),
            "calls": calls,
            "error": errors[-1] if errors else "",
        }
        print(json.dumps(answer), flush=True)


def _child(run: Any, request: dict[str, Any], scratch: Path) -> int:
    from spillover.errors import SpillError
    from spillover.store import Fault, FaultyStore, open_store

    os.environ.update(request["env"])
    out = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    class Recording(list):  # type: ignore[type-arg]
        def append(self, call: str) -> None:
            super().append(call)
            os.write(out, f"{call}\n".encode())

    fault = Fault(*request["fault"]) if request["fault"] else None
    store = FaultyStore(open_store(request["uri"]), fault)
    store.calls = Recording()
    try:
        run(store, Path(request["log"]), **request["options"])
        return 0
    except SpillError as error:
        os.write(out, f"error {type(error).__name__}: {error}\n".encode())
        return 1
    except BaseException:
        import traceback

        traceback.print_exc()
        return 99


if __name__ == "__main__":
    main(sys.argv[1])
