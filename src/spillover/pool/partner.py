"""One client of a filesystem that is being tried: a process that works in one folder and does as it is told.

`spillover.pool.qualify` runs two of them, one on each mount. A request is one line on stdin, a JSON array
of operation and arguments; the answer is one line on stdout, ``{"answer": ...}`` or ``{"error": "..."}``.
The process ends when stdin does. It uses the standard library only and is run by its file name, so that it
starts in milliseconds and is easily killed and started again.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["COMMAND", "Failed", "Partner", "Process", "Refused", "serve"]

COMMAND = (sys.executable, "-P", __file__)
"""What starts a partner; the folder follows. ``-P``: the modules beside this one are not to be imported."""
COPIES = 1024


class Partner:
    """The operations. Names are relative to ``folder``; contents are text, one byte a character."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, int] = {}
        self._database: sqlite3.Connection | None = None

    def ready(self) -> bool:
        return True

    def make(self) -> None:
        self.folder.mkdir()

    def remove(self, seconds: float) -> bool:
        """Remove the folder, again and again if files of the dead still turn up in it."""
        end = time.monotonic() + seconds
        while self.folder.exists() and time.monotonic() < end:
            shutil.rmtree(self.folder, ignore_errors=True)
            time.sleep(0.001)
        return not self.folder.exists()

    def names(self) -> list[str]:
        return os.listdir(self.folder)

    def lock(self, name: str) -> bool:
        """Try once; the file stays open and the lock is held until `unlock`."""
        try:
            fcntl.flock(self._opened(name), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def unlock(self, name: str) -> None:
        fcntl.flock(self._opened(name), fcntl.LOCK_UN)

    def count(self, name: str, rounds: int, seconds: float) -> int:
        """Add one to the number in a file, up to ``rounds`` times, each under the lock; return how often."""
        end = time.monotonic() + seconds
        file = self._opened(name)
        done = 0
        while done < rounds and time.monotonic() < end:
            if not self.lock(name):
                time.sleep(0.0005)
                continue
            number = int(os.pread(file, 8, 0) or b"0")
            os.pwrite(file, b"%08d" % (number + 1), 0)
            os.fdatasync(file)
            self.unlock(name)
            done += 1
        return done

    def create(self, name: str, text: str) -> bool:
        """Create a file that must not exist; whether this call did."""
        try:
            file = os.open(self.folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            return False
        os.write(file, text.encode("latin-1"))
        os.fsync(file)
        os.close(file)
        return True

    def link(self, name: str, text: str) -> bool:
        """Create a file that must not exist by a link to one that is whole; whether this call did."""
        temporary = f"{name}.{text}"
        self.create(temporary, text)
        try:
            os.link(self.folder / temporary, self.folder / name)
        except FileExistsError:
            return False
        finally:
            self.unlink(temporary)
        return True

    def unlink(self, name: str) -> None:
        os.unlink(self.folder / name)

    def append(self, name: str, text: str) -> float:
        """Append and sync; return the seconds that the sync took."""
        file = self._opened(name)
        os.lseek(file, 0, os.SEEK_END)
        return self._written(file, os.write(file, text.encode("latin-1")), len(text))

    def write_at(self, name: str, offset: int, text: str) -> float:
        """Write at an offset and sync; return the seconds that the sync took."""
        file = self._opened(name)
        return self._written(file, os.pwrite(file, text.encode("latin-1"), offset), len(text))

    def read_open(self, name: str, offset: int, length: int) -> tuple[int, str]:
        """Size and bytes by a descriptor that is kept from call to call."""
        file = self._opened(name)
        return os.fstat(file).st_size, os.pread(file, length, offset).decode("latin-1")

    def read_anew(self, name: str, offset: int, length: int) -> tuple[int, str]:
        """Size and bytes by a descriptor opened for this call."""
        file = os.open(self.folder / name, os.O_RDONLY)
        try:
            return os.fstat(file).st_size, os.pread(file, length, offset).decode("latin-1")
        finally:
            os.close(file)

    def read(self, name: str) -> str | None:
        try:
            return (self.folder / name).read_bytes().decode("latin-1")
        except FileNotFoundError:
            return None

    def replace(self, name: str, version: int) -> None:
        """Put version ``version`` in the place of a file: written beside it, synced, renamed."""
        temporary = self.folder / f"{name}.new"
        with temporary.open("wb") as file:
            file.write(content(version))
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(self.folder / name)

    def watch(self, name: str, last: int, seconds: float) -> tuple[int, list[str]]:
        """Read a file until it holds version ``last``; return the number of reads and what was wrong."""
        end = time.monotonic() + seconds
        reads, version, wrong = 0, 0, list[str]()
        while version < last and time.monotonic() < end and len(wrong) < 3:
            reads += 1
            try:
                data = (self.folder / name).read_bytes()
            except OSError as error:
                wrong.append(f"read {reads} after version {version}: {error.strerror}")
                continue
            found = int(data[:8]) if data[:8].isdigit() else -1
            if found < version or data != content(found):
                wrong.append(f"read {reads} after version {version}: {len(data)} bytes, of version {found}")
            version = max(found, version)
        return reads, wrong if wrong or version == last else [f"version {last} was not seen"]

    def open_database(self, name: str) -> bool:
        """Take a database for this process alone, as the queue does; whether nobody else has it."""
        database = sqlite3.connect(self.folder / name, timeout=0, isolation_level=None)
        try:
            for statement in (
                "PRAGMA locking_mode=EXCLUSIVE",
                "PRAGMA journal_mode=WAL",
                "PRAGMA synchronous=FULL",
                "BEGIN EXCLUSIVE",
                "CREATE TABLE IF NOT EXISTS row(value INTEGER PRIMARY KEY)",
                "COMMIT",
            ):
                database.execute(statement)
        except sqlite3.OperationalError as error:
            database.close()
            if "locked" in str(error):
                return False
            raise
        self._database = database
        return True

    def insert(self, first: int, stop: int) -> None:
        """Commit the rows one by one."""
        for value in range(first, stop):
            self._sql("INSERT INTO row VALUES (?)", value)

    def insert_without_commit(self, value: int) -> None:
        self._sql("BEGIN")
        self._sql("INSERT INTO row VALUES (?)", value)

    def rows(self) -> list[int]:
        if (verdict := self._sql("PRAGMA integrity_check")) != [("ok",)]:
            raise sqlite3.DatabaseError(f"integrity check: {verdict}")
        return [row[0] for row in self._sql("SELECT value FROM row ORDER BY value")]

    def _sql(self, statement: str, *values: int) -> list[Any]:
        assert self._database is not None
        return self._database.execute(statement, values).fetchall()

    def _opened(self, name: str) -> int:
        if name not in self._files:
            self._files[name] = os.open(self.folder / name, os.O_RDWR | os.O_CREAT, 0o644)
        return self._files[name]

    def _written(self, file: int, written: int, length: int) -> float:
        if written != length:
            raise OSError(f"{written} bytes of {length} were written")
        start = time.perf_counter()
        os.fdatasync(file)
        return time.perf_counter() - start


def content(version: int) -> bytes:
    """What a file of one version holds: 8 KiB in which every eight bytes name the version."""
    return b"%08d" % version * COPIES


def serve(partner: Partner) -> None:
    """Answer requests until stdin ends."""
    for line in sys.stdin:
        operation, *arguments = json.loads(line)
        try:
            answer = {"answer": getattr(partner, operation)(*arguments)}
        except Exception as error:  # whatever a filesystem does is a finding for the other end
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


class Failed(Exception):
    """A promise was broken, or a partner ended or did not answer in time; the text says which."""


class Refused(Failed):
    """A partner answered that the filesystem reported an error."""


class Process:
    """This side of a partner: start, ask, kill, start again.

    Args:
        command: what starts it; the folder follows.
        folder: where it works.
        patience: seconds to wait for an answer.
    """

    def __init__(self, command: Sequence[str], folder: Path, patience: float) -> None:
        self.folder = folder
        self._command = [*command, str(folder)]
        self._patience = patience
        self._launch()

    def _launch(self) -> None:
        self._buffer = b""
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0
        )
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)  # a partner that hangs must not hang this one

    def start(self) -> None:
        """Start another one in place of one that was killed, and wait until it answers."""
        self._launch()
        self.ask("ready")

    def ask(self, *request: Any) -> Any:
        """The answer to an operation and its arguments."""
        self.send(*request)
        return self.answer()

    def send(self, *request: Any) -> None:
        assert self._process.stdin is not None
        pipe = self._process.stdin.fileno()
        end = time.monotonic() + self._patience
        data = json.dumps(request).encode() + b"\n"
        while data:
            if not select.select([], [pipe], [], max(0.0, end - time.monotonic()))[1]:
                raise Failed(f"the process in {self.folder} took no request within {self._patience:g} s")
            try:
                data = data[os.write(pipe, data) :]
            except BrokenPipeError:
                raise Failed(f"the process in {self.folder} ended") from None

    def answer(self) -> Any:
        """The answer to the oldest request that has none."""
        end = time.monotonic() + self._patience
        while b"\n" not in self._buffer:
            self._buffer += self._piece(end - time.monotonic())
        line, _, self._buffer = self._buffer.partition(b"\n")
        answer = json.loads(line)
        if "error" in answer:
            raise Refused(f"{self.folder}: {answer['error']}")
        return answer["answer"]

    def _piece(self, seconds: float) -> bytes:
        assert self._process.stdout is not None
        if seconds <= 0 or not select.select([self._process.stdout], [], [], seconds)[0]:
            raise Failed(f"no answer from {self.folder} within {self._patience:g} s")
        piece = os.read(self._process.stdout.fileno(), 1 << 16)
        if not piece:
            raise Failed(f"the process in {self.folder} ended")
        return piece

    def kill(self) -> None:
        """End it with SIGKILL."""
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        try:
            self._process.wait(self._patience)
        except subprocess.TimeoutExpired:  # it hangs in the kernel, and the mount with it
            raise Failed(f"the process in {self.folder} cannot be killed: the mount hangs") from None


if __name__ == "__main__":
    serve(Partner(Path(sys.argv[1])))
