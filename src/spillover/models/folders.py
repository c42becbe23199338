"""Where models and adapters live on this machine, and how a folder there appears all at once.

Guarantee: a folder made by `publish` either does not exist or is complete, whatever was killed when, and two
processes that want the same folder do the work once. Steps: take an exclusive file lock for the folder; if
the folder exists, it is complete; otherwise build beside it, flush every file to disk, rename. Accepted
trade-off: a killed build leaves one hidden ``.NAME.partial`` folder, which the next build of the same folder
finds and continues or clears. Scope: processes of one machine, or of several over a file system whose locks
work.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from spillover.errors import InputError, ModelError

_REFUSED = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS)


def home() -> Path:
    """The root of everything spillover keeps on this machine: ``SPILL_HOME``, or ``~/.spillover``."""
    return Path(os.environ.get("SPILL_HOME") or Path.home() / ".spillover").expanduser().absolute()


def models_home() -> Path:
    """The folder of expanded, downloaded and staged models; a cache that may be deleted at any time."""
    return home() / "models"


def adapters_home() -> Path:
    """The folder of adapters; these are results, not a cache."""
    return home() / "adapters"


def publish(final: Path, build: Callable[[Path], None]) -> None:
    """Make the folder `final` by calling ``build(partial)`` on a hidden sibling and renaming that.

    `build` may find files of an earlier, killed attempt in `partial`; it decides whether they are of use.
    """
    if final.is_dir():
        return
    with writing(final), _locked(final):
        if final.is_dir():
            return
        partial = final.with_name(f".{final.name}.partial")
        partial.mkdir(parents=True, exist_ok=True)
        build(partial)
        flush(partial)
        partial.rename(final)
        flush_folder(final.parent)


@contextmanager
def writing(place: Path) -> Iterator[None]:
    """Turn a disk that is full, read-only or somebody else's into one line."""
    try:
        yield
    except OSError as error:
        if error.errno not in _REFUSED:
            raise
        reason = (error.strerror or str(error)).lower()
        raise ModelError(
            f"{place} cannot be written: {reason}",
            hint="free space, or set SPILL_HOME to a folder that has it",
        ) from None


def replace(new: Path, final: Path) -> None:
    """Put the complete folder `new` in the place of `final`, whose former content is deleted.

    One system call swaps the two where the file system can (Linux ``renameat2``, macOS ``renamex_np``), so
    that a reader finds the old or the new folder. Elsewhere there is an instant with neither; then the old
    one is at `aside_of`.
    """
    flush(new)
    if not final.exists():
        new.rename(final)
    elif _swap(new, final):
        shutil.rmtree(new)
    else:
        aside = aside_of(final)
        shutil.rmtree(aside, ignore_errors=True)
        final.rename(aside)
        try:
            new.rename(final)
        except BaseException:
            aside.rename(final)
            raise
        shutil.rmtree(aside)
    flush_folder(final.parent)


def aside_of(final: Path) -> Path:
    """Where a folder waits while another takes its place; after a kill in that instant it is still there."""
    return final.with_name(f".{final.name}.old")


def write_atomic(path: Path, data: bytes) -> None:
    """Write a small file so that a reader sees the old or the new content, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(data)
    temporary.replace(path)


def disk_floor() -> int:
    """Bytes that stay free on the disk whatever is fetched: 20 GB, or ``SPILL_DISK_FLOOR_GB``."""
    text = os.environ.get("SPILL_DISK_FLOOR_GB") or "20"
    try:
        return int(float(text) * 1e9)
    except (ValueError, OverflowError):
        raise InputError(f"SPILL_DISK_FLOOR_GB is {text!r}", hint="set it to gigabytes, such as 20") from None


def check_disk(needed: int, folder: Path) -> None:
    """Raise `ModelError` when `needed` more bytes in `folder` would leave less than the floor free."""
    free, floor = shutil.disk_usage(folder).free, disk_floor()
    if free - needed < floor:
        raise ModelError(
            f"not enough disk: {needed / 1e9:.1f} GB to fetch, {free / 1e9:.1f} GB free, "
            f"and {floor / 1e9:.0f} GB stay free",
            hint=f"free space under {folder.parent}, or set SPILL_HOME to a larger disk",
        )


def flush(folder: Path) -> None:
    """Force the files directly in `folder`, and the folder itself, to the disk."""
    for path in folder.iterdir():
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    flush_folder(folder)


def flush_folder(folder: Path) -> None:
    """Force the names in `folder` to the disk, so that a rename survives a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _locked(final: Path) -> Iterator[None]:
    final.parent.mkdir(parents=True, exist_ok=True)
    with final.with_name(f".{final.name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # the kernel lets go when the process dies
        yield


def _swap(first: Path, second: Path) -> bool:
    here, exchange = -100 if sys.platform == "linux" else -2, 2
    library = ctypes.CDLL(None, use_errno=True)
    if sys.platform == "linux" and hasattr(library, "renameat2"):
        return bool(library.renameat2(here, os.fsencode(first), here, os.fsencode(second), exchange) == 0)
    if sys.platform == "darwin":
        return bool(library.renamex_np(os.fsencode(first), os.fsencode(second), exchange) == 0)
    return False
