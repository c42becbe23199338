"""Where extents went that no longer lie where their references say.

Compaction and import copy extents byte for byte into a new pack. That pack ends with a table of what it
took in: sorted rows of 32 bytes, old pool, old pack, old offset, new offset, as the only record of an
extent with the flag `RELOCATIONS`; the pack's seal says where. The small file ``moved`` leads from an old
pack to the packs that took its extents in: sorted rows of 24 bytes, old pool, old pack, new pack, behind a
header of 64 bytes with their 128-bit checksum. Readers need nothing else, and no database.

The rows of a pack die with it, so that neither grows with the pool's history.
"""

from __future__ import annotations

import bisect
import os
import struct
import threading
from collections.abc import Iterable

import xxhash

from spillover.errors import Corrupt
from spillover.pool.blocks import Place, read_index, read_payload, read_seal
from spillover.pool.folder import Folder
from spillover.pool.layout import HEADER, checked, require_check
from spillover.pool.reference import Ref

__all__ = ["Relocations", "Row", "addresses_of", "encode_moved", "encode_table", "read_table"]

Row = tuple[int, int, int, int]
"""Old pool, old pack, old offset, new offset."""
_ROW = struct.Struct("<QQQQ")
_MOVED = struct.Struct("<QQQ")
_HEAD = struct.Struct("<8sIIQ16s16x")


def encode_table(rows: Iterable[Row]) -> bytes:
    """A pack's relocation table."""
    return b"".join(_ROW.pack(*row) for row in sorted(rows))


def decode_table(data: bytes) -> list[Row]:
    """Inverse of `encode_table`."""
    return [*_ROW.iter_unpack(data)]


def encode_moved(rows: Iterable[tuple[int, int, int]]) -> bytes:
    """The file ``moved`` for rows of old pool, old pack and new pack."""
    table = b"".join(_MOVED.pack(*row) for row in sorted(rows))
    head = _HEAD.pack(b"SPILMOVE", 1, 0, len(table) // _MOVED.size, xxhash.xxh3_128_digest(table))
    return checked(head) + table


def decode_moved(data: bytes, where: str) -> list[tuple[int, int, int]]:
    """Inverse of `encode_moved`.

    Raises:
        Corrupt: damaged.
    """
    if len(data) < HEADER or data[:8] != b"SPILMOVE":
        raise Corrupt(f"{where} is no table of moved packs")
    require_check(data[:HEADER], where)
    _, _, _, count, digest = _HEAD.unpack_from(data)
    table = data[HEADER:]
    if len(table) != count * _MOVED.size or xxhash.xxh3_128_digest(table) != digest:
        raise Corrupt(f"{where} is damaged", hint="whoever opens the pool's owners writes it anew")
    return [*_MOVED.iter_unpack(table)]


class Relocations:
    """Answers where extents went. Threads may share it."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._signature: tuple[int, int, int] | None = None
        self._moved: list[tuple[int, int, int]] = []
        self._tables: dict[int, bytes] = {}

    def targets(self, pool: int, pack: int) -> list[int]:
        """The packs that took in extents of ``pack``."""
        with self._lock:
            self._load()
            low = bisect.bisect_left(self._moved, (pool, pack, 0))
            high = bisect.bisect_left(self._moved, (pool, pack + 1, 0))
            return [target for _, _, target in self._moved[low:high]]

    def find(self, place: Place, target: int, ref: Ref) -> int | None:
        """Where ``ref`` lies in the pack ``target``, open at ``place``; None if it is not there."""
        with self._lock:
            if target not in self._tables:
                if not (read := read_table(place)):
                    raise Corrupt(f"{place.path} has lost the table of what was relocated to it")
                self._tables[target] = read
            table = self._tables[target]
        key = (ref.pool, ref.pack, ref.offset)
        rows = range(len(table) // _ROW.size)
        at = bisect.bisect_left(rows, key, key=lambda row: _ROW.unpack_from(table, row * _ROW.size)[:3])
        if at in rows:
            *found, offset = _ROW.unpack_from(table, at * _ROW.size)
            return offset if tuple(found) == key else None
        return None

    def _load(self) -> None:
        """Read ``moved`` again if it was replaced."""
        try:
            file = self._folder.moved.open("rb")  # a network mount may answer stat from its memory
        except FileNotFoundError:
            return
        with file:
            state = os.fstat(file.fileno())
            signature = (state.st_ino, state.st_size, state.st_mtime_ns)
            if signature == self._signature:
                return
            self._moved = decode_moved(file.read(), str(self._folder.moved))
            self._signature = signature
            self._tables = {
                pack: rows for pack, rows in self._tables.items() if self._folder.path_of(pack).exists()
            }


def addresses_of(place: Place) -> dict[int, list[tuple[int, int, int]]]:
    """By offset in an open pack, the old addresses (pool, pack, offset) of the extent that lies there."""
    found: dict[int, list[tuple[int, int, int]]] = {}
    for pool, pack, offset, now in decode_table(read_table(place)):
        found.setdefault(now, []).append((pool, pack, offset))
    return found


def read_table(place: Place) -> bytes:
    """The relocation table of an open pack; empty if it took nothing in.

    Raises:
        Corrupt: damaged.
    """
    seal = read_seal(place.file, place.path)
    if seal is None or not seal.relocations:
        return b""
    place = place._replace(offset=seal.relocations)
    index = read_index(place, seal.end - seal.relocations)
    entry = index.entry(0)
    data = bytearray(entry.length)
    read_payload(place, index, entry, 0, memoryview(data))
    return bytes(data)
