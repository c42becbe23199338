"""Which local filesystems may hold owned state.

A lock that works on one machine proves nothing about a mount that several machines share, so a local
path is accepted by the type of its filesystem, not by trying. Known local types pass. Everything else
needs a *declaration*: a JSON file, named by ``SPILL_STORAGE_DECLARATION``, in which whoever runs the
mount states what was verified.

    {"profile": "gluster", "path": "/mnt/team", "direct_mount": true,
     "locks": "flock excludes across two mounts", "durability_description": "replica 3, fsync honoured"}
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from pathlib import Path

import msgspec

from spillover.errors import InputError, StoreRefused

__all__ = ["Declaration", "declared", "filesystem", "require_local"]

LOCAL = frozenset(
    "apfs hfs ext2 ext3 ext4 xfs btrfs tmpfs ramfs zfs f2fs jfs overlay reiserfs bcachefs rootfs".split()
)


class Declaration(msgspec.Struct, frozen=True, forbid_unknown_fields=False):
    """What an operator verified of one shared mount.

    Args:
        profile: filesystem name: ``juicefs``, ``gluster``, ``cephfs``, ``lustre`` or ``nfs4``.
        path: where it is mounted; the declaration covers everything below.
        direct_mount: the clients mount it themselves, not through a re-export.
        locks: what was seen of lock exclusion between two mounts.
        durability_description: what an acknowledged fsync survives.
    """

    profile: str
    path: str
    direct_mount: bool
    locks: str
    durability_description: str


def require_local(path: Path) -> None:
    """Refuse ``path`` unless its filesystem keeps locks and syncs as a local disk does.

    Raises:
        StoreRefused: network or unknown filesystem without a declaration that covers ``path``.
    """
    found = filesystem(path)
    if found in LOCAL or declared(path) is not None:
        return
    raise StoreRefused(
        f"{path} is on a {found or 'n unknown'} filesystem, whose locks and syncs are not known to hold",
        hint="use a local folder or s3://..., or declare the mount in SPILL_STORAGE_DECLARATION",
    )


def declared(path: Path) -> Declaration | None:
    """The declaration named in the environment, if it covers ``path``."""
    name = os.environ.get("SPILL_STORAGE_DECLARATION")
    if not name:
        return None
    try:
        declaration = msgspec.json.decode(Path(name).read_bytes(), type=Declaration)
    except (OSError, msgspec.DecodeError) as error:
        raise InputError(f"{name} is not a storage declaration: {error}") from error
    covered = _existing(path).is_relative_to(Path(declaration.path).resolve())
    return declaration if covered and declaration.direct_mount else None


def filesystem(path: Path) -> str:
    """The type of the filesystem that holds ``path`` or will hold it; empty when it cannot be told."""
    if sys.platform == "darwin":
        return _darwin_type(_existing(path))
    return _linux_type(_existing(path))


def _existing(path: Path) -> Path:
    path = path.resolve()
    while not path.exists():
        path = path.parent
    return path


def _linux_type(path: Path) -> str:
    """Find the mount of ``path`` by device number in ``/proc/self/mountinfo`` (proc(5))."""
    try:
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    best, found = -1, ""
    for line in lines:
        before, _, after = line.partition(" - ")
        mount = Path(re.sub(r"\\(\d{3})", lambda match: chr(int(match[1], 8)), before.split()[4]))
        if path.is_relative_to(mount) and len(mount.parts) >= best:
            best, found = len(mount.parts), after.split()[0]
    return found


def _darwin_type(path: Path) -> str:
    """Read ``f_fstypename`` of ``statfs(2)``, 16 bytes at offset 72 of the 64-bit structure."""
    buffer = ctypes.create_string_buffer(4096)
    if ctypes.CDLL(None).statfs(os.fsencode(path), buffer) != 0:
        return ""
    return buffer.raw[72:88].split(b"\0", 1)[0].decode()
