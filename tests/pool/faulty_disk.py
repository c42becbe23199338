"""A disk that fails at one chosen call, and a runner that tries every call of a scenario.

===========  ===========================================================================
``before``   EIO without acting
``after``    act, then EIO
``full``     ENOSPC, half of the bytes of a write having gone through
``kill``     SIGKILL this process before acting
``killed``   act, then SIGKILL this process
===========  ===========================================================================

The SQL statements of a connection that `FaultyDisk.watch` was shown count as calls too; only ``kill``
means something there.

As a program, ``python -m pool.faulty_disk SCENARIO FOLDER KINDS`` runs every case in forked processes and
prints what went wrong as JSON. It imports once, so that a case costs milliseconds and can be killed for
real.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
import signal
import sqlite3
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pool import scenarios
from pool.content import History
from spillover.errors import SpillError, StoreFull
from spillover.store.disk import Disk

KINDS = ("before", "after", "full", "kill", "killed")
NEEDS_SPACE = {"open", "write", "write_at", "sync", "sync_data", "link", "rename", "mkdir"}
T = TypeVar("T")


class FaultyDisk(Disk):
    """The real disk with one fault ``(at, kind)``; without one it only counts.

    Attributes:
        calls: what was asked for, as ``"write_at"``.
    """

    def __init__(self, fault: tuple[int, str] | None = None) -> None:
        self.calls: list[str] = []
        self.fault = fault
        self._lock = threading.Lock()
        self._inside = threading.local()

    def watch(self, connection: sqlite3.Connection) -> None:
        connection.set_trace_callback(self._statement)

    def open(self, path: Path) -> int:
        return self._call("open", lambda: Disk.open(self, path))

    def write(self, file: int, data: bytes | memoryview) -> None:
        half = bytes(data)[: len(data) // 2]
        self._call("write", lambda: Disk.write(self, file, data), lambda: Disk.write(self, file, half))

    def write_at(self, file: int, parts: Sequence[bytes | memoryview], offset: int) -> None:
        def half() -> None:
            data = b"".join(parts)
            os.pwrite(file, data[: len(data) // 2], offset)

        self._call("write_at", lambda: Disk.write_at(self, file, parts, offset), half)

    def sync_data(self, file: int) -> None:
        self._call("sync_data", lambda: Disk.sync_data(self, file))

    def truncate(self, file: int, size: int) -> None:
        self._call("truncate", lambda: Disk.truncate(self, file, size))

    def sync(self, file: int) -> None:
        self._call("sync", lambda: Disk.sync(self, file))

    def rename(self, old: Path, new: Path) -> None:
        self._call("rename", lambda: Disk.rename(self, old, new))

    def link(self, old: Path, new: Path) -> None:
        self._call("link", lambda: Disk.link(self, old, new))

    def unlink(self, path: Path) -> None:
        self._call("unlink", lambda: Disk.unlink(self, path))

    def mkdir(self, path: Path) -> None:
        self._call("mkdir", lambda: Disk.mkdir(self, path))

    def rmdir(self, path: Path) -> None:
        self._call("rmdir", lambda: Disk.rmdir(self, path))

    def sync_folder(self, path: Path) -> None:
        self._call("sync_folder", lambda: Disk.sync_folder(self, path))

    def _call(self, name: str, act: Callable[[], T], half: Callable[[], None] = lambda: None) -> T:
        if getattr(self._inside, "call", False):  # one call of the disk made of others
            return act()
        due = self._due(name)
        if due == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if due == "before":
            raise OSError(errno.EIO, f"injected before {name}")
        if due == "full" and name in NEEDS_SPACE:
            half()
            raise OSError(errno.ENOSPC, f"injected at {name}")
        self._inside.call = True
        try:
            result = act()
        finally:
            self._inside.call = False
            if due == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
        if due == "after":
            raise OSError(errno.EIO, f"injected after {name}")
        return result

    def _statement(self, sql: str) -> None:
        if self._due(f"sql {sql.split(maxsplit=1)[0]}") == "kill":
            os.kill(os.getpid(), signal.SIGKILL)

    def _due(self, name: str) -> str:
        with self._lock:
            self.calls.append(name)
            return self.fault[1] if self.fault and len(self.calls) == self.fault[0] else ""


def forked(act: Callable[[], Any]) -> tuple[int, Any]:
    """Run ``act`` in a child; its exit code (negative: signal) and result, or the traceback as text."""
    source, sink = os.pipe()
    child = os.fork()
    if child == 0:
        code = 0
        try:
            result = act()
        except BaseException:
            code, result = 1, traceback.format_exc()
        os.write(sink, json.dumps(result).encode()[-60_000:])
        os._exit(code)
    os.close(sink)
    with open(source, "rb") as file:
        text = file.read()
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status), json.loads(text) if text else None


class Case:
    """One run of a scenario in a copy of what its preparation left."""

    def __init__(self, scenario: scenarios.Scenario, template: Path, folder: Path) -> None:
        self.scenario = scenario
        self.folder = folder
        self.history = History(folder / "history")
        shutil.copytree(template, folder)

    def faulty(self, fault: tuple[int, str] | None) -> list[str]:
        """The run with the fault; after an error, what was promised holds and the same process goes on."""
        disk = FaultyDisk(fault)
        run = self.scenario(self.folder, disk, self.history)
        try:
            run.work()
        except SpillError as error:
            assert fault is not None
            assert fault[1] in ("before", "after", "full"), error
            assert isinstance(error, StoreFull) or fault[1] != "full", f"{type(error).__name__}: {error}"
            assert "\n" not in str(error)
            run.check()
            run.work()
        run.check()
        return disk.calls

    def restarted(self) -> Any:
        """A fresh process: promises hold, the scenario comes to its end, and nothing is left behind."""
        run = self.scenario(self.folder, Disk(), self.history)
        run.check()
        run.tidy()
        run.work()
        run.check()
        result = run.result()
        run.end()
        run.check()
        run.require_empty()
        return result


def enumerate_faults(name: str, root: Path, kinds: Sequence[str], stride: int) -> dict[str, Any]:
    """Every call of a scenario meets every kind of fault; with ``stride`` n only one in n of them.

    Returns:
        How many calls and cases there were, in how many of these the run ended before its fault, and
        the failures.
    """
    scenario, template = scenarios.named(name), root / "template"
    template.mkdir(parents=True)
    prepared = forked(lambda: scenario(template, Disk(), History(template / "history")).prepare())
    assert prepared[0] == 0, prepared[1]
    clean = Case(scenario, template, root / "clean")
    code, calls = forked(lambda: clean.faulty(None))
    assert code == 0, calls
    code, expected = forked(clean.restarted)
    assert code == 0, expected
    failures, cases, missed = [], 0, 0
    for number, (at, kind) in enumerate(itertools.product(range(1, len(calls) + 1), kinds)):
        call = calls[at - 1]
        if number % stride or (call.startswith("sql") and kind != "kill"):
            continue
        case = Case(scenario, template, root / f"{at}-{kind}")
        code, said = forked(lambda case=case, at=at, kind=kind: case.faulty((at, kind)))
        early = code == 0 and len(said) < at  # the number of calls varies a little from run to run
        missed += early
        if not early and code != (-signal.SIGKILL if kind in ("kill", "killed") else 0):
            failures.append(f"{kind} at call {at} ({call}): exit {code}: {said}")
        else:
            code, result = forked(case.restarted)
            if code or result != expected:
                failures.append(f"restarted after {kind} at call {at} ({call}): exit {code}: {result}")
        cases += 1
        shutil.rmtree(case.folder)
    return {"calls": len(calls), "cases": cases, "missed": missed, "failures": failures}


if __name__ == "__main__":
    print(json.dumps(enumerate_faults(sys.argv[1], Path(sys.argv[2]), sys.argv[4:], int(sys.argv[3]))))
