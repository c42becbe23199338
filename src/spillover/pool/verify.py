"""Checking a whole pool."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from spillover.errors import Corrupt
from spillover.pool.folder import Folder
from spillover.pool.reader import OpenPack, Unbegun
from spillover.pool.reference import writer_of
from spillover.pool.relocation import decode_moved
from spillover.pool.scan import survey

__all__ = ["Verification", "verify"]


class Verification(msgspec.Struct, frozen=True):
    """What a check of every byte found.

    Attributes:
        packs: packs checked.
        publications: publications in them.
        bytes: bytes checked.
        torn: bytes at the ends of packs whose writer died while it wrote; they were never acknowledged.
        damaged: what is damaged, a line each: pack, and record and chunk where it is known.
    """

    packs: int
    publications: int
    bytes: int
    torn: int
    damaged: list[str]


def verify(folder: Folder, progress: Callable[[int, int], None] = lambda done, total: None) -> Verification:
    """Read and check every byte of every pack, while others work on.

    Args:
        progress: told of bytes checked and bytes in all.
    """
    files = sorted(folder.list_packs())
    writers = {*folder.list_writers()}
    total, done, packs, publications, torn = sum(file.size for file in files), 0, 0, 0, 0
    damaged = _moved(folder)

    def note(error: Corrupt) -> None:
        damaged.append(str(error))

    def count(size: int) -> None:
        nonlocal done
        done += size
        progress(done, total)

    for file in files:
        try:
            found = survey(OpenPack(folder, file.pack), note, count)
        except FileNotFoundError:  # collected meanwhile
            total -= file.size
            continue
        except Unbegun:
            continue
        except Corrupt as error:
            damaged.append(str(error))
            continue
        packs, publications = packs + 1, publications + found.extents
        torn += 0 if writer_of(file.pack) in writers else found.torn
    return Verification(packs, publications, done, torn, damaged)


def _moved(folder: Folder) -> list[str]:
    """What is wrong with the file that leads to relocated extents."""
    try:
        decode_moved(folder.moved.read_bytes(), str(folder.moved))
    except FileNotFoundError:
        pass
    except Corrupt as error:
        return [str(error)]
    return []
