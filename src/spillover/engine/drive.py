"""How fast the drive under the models reads.

A large file is read from front to back by a few threads, past the page cache (O_DIRECT) where the filesystem
allows it, again and again for some seconds: drives answer a short read faster than they can go on. Where it
does not allow it, the file is dropped from the page cache and read once.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from spillover.engine.speeds import Drive
from spillover.models import models_home

LARGE = 1 << 30  # bytes: more than a drive's own cache
SECONDS = 3.0  # of reading; writing takes at most as long, if there is no large file yet
_THREADS, _PIECE = 4, 16 << 20
_SPARE = 4  # times the file that must be free


class CannotMeasure(Exception):
    """Why the drive was not measured, in a few words."""


def measure_drive(large: int = LARGE, seconds: float = SECONDS) -> Drive:
    """Read a file of at least `large` bytes for `seconds`; `CannotMeasure` says why that cannot be."""
    try:
        with _file(large, seconds) as (path, source):
            direct = _opened(path, direct=True)
            if direct is None:
                return _read(path, _opened(path, direct=False), source, seconds, direct=False)
            return _read(path, direct, source, seconds, direct=True)
    except OSError as error:
        raise CannotMeasure(f"{error.filename or models_home()}: {error.strerror}") from None


@contextlib.contextmanager
def _file(large: int, seconds: float) -> Iterator[tuple[Path, str]]:
    """The largest file of a model, or one written for this."""
    found = max(_weights(), key=lambda path: path.stat().st_size, default=None)
    if found is not None and found.stat().st_size >= large:
        yield found, found.name
        return
    folder = next(path for path in (models_home(), *models_home().parents) if path.exists())
    place = os.statvfs(folder)
    if place.f_bavail * place.f_frsize < _SPARE * large:
        raise CannotMeasure(f"{folder} has no room for a file of {large / 1e9:.1f} GB")
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".measure-") as file:
        size = _fill(file.fileno(), large, seconds)
        yield Path(file.name), f"{size / 1e9:.1f} GB written for it"


def _weights() -> list[Path]:
    """Weight files that are whole on this drive: a sparse file would be read from nowhere."""
    files = [path for path in models_home().glob("*/*.safetensors") if path.is_file()]
    return [path for path in files if path.stat().st_blocks * 512 >= path.stat().st_size]


def _fill(file: int, size: int, seconds: float) -> int:
    """Write up to `size` bytes that do not compress, and sync; a slow drive gets fewer."""
    end = time.perf_counter() + seconds
    source = memoryview(os.urandom(2 * _PIECE))
    for start in range(0, size, _PIECE):
        shift = start // _PIECE * 17 % _PIECE  # no two blocks are alike
        os.pwrite(file, source[shift : shift + _PIECE], start)
        if time.perf_counter() > end:
            break
    os.fsync(file)
    return start + _PIECE


def _opened(path: Path, *, direct: bool) -> int | None:
    """A descriptor to read with, None where the filesystem refuses O_DIRECT."""
    flags = os.O_RDONLY | (getattr(os, "O_DIRECT", 0) if direct else 0)
    if direct and flags == os.O_RDONLY:
        return None
    try:
        file = os.open(path, flags)
    except OSError:
        if direct:
            return None
        raise
    if direct:
        try:
            os.preadv(file, [mmap.mmap(-1, mmap.PAGESIZE)], 0)
        except OSError:
            os.close(file)
            return None
    return file


def _read(path: Path, file: int | None, source: str, seconds: float, *, direct: bool) -> Drive:
    assert file is not None
    pieces = max(1, path.stat().st_size // _PIECE)
    try:
        if not direct and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        start = time.perf_counter()
        end = start + seconds
        places = itertools.count()  # `next` of it is atomic

        def work() -> int:
            buffer, done = mmap.mmap(-1, _PIECE), 0
            while time.perf_counter() < end:
                place = next(places)
                if not direct and place >= pieces:
                    break
                done += os.preadv(file, [buffer], place % pieces * _PIECE)
            return done

        with ThreadPoolExecutor(_THREADS) as pool:
            done = sum(pool.map(lambda _: work(), range(_THREADS)))
        took = time.perf_counter() - start
    finally:
        os.close(file)
    return Drive(round(done / took / 1e9, 2), direct, done, source)
