"""Who is writing: one locked file a writer.

Guarantee: what a writer acknowledged was on disk before anybody could retire the writer.

A writer holds an flock on ``writers/<id>`` for its whole life; the kernel lets it go when the process
dies, and no clock or process id is trusted. Retiring a writer removes that file and only then looks at
its packs. A writer looks for its file after every sync and acknowledges only if it is there: then
whatever it acknowledges was durable before the retirement looked. A process that wakes up after it was
retired finds its file gone, and is refused.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from pathlib import Path

import msgspec

from spillover.errors import LockContended, Superseded
from spillover.pool.folder import Folder
from spillover.store.disk import refusal
from spillover.store.local import FileHold

__all__ = ["Gate", "Resident", "alive", "enter", "resident", "seize"]

_BITS = 39
"""A writer id and a serial of 24 bits make a pack id that fits a signed 64-bit integer."""


class Resident(msgspec.Struct, frozen=True):
    """Who stands behind a gate, as it wrote there."""

    host: str = "?"
    pid: int = 0


class Gate:
    """The gate of one writer, locked by this process."""

    def __init__(self, writer: int, hold: FileHold) -> None:
        self.writer = writer
        self._hold = hold
        self._name = str(hold.path)
        self._inode = os.stat(self._name).st_ino

    def check(self) -> None:
        """Return if nobody retired this writer.

        Raises:
            Superseded: somebody did.
        """
        try:
            if os.stat(self._name).st_ino == self._inode:
                return
        except FileNotFoundError:
            pass
        except OSError as error:
            raise refusal(error, self._name) from error
        raise Superseded(
            f"writer {self.writer:010x} was retired: nothing it writes from now on counts",
            hint="open the pool again to get a new writer",
        )

    def leave(self) -> None:
        """Remove the gate: this writer writes no more."""
        self._hold.release()

    def forget(self) -> None:
        """Close the descriptor that a forked child inherited; the parent keeps the lock."""
        with contextlib.suppress(OSError):
            self._hold.close()


def enter(folder: Folder) -> Gate:
    """Register a new writer.

    Raises:
        StoreError: the folder cannot be written.
    """
    while True:
        writer = secrets.randbits(_BITS)
        path = folder.gate_of(writer)
        if writer == 0 or path.exists():
            continue
        try:
            hold = FileHold(path)
        except LockContended:  # somebody else drew the same number
            continue
        except OSError as error:
            raise refusal(error, str(folder.path)) from error
        try:
            path.write_bytes(msgspec.json.encode(Resident(socket.gethostname(), os.getpid())))
        except OSError as error:
            hold.release()
            raise refusal(error, str(folder.path)) from error
        return Gate(writer, hold)


def resident(path: Path) -> Resident:
    """Who stands behind the gate at ``path``; unknown if it cannot be read."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Resident)
    except (OSError, msgspec.DecodeError):
        return Resident()


def alive(folder: Folder, writer: int) -> bool:
    """Whether a registered writer's process lives. Its gate stays as it is."""
    try:
        FileHold(folder.gate_of(writer), create=False).close()
    except LockContended:
        return True
    except FileNotFoundError:
        pass
    return False


def seize(folder: Folder, writer: int) -> bool:
    """Remove the gate of a dead writer; False if it had none.

    Raises:
        LockContended: the writer is alive; the message names its host and process.
    """
    path = folder.gate_of(writer)
    try:
        hold = FileHold(path, create=False)
    except FileNotFoundError:
        return False
    except LockContended:
        who = resident(path)
        raise LockContended(
            f"writer {writer:010x} is process {who.pid} on {who.host}, which is alive",
            hint="stop that process first",
        ) from None
    try:
        hold.release()
        folder.disk.sync_folder(folder.writers)
    except OSError as error:
        raise refusal(error, str(path)) from error
    return True
