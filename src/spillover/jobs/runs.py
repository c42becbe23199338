"""Run folders: what one job leaves in the working folder.

    runs/tune-banking-1a2b3c4d/
        job.json         the command as it was given, for `spill resume` and ``--config``
        manifest.json    what ran on what: hashes, engine, numerics, versions, hardware, times, status
        events.jsonl     every event, appended
        events.out.tf*   a tune's curves, for TensorBoard
        results.jsonl    a row job's answers, in the order of the input
        state/           durable state, unless ``--state`` puts it elsewhere

The folder is a convenience and may be deleted; only the state decides what is done. A run's id is a
function of what the work is, so the same command finds the same run.
"""

from __future__ import annotations

import contextlib
import errno
import filecmp
import hashlib
import os
import platform
import re
import socket
import tempfile
import time
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from spillover.errors import InputError, StoreError, StoreFull
from spillover.jobs.events import Event
from spillover.state import Identity

__all__ = ["JobFile", "Manifest", "Run", "atomic_file", "find_run", "list_runs", "run_id", "versions"]

RUNS = Path("runs")


class JobFile(msgspec.Struct, frozen=True):
    """A command line as data. ``arguments`` and ``options`` hold only what differs from the defaults."""

    command: str
    arguments: dict[str, Any]
    options: dict[str, Any]
    spill_config: int = 1


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What ran, on what, and how it went; ``started`` and ``ended`` are Unix seconds."""

    run: str
    command: str
    state: str
    identity: Identity
    facts: dict[str, Any]
    started: float
    ended: float | None = None
    status: str = "running"
    host: str = ""
    pid: int = 0
    hardware: str = ""
    versions: dict[str, str] = {}


def run_id(command: str, label: str, identity: Identity) -> str:
    """``command-label-xxxxxxxx``: readable, and equal exactly when the work is."""
    digest = hashlib.sha256(msgspec.json.encode(identity, order="sorted")).hexdigest()[:8]
    return f"{command}-{re.sub(r'[^A-Za-z0-9._]+', '-', label).strip('-')[:60]}-{digest}"


class Run:
    """One run folder. Nothing is created before `begin`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.id = folder.name
        self._events: int | None = None
        self._torn = False  # whether the last line of events.jsonl is half a one

    @property
    def results(self) -> Path:
        return self.folder / "results.jsonl"

    @property
    def has_course(self) -> bool:
        """Whether there is something to draw; what an evaluation found is in its ``report.json``."""
        return not self.id.startswith("eval-")

    @property
    def default_state(self) -> str:
        return str(self.folder / "state")

    def begin(self, job: JobFile, state: str, identity: Identity, facts: dict[str, Any]) -> None:
        """Record that this process works on the run, keeping when it was first started."""
        self.folder.mkdir(parents=True, exist_ok=True)
        before = self.manifest()
        _write(self.folder / "job.json", job)
        manifest = Manifest(
            run=self.id,
            command=job.command,
            state=state,
            identity=identity,
            facts=facts,
            started=before.started if before else round(time.time(), 3),
            host=socket.gethostname(),
            pid=os.getpid(),
            hardware=hardware(),
            versions=versions("spillover", "torch", "numpy", "tokenizers", "safetensors"),
        )
        _write(self.folder / "manifest.json", manifest)

    def end(self, status: str, facts: dict[str, Any]) -> None:
        """Record how the process left the run."""
        manifest = self.manifest()
        if manifest is not None:
            ended = round(time.time(), 3)
            manifest = msgspec.structs.replace(
                manifest, status=status, ended=ended, facts=manifest.facts | facts
            )
            _write(self.folder / "manifest.json", manifest)
        if self._events is not None:
            os.close(self._events)
            self._events = None

    def manifest(self) -> Manifest | None:
        with contextlib.suppress(OSError, msgspec.DecodeError):
            return msgspec.json.decode((self.folder / "manifest.json").read_bytes(), type=Manifest)
        return None

    def job(self) -> JobFile:
        """The command that started the run; `InputError` if it is not recorded."""
        return read_job(self.folder / "job.json")

    def record(self, event: Event) -> None:
        """Append an event to ``events.jsonl``: one write, so that lines of two processes never mix."""
        if self._events is None:
            if not self.folder.is_dir():
                return
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            with contextlib.suppress(OSError):
                self._events = os.open(self.folder / "events.jsonl", flags, 0o644)
                size = os.fstat(self._events).st_size
                self._torn = size > 0 and os.pread(self._events, 1, size - 1) != b"\n"
        if self._events is None:
            return
        line = (b"\n" if self._torn else b"") + msgspec.json.encode(event) + b"\n"
        with contextlib.suppress(OSError):  # a full disk must not end the work; the state says so itself
            written = os.write(self._events, line)
            self._torn = written < len(line) and line[:written][-1:] != b"\n"

    def events(self) -> Iterator[Event]:
        """The recorded events; lines that a dying process left half-written are skipped."""
        with contextlib.suppress(FileNotFoundError), (self.folder / "events.jsonl").open("rb") as file:
            for line in file:
                with contextlib.suppress(msgspec.DecodeError):
                    yield msgspec.json.decode(line, type=dict[str, Any])

    def last_step(self, step: int) -> Event | None:
        """The latest event of optimizer step ``step``, None when there is none on record."""
        found = [one for one in self.events() if one.get("event") == "step" and one.get("step") == step]
        return found[-1] if found else None


