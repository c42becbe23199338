"""The folder of a pool: what lies where, and who it is.

::

    pool.json            identity, format version, limit
    packs/<id>.pack      packs, named by writer and serial number
    writers/<id>         one gate a live writer, locked by it
    moved                where the packs went that compaction or an import replaced
    catalogue.sqlite     who owns what; one process has it open
    owner/               the control object of that process (see `spillover.state`)
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec

from spillover.errors import Corrupt, InputError, Lost, Mismatch, NotFound, StateError
from spillover.pool.layout import VERSION
from spillover.pool.reference import Ref, pack_id, pack_name
from spillover.store import LocalStore
from spillover.store.disk import Disk, refusal
from spillover.store.local import TEMPORARY

__all__ = ["Folder", "Identity", "PackFile"]

IDENTITY = "pool.json"
_PACK = re.compile(r"([0-9a-f]{10})-([0-9a-f]{6})\.pack")


class Identity(msgspec.Struct, frozen=True):
    """What ``pool.json`` says.

    Attributes:
        format: version of the pack format.
        id: 16 bytes in hexadecimal.
        max_bytes: most bytes that all packs together may take; None for no limit.
    """

    format: int
    id: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]
    max_bytes: Annotated[int, msgspec.Meta(ge=0)] | None = None


class PackFile(NamedTuple):
    """A pack as the folder lists it."""

    pack: int
    path: Path
    size: int


class Folder:
    """A pool's folder.

    Args:
        path: the pool.
        disk: the system calls that durability rests on.

    Raises:
        InputError: ``path`` holds no pool, or is no path on this machine.
        Mismatch: the pool has another format version.
        Corrupt: ``pool.json`` cannot be read.
    """

    def __init__(self, path: Path, disk: Disk | None = None) -> None:
        self.path = Path(os.path.abspath(path))
        self.disk = disk or Disk()
        self.packs = self.path / "packs"
        self._packs_name = str(self.packs)
        self.writers = self.path / "writers"
        self.moved = self.path / "moved"
        self._store = LocalStore(self.path, self.disk)
        self.identity, self._version = self._read()
        self.id = bytes.fromhex(self.identity.id)
        self.short = int.from_bytes(self.id[:8], "little")

    @classmethod
    def create(cls, path: Path, *, max_bytes: int | None = None, disk: Disk | None = None) -> Folder:
        """Make a pool at ``path``, or return the one that somebody else just made there.

        Raises:
            StateError: the folder holds something else.
            StoreRefused: its filesystem is not known to keep locks and syncs.
        """
        store = LocalStore(path, disk)
        if not (store.root / IDENTITY).exists():
            strange = store.root.is_dir() and any(not _temporary(entry) for entry in store.root.iterdir())
            if strange and not (store.root / IDENTITY).exists():
                raise StateError(f"{path} is not empty and holds no pool", hint="choose an empty folder")
            store.require_safe()
            identity = Identity(VERSION, _new_id(), max_bytes)
            with contextlib.suppress(Lost):
                store.create(IDENTITY, msgspec.json.encode(identity))
        folder = cls(path, disk)
        try:
            for part in (folder.packs, folder.writers):
                store.make_folder(part)
        except OSError as error:
            raise refusal(error, str(path)) from error
        return folder

    def limit(self, max_bytes: int | None) -> None:
        """Change how much the packs may take; writers notice before they refuse."""
        identity = msgspec.structs.replace(self.identity, max_bytes=max_bytes)
        self._store.replace(IDENTITY, msgspec.json.encode(identity), self._version)
        self.reload()

    def reload(self) -> None:
        """Read ``pool.json`` again."""
        self.identity, self._version = self._read()

    def path_of(self, pack: int) -> Path:
        """The file of a pack."""
        return self.packs / f"{pack_name(pack)}.pack"

    def name_of(self, pack: int) -> str:
        """`path_of` as text; quicker, for those that open many."""
        return f"{self._packs_name}/{pack_name(pack)}.pack"

    def gate_of(self, writer: int) -> Path:
        """The file that a live writer keeps locked."""
        return self.writers / f"{writer:010x}"

    def list_packs(self) -> Iterator[PackFile]:
        """The packs that are there, in no order. Packs may come and go meanwhile."""
        with os.scandir(self.packs) as found:
            for entry in found:
                if (match := _PACK.fullmatch(entry.name)) is None:
                    continue
                try:
                    size = entry.stat().st_size
                except FileNotFoundError:
                    continue
                yield PackFile(pack_id(int(match[1], 16), int(match[2], 16)), Path(entry.path), size)

    def list_writers(self) -> list[int]:
        """Ids of the writers that have a gate."""
        return sorted(
            int(name, 16) for name in os.listdir(self.writers) if re.fullmatch("[0-9a-f]{10}", name)
        )

    def replace_moved(self, data: bytes) -> None:
        """Replace the file ``moved``, durably."""
        self._store.write(self.moved.name, data)

    def sweep(self) -> None:
        """Remove the temporary files of processes that died while they wrote."""
        self._store.sweep()

    def used(self) -> int:
        """Bytes that all packs take."""
        return sum(pack.size for pack in self.list_packs())

    def require_own(self, ref: Ref) -> None:
        """Refuse a reference to another pool.

        Raises:
            Mismatch: it is one.
        """
        if ref.pool != self.short:
            other = ref.pool.to_bytes(8, "little").hex()
            raise Mismatch(
                f"the reference belongs to pool {other}..., not to {self.path} ({self.identity.id[:16]}...)",
                hint="spill pool export there, then spill pool import here",
            )

    def _read(self) -> tuple[Identity, str]:
        try:
            blob = self._store.read(IDENTITY)
        except NotFound:
            raise InputError(
                f"{self.path} holds no pool",
                hint="Pool.open(path, create=True) makes one, if the path is right",
            ) from None
        try:
            found = msgspec.json.decode(blob.data, type=Identity)
        except msgspec.DecodeError as error:
            raise Corrupt(f"{self.path / IDENTITY} cannot be read: {error}") from error
        if found.format != VERSION:
            raise Mismatch(
                f"{self.path} has pool format {found.format}, this spillover reads format {VERSION}",
                hint="pip install --upgrade spillover",
            )
        return found, blob.version


def _temporary(path: Path) -> bool:
    """Whether a file is what a process left that died while it made the pool."""
    return path.name.startswith(TEMPORARY)


def _new_id() -> str:
    """A random id whose first eight bytes, little-endian, fit a signed integer: databases keep them so."""
    found = bytearray(secrets.token_bytes(16))
    found[7] &= 0x7F
    return found.hex()
