"""Run a command within a memory limit that the kernel enforces, and see how much it took.

    python benchmarks/confined.py --gigabytes 2 -- python script.py ...

The command runs in a memory cgroup of its own below that of this process, version 1 or 2, without swap. Page
cache counts against the limit, but the kernel takes it back when memory is short. So two peaks are told: of
all that was charged, and of what nobody can take back, anonymous and shared memory, which is sampled. Where
no cgroup can be made, a line says so, and the command runs as it is.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SAMPLING = 0.02  # seconds between two looks
_NUMBERS = itertools.count()
# The shell joins the group before it becomes the command: whatever that starts is in the group too.
_JOIN = 'echo $$ > "$0" && exec "$@"'


class CannotConfine(Exception):
    """Why no memory cgroup can be made here, in a few words."""


@dataclass(frozen=True)
class Usage:
    """What a group took, in bytes, and how many of its processes were ended for lack of memory.

    ``charged`` is the peak of everything, page cache included; ``held`` that of anonymous and shared memory.
    """

    charged: int
    held: int
    killed: int


@dataclass(frozen=True)
class Files:
    """The names of a cgroup version. ``swap`` is what goes into the file ``swap_limit``, given the limit."""

    limit: str
    swap_limit: str
    current: str
    peak: str
    held: tuple[str, ...]  # fields of memory.stat
    kills: str

    def swap(self, limit: int) -> int:
        """Version 1 limits memory and swap together, version 2 swap alone."""
        return limit if self is V1 else 0


V1 = Files(
    "memory.limit_in_bytes",
    "memory.memsw.limit_in_bytes",
    "memory.usage_in_bytes",
    "memory.max_usage_in_bytes",
    ("total_rss", "total_shmem"),
    "memory.oom_control",
)
V2 = Files(
    "memory.max", "memory.swap.max", "memory.current", "memory.peak", ("anon", "shmem"), "memory.events"
)


class Group:
    """A memory cgroup with a limit in bytes; a context manager, which ends what still runs in it.

    `CannotConfine` where none can be made.
    """

    def __init__(self, limit: int) -> None:
        self._folder, self._files = _create()
        try:
            (self._folder / self._files.limit).write_text(str(limit))
            # kernels that account no swap have no such file, and version 1 has a second way
            with contextlib.suppress(OSError):
                (self._folder / self._files.swap_limit).write_text(str(self._files.swap(limit)))
            if self._files is V1:
                (self._folder / "memory.swappiness").write_text("0")
        except OSError as error:
            self._folder.rmdir()
            raise CannotConfine(f"{error.filename}: {error.strerror}") from None
        self._held = self._current = 0
        self._ended = threading.Event()
        self._sampler = threading.Thread(target=self._sample, daemon=True)
        self._sampler.start()

    def command(self, *command: str | Path) -> list[str | Path]:
        """The command that runs `command` in this group."""
        return ["/bin/sh", "-c", _JOIN, self._folder / "cgroup.procs", *command]

    def usage(self) -> Usage:
        """The peaks so far."""
        self._look()
        peak = self._folder / self._files.peak  # version 2 has none before Linux 5.19
        charged = int(peak.read_text()) if peak.exists() else self._current
        return Usage(charged, self._held, self._fields(self._files.kills)["oom_kill"])

    def close(self) -> None:
        """End what still runs in it, and remove it."""
        self._ended.set()
        self._sampler.join()
        for _ in range(100):
            for number in (self._folder / "cgroup.procs").read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    if int(number) > 0:  # 0 would be one that this namespace does not show
                        os.kill(int(number), signal.SIGKILL)
            try:
                self._folder.rmdir()
                return
            except OSError:  # processes take a moment to end
                time.sleep(0.05)

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _sample(self) -> None:
        while not self._ended.wait(SAMPLING):
            self._look()

    def _look(self) -> None:
        fields = self._fields("memory.stat")
        self._held = max(self._held, sum(fields.get(name, 0) for name in self._files.held))
        current = int((self._folder / self._files.current).read_text())
        self._current = max(self._current, current)

    def _fields(self, name: str) -> dict[str, int]:
        lines = (self._folder / name).read_text().splitlines()
        return {key: int(value) for key, value in (line.split() for line in lines)}


def run(command: Sequence[str | Path], limit: int, **how: Any) -> tuple[subprocess.CompletedProcess, Usage]:
    """Run `command` within `limit` bytes, with what `subprocess.run` takes.

    `CannotConfine` where that cannot be.
    """
    with Group(limit) as group:
        return subprocess.run(group.command(*command), **how), group.usage()


def _create() -> tuple[Path, Files]:
    """A new group, and the names of its version."""
    name = f"confined-{os.getpid()}-{next(_NUMBERS)}"
    reasons = []
    for parent, files in _parents():
        try:
            folder = parent / name
            folder.mkdir()
        except OSError as error:
            reasons.append(f"{parent}: {error.strerror}")
            continue
        if (folder / files.limit).exists():
            return folder, files
        folder.rmdir()
        reasons.append(f"{parent} has no memory controller for groups below it")
    raise CannotConfine("; ".join(reasons) or "this system has no memory cgroup")


def _parents() -> list[tuple[Path, Files]]:
    """Where a group may be made: below our own, and in version 2 also beside it."""
    found = []
    with contextlib.suppress(OSError):
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        for _, controllers, path in (line.split(":", 2) for line in lines):
            if "memory" in controllers.split(","):
                found += [(folder, V1) for folder in _mounted("cgroup", "memory", path)]
            elif not controllers:
                for folder in _mounted("cgroup2", "", path):
                    # refused where our own group holds processes, as it does unless it is the root
                    with contextlib.suppress(OSError):
                        (folder / "cgroup.subtree_control").write_text("+memory")
                    beside = folder.parent
                    found += [(one, V2) for one in (folder, beside) if (one / "cgroup.procs").exists()]
    return found


def _mounted(kind: str, option: str, path: str) -> list[Path]:
    """The folders of the group `path` in mounts of this kind with this option."""
    folders = []
    # fields: proc_pid_mountinfo(5); the type, the source and its options follow the separator
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields = line.split()
        root, point = fields[3:5]
        mounted, _, options = fields[fields.index("-") + 1 :][:3]
        folder = Path(point, os.path.relpath(path, root))
        if mounted == kind and (not option or option in options.split(",")) and folder.is_dir():
            folders.append(folder)
    return folders


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--gigabytes", type=float, required=True, help="the limit, in 10^9 bytes")
    parser.add_argument("command", nargs="+", metavar="COMMAND", help="after --")
    args = parser.parse_args()
    try:
        done, usage = run(args.command, int(args.gigabytes * 1e9))
    except CannotConfine as reason:
        print(f"not confined: {reason}", file=sys.stderr, flush=True)
        done = subprocess.run(args.command)
        largest = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
        usage = Usage(largest, largest, 0)
    killed = f", {usage.killed} ended for lack of memory" if usage.killed else ""
    print(
        f"peak {usage.charged / 1e9:.3f} GB, {usage.held / 1e9:.3f} GB without page cache{killed}",
        file=sys.stderr,
    )
    raise SystemExit(done.returncode if done.returncode >= 0 else 128 - done.returncode)


if __name__ == "__main__":
    main()
