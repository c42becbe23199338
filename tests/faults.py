"""Run a scenario in fresh processes, with one store fault each, many times and quickly.

A *zygote* imports what the scenario needs once and then forks for every run, so a run costs
milliseconds and can be killed for real. It never touches a store itself: a client library's threads
would not survive the fork.

Calls of the work and calls of the thread that renews the lease are numbered apart: how often a lease is
renewed depends on how fast the machine is, what the work asks for does not.

As a program: ``python -m faults MODULE:FUNCTION`` reads one JSON request a line and answers one.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import spillover.store.cloud  # noqa: F401 - a zygote loads it once, so that its children need not
from spillover.store import Fault, FaultyStore, Store

TESTS = Path(__file__).resolve().parent
KINDS = ("before", "after", "kill", "killed")
T = TypeVar("T")


@dataclass(frozen=True)
class Outcome:
    """How one run ended: exit code (negative: signal), the store calls it made, its last error."""

    code: int
    calls: list[str]
    renewals: list[str]
    error: str

    def require(self, at: int, kind: str) -> bool:
        """Whether the fault had its turn; the run ended as that kind makes it end, or else as a clean one."""
        reached = len(self.calls) >= at
        expected = (0,) if not reached else (-9,) if kind in ("kill", "killed") else (0, 1)
        assert self.code in expected, (at, kind, self.calls[at - 1 : at], self)
        return reached


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

    def run(
        self,
        uri: str,
        log: Path,
        fault: tuple[int, str] | None = None,
        renewal: tuple[int, str] | None = None,
        **options: Any,
    ) -> Outcome:
        """One run, with a fault at a call of the work, or at a call of the lease's renewals."""
        environment = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
        request = {"uri": uri, "log": str(log), "options": options, "env": environment}
        request |= {"fault": fault, "renewal": renewal}
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
        scratch.unlink(missing_ok=True)

        def told(what: str, lines: list[str] = lines) -> list[str]:
            return [line.removeprefix(f"{what} ") for line in lines if line.startswith(f"{what} ")]

        answer = {
            "code": os.waitstatus_to_exitcode(status),
            "calls": told("call"),
            "renewals": told("renewal"),
            "error": "".join(told("error")),
        }
        print(json.dumps(answer), flush=True)


class WorkStore(FaultyStore):
    """A faulty store for the work; the calls of its lease's thread are counted, and fail, by themselves.

    Attributes:
        renewals: the store of that thread.
    """

    def __init__(self, inner: Store, fault: Fault | None, renewal: Fault | None) -> None:
        super().__init__(inner, fault)
        self.renewals = FaultyStore(inner, renewal)

    def _call(self, name: str, key: str, act: Callable[[], T], *, conditional: bool = False) -> T:
        if threading.current_thread().name == "lease":
            return self.renewals._call(name, key, act, conditional=conditional)
        return super()._call(name, key, act, conditional=conditional)


class Recording(list[str]):
    """Calls, written down before they are made: this process may be killed in one."""

    def __init__(self, file: int, what: str) -> None:
        super().__init__()
        self._file, self._what = file, what

    def append(self, call: str) -> None:
        super().append(call)
        os.write(self._file, f"{self._what} {call}\n".encode())


def _child(run: Any, request: dict[str, Any], scratch: Path) -> int:
    from spillover.errors import SpillError
    from spillover.store import open_store

    os.environ.update(request["env"])
    out = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    fault, renewal = (Fault(*request[of]) if request[of] else None for of in ("fault", "renewal"))
    store = WorkStore(open_store(request["uri"]), fault, renewal)
    store.calls, store.renewals.calls = Recording(out, "call"), Recording(out, "renewal")
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
