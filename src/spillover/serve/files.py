"""Uploaded files and the results of batches: each a folder, complete or not there.

    files/file-5f2c.../   data   file.json

``file.json`` is written last; a folder without it is of an upload that never ended.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import shutil
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

from spillover.jobs.runs import atomic_file

__all__ = ["File", "Files"]

_ID = re.compile(r"file-[A-Za-z0-9_]{1,64}")


class File(msgspec.Struct, frozen=True, kw_only=True):
    """A file as the API describes it; times are Unix seconds."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    object: str = "file"
    status: str = "processed"


class Files:
    """The files below one folder."""

    def __init__(self, root: Path) -> None:
        self._root = root
        root.mkdir(parents=True, exist_ok=True)
        for folder in root.iterdir():  # of a process that was killed while it took one in
            if not (folder / "file.json").exists():
                shutil.rmtree(folder, ignore_errors=True)

    def add(self, filename: str, purpose: str, pieces: Iterable[bytes], name: str | None = None) -> File:
        """Keep a file under a new id, or under ``name``, which then replaces what was there.

        Raises:
            StoreError: it cannot be written.
        """
        name = name or f"file-{secrets.token_hex(12)}"
        folder = self._root / name
        try:
            atomic_file(folder / "data", pieces)
            size = (folder / "data").stat().st_size
            file = File(id=name, bytes=size, created_at=int(time.time()), filename=filename, purpose=purpose)
            atomic_file(folder / "file.json", [msgspec.json.encode(file)])
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return file

    def get(self, name: str) -> File | None:
        """What is known of a file, or None."""
        if not _ID.fullmatch(name):
            return None
        with contextlib.suppress(OSError, msgspec.DecodeError):
            return msgspec.json.decode((self._root / name / "file.json").read_bytes(), type=File)
        return None

    def path(self, name: str) -> Path:
        """Where a file's bytes are."""
        return self._root / name / "data"

    def list(self) -> list[File]:
        """All files, newest first."""
        found = [file for folder in self._root.iterdir() if (file := self.get(folder.name))]
        return sorted(found, key=lambda file: (file.created_at, file.id), reverse=True)

    def delete(self, name: str) -> bool:
        """Delete a file; False: there is none."""
        if self.get(name) is None:
            return False
        (self._root / name / "file.json").unlink()
        shutil.rmtree(self._root / name, ignore_errors=True)
        return True
