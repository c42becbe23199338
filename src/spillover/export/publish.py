"""How an export appears: whole and checked, or not at all.

Guarantee: what is at the destination was complete, checked and flushed to disk before it got its name. Steps:
lock a hidden folder beside the destination, build in it, flush, rename. A folder is renamed as one; of a
single file, its companions are renamed first and the file last. Accepted trade-off: a killed export leaves
the hidden ``.NAME.partial`` folder, which the next export to the same destination clears; replacing an export
is one swap where the file system can, see `spillover.models.folders.replace`. Scope: processes of one
machine, or of several over a file system whose locks work.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from spillover.errors import InputError, StoreError, StoreFull
from spillover.models.folders import aside_of, flush, flush_folder, replace

__all__ = ["RECORD", "check_room", "check_target", "publish_file", "publish_folder", "workplace", "writing"]

RECORD = "export.json"
COMPANIONS = (RECORD, "Modelfile")
"""What may lie beside a file, under its stem: ``x.gguf`` comes with ``x.export.json``."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def check_target(target: Path, *, overwrite: bool) -> None:
    """Raise `InputError` for a destination that is taken; only an export may be overwritten."""
    if not target.exists() and not target.is_symlink():
        taken = [path for name in COMPANIONS if (path := _beside(target, name)).exists()]
        if taken and target.suffix == ".gguf" and not overwrite:
            raise InputError(f"{taken[0]} exists already", hint="choose another --to, or add --overwrite")
        return
    if not overwrite:
        raise InputError(f"{target} exists already", hint="choose another --to, or add --overwrite")
    record = target / RECORD if target.is_dir() else _beside(target, RECORD)
    if not record.is_file() or target.is_symlink() or target.is_dir() == (target.suffix == ".gguf"):
        raise InputError(f"{target} is no export: it is not replaced", hint="choose another --to")


def check_room(needed: int, target: Path) -> None:
    """Raise `StoreFull` when the disk has less than `needed` bytes free."""
    place = target.absolute().parent
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < needed:
        raise StoreFull(
            f"no space left for {target}: the export takes {needed / 1e9:.2f} GB with its check, "
            f"{free / 1e9:.2f} GB are free",
            hint="free some space, or choose another --to",
        )


@contextlib.contextmanager
def writing(target: Path) -> Iterator[None]:
    """Turn a disk that is full, read-only or somebody else's into one line."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise StoreFull(
                f"no space left for {target}", hint="free some space, or choose another --to"
            ) from error
        raise StoreError(
            f"{target} cannot be written: {error.strerror or error}", hint="choose another --to"
        ) from error


@contextlib.contextmanager
def workplace(target: Path) -> Iterator[Path]:
    """An empty hidden folder beside `target`, locked; gone afterwards, unless it was renamed.

    Raises:
        InputError: another process is exporting to the same destination.
    """
    partial, aside = target.with_name(f".{target.name}.partial"), aside_of(target)
    with _locked(partial, target):
        if aside.exists() and not target.exists():  # somebody was killed while he replaced it
            aside.rename(target)
        _clear(partial)
        try:
            yield partial
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def publish_folder(partial: Path, target: Path) -> None:
    """Give the complete folder `partial` its name."""
    replace(partial, target)


def publish_file(made: Path, target: Path) -> list[Path]:
    """Move the files of the folder `made` beside `target`, `target` itself last; the paths they have now.

    Those beside it have its stem in their names. What a former export had beside it and this one has not is
    removed.
    """
    flush(made)
    others = sorted(path for path in made.iterdir() if path.name != target.name)
    moved = []
    for path in (*others, made / target.name):
        final = target if path.name == target.name else _beside(target, path.name)
        os.replace(path, final)
        moved.append(final)
    for name in COMPANIONS:
        if (stale := _beside(target, name)) not in moved:
            stale.unlink(missing_ok=True)
    flush_folder(target.parent)
    return moved


def _beside(target: Path, name: str) -> Path:
    return target.with_name(f"{target.stem}.{name}")


@contextlib.contextmanager
def _locked(partial: Path, target: Path) -> Iterator[None]:
    while True:
        partial.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(partial, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _lock(descriptor, target)
            if _is(partial, descriptor):
                yield
                return
        finally:
            os.close(descriptor)


def _lock(descriptor: int, target: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the kernel lets go when the process dies
    except BlockingIOError:
        raise InputError(
            f"another process is exporting to {target}", hint="wait for it, or choose another --to"
        ) from None


def _is(path: Path, descriptor: int) -> bool:
    """Whether an open folder is still the one of this name: its former owner may have renamed it."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _clear(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