def hardware() -> str:
    """Processor architecture, cores and operating system of this machine, in words."""
    return f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()} {platform.release()}"


def list_runs(root: Path = RUNS) -> list[Run]:
    """The runs below ``root``, newest first."""
    found = [Run(path.parent) for path in root.glob("*/manifest.json")]
    return sorted(found, key=lambda run: (run.folder / "manifest.json").stat().st_mtime, reverse=True)


def find_run(name: str | None, root: Path = RUNS) -> Run:
    """The run called ``name`` (an unambiguous beginning is enough) or in the folder ``name``, or the newest.

    ``last`` is the newest, too.

    Raises:
        InputError: there is none, or more than one begins so.
    """
    if name is not None and any((Path(name) / file).is_file() for file in ("manifest.json", "events.jsonl")):
        return Run(Path(name) if Path(name).name not in ("", "..") else Path(name).resolve())
    runs = list_runs(root)
    if not runs:
        raise InputError(f"there are no runs in {root.resolve()}", hint="spill run or spill tune starts one")
    if name is None or name == "last":
        return runs[0]
    exact = [run for run in runs if run.id == name or run.folder == Path(name)]
    begun = exact or [run for run in runs if run.id.startswith(name)]
    if len(begun) != 1:
        what = "no run is called" if not begun else f"{len(begun)} runs begin with"
        raise InputError(f"{what} {name!r}", hint="spill runs lists them")
    return begun[0]


def read_job(path: Path) -> JobFile:
    """Read a ``job.json``; `InputError` in one line if it is none."""
    try:
        job = msgspec.json.decode(path.read_bytes(), type=JobFile)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}", hint="--emit-config writes one") from error
    except msgspec.DecodeError as error:
        raise InputError(f"{path} is no job file: {error}", hint="--emit-config writes one") from error
    if job.spill_config != 1:
        raise InputError(f"{path} has spill_config {job.spill_config}, not 1", hint="upgrade spillover")
    return job


def write_job(path: Path, job: JobFile) -> None:
    _write(path, job)


def atomic_file(path: Path, pieces: Iterable[bytes], *, keep_equal: bool = False) -> None:
    """Write ``path`` all at once: readers see the old file or the whole new one.

    Args:
        keep_equal: leave a file that has these bytes already as it is, for those who are reading it.

    Raises:
        StoreFull: there is no room for it.
        StoreError: it cannot be written for another reason.
    """
    try:
        _replaced(path, pieces, keep_equal)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StoreFull(
                f"no space left for {path}", hint="free some space and run the same command again"
            ) from error
        raise StoreError(f"{path} cannot be written: {error.strerror}") from error


def _replaced(path: Path, pieces: Iterable[bytes], keep_equal: bool) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    file, name = tempfile.mkstemp(prefix=".tmp-", dir=path.parent)
    try:
        with os.fdopen(file, "wb") as out:
            for piece in pieces:
                out.write(piece)
            out.flush()
            os.fsync(out.fileno())
        if keep_equal and path.exists() and filecmp.cmp(name, path, shallow=False):
            os.unlink(name)
            return
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        raise


def _write(path: Path, value: msgspec.Struct) -> None:
    atomic_file(path, [msgspec.json.format(msgspec.json.encode(value), indent=1), b"\n"])


def versions(*names: str) -> dict[str, str]:
    """The versions of Python and of those packages that are installed."""
    found = {"python": platform.python_version()}
    for name in names:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found
