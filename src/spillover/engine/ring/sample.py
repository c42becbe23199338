"""A file to measure the drive under the models with: the largest one of a model, or one written for this."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from spillover.engine.ring.drive import existing
from spillover.models.folders import models_home

_LARGE = 1 << 30  # bytes: more than a drive's own cache
_WRITING = 3.0  # seconds
_PIECE = 16 << 20
_SPARE = 4  # times the file that must be free
_PREFIX = ".measure-"


class CannotMeasure(Exception):
    """Why there is nothing to measure the drive with, in a few words."""


@contextlib.contextmanager
def sample(large: int = _LARGE, seconds: float = _WRITING) -> Iterator[tuple[Path, str]]:
    """A file on the drive of the models' folder, and what it is in words.

    Where no model has a file of `large` bytes, one is written, and deleted in the end; `seconds` of writing
    are enough, so a slow drive gets a smaller one. `CannotMeasure` when there is no room for it or the drive
    fails. What a killed process left of one goes first.
    """
    folder = existing(models_home())
    try:
        _remove_stale(folder)
        found = max(_weights(folder), key=lambda path: path.stat().st_size, default=None)
        if found is not None and found.stat().st_size >= large:
            yield found, found.name
            return
        place = os.statvfs(folder)
        if place.f_bavail * place.f_frsize < _SPARE * large:
            raise CannotMeasure(f"{folder} has no room for a file of {large / 1e9:.1f} GB")
        with tempfile.NamedTemporaryFile(dir=folder, prefix=_PREFIX) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            size = _fill(file.fileno(), large, seconds)
            yield Path(file.name), f"{size / 1e9:.1f} GB written for it"
    except OSError as error:
        raise CannotMeasure(f"{error.filename or folder}: {error.strerror}") from None


def _remove_stale(folder: Path) -> None:
    """Delete the files that were written for this by processes that are gone: nobody holds their locks."""
    for path in folder.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError), path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()


def _weights(folder: Path) -> list[Path]:
    """Weight files that are whole on the drive of `folder`: a sparse file would be read from nowhere."""
    drive = folder.stat().st_dev
    facts = {path: path.stat() for path in folder.glob("*/*.safetensors") if path.is_file()}
    return [path for path, f in facts.items() if f.st_dev == drive and f.st_blocks * 512 >= f.st_size]


def _fill(file: int, size: int, seconds: float) -> int:
    """Write up to `size` bytes that do not compress, and sync; returns how many after `seconds`."""
    end = time.monotonic() + seconds
    source = memoryview(os.urandom(2 * _PIECE))
    for start in range(0, size, _PIECE):
        shift = start // _PIECE * 17 % _PIECE  # no two blocks are alike
        os.pwrite(file, source[shift : shift + _PIECE], start)
        if time.monotonic() > end:
            break
    os.fsync(file)
    return start + _PIECE
