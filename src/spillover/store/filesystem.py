"""Which local filesystems may hold owned state.

A lock that works on one machine proves nothing about a mount that several machines share, so a local
path is accepted by the type of its filesystem, not by trying. Known local types pass. Everything else
needs a *declaration*: a JSON file, named by ``SPILL_STORAGE_DECLARATION``, in which whoever runs the
mount states what was verified. `spillover.pool.qualify` tries two mounts and writes what it could prove.

    {"profile": "gluster", "path": "/mnt/team", "direct_mount": true, "writeback": false, "open_cache": 0,
     "readdir_cache": false, "client_version": "glusterfs 10.3", "locks": "flock excludes across two mounts",
     "durability_description": "replica 3, fsync honoured"}
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from spillover.errors import InputError, StoreRefused

__all__ = [
    "LOCAL",
    "Declaration",
    "Mount",
    "Profile",
    "contradiction",
    "declared",
    "filesystem",
    "is_local",
    "mount",
    "profile_of",
    "require_local",
]

LOCAL = frozenset(
    "apfs hfs ext2 ext3 ext4 xfs btrfs tmpfs ramfs zfs f2fs jfs overlay reiserfs bcachefs rootfs".split()
)
Profile = Literal["local", "juicefs", "gluster", "cephfs", "lustre", "nfs4"]
SHARED: dict[str, Profile] = {
    "fuse.juicefs": "juicefs",
    "fuse.glusterfs": "gluster",
    "ceph": "cephfs",
    "fuse.ceph": "cephfs",
    "fuse.ceph-fuse": "cephfs",
    "lustre": "lustre",
    "nfs4": "nfs4",
}
"""Filesystem types as the kernel names them, of clients that mount the shared filesystem themselves."""


class Declaration(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """What was verified of one shared mount.

    Args:
        profile: which filesystem it is.
        path: the folder that the declaration covers, with everything below.
        direct_mount: the clients mount it themselves, not through a re-export. Must be true.
        locks: what was seen of lock exclusion between two mounts.
        durability_description: what an acknowledged fsync survives.
        peer: the same folder as a second mount shows it on the same machine, covered too; empty: none.
        writeback: a client acknowledges a sync before the servers have the bytes. Must be false.
        open_cache: seconds for which a client opens a file without asking the servers. Must be 0.
        readdir_cache: a client lists a folder without asking the servers. Must be false.
        client_version: the client that was tried, such as ``glusterfs 10.3``; another one is unproved.
    """

    profile: Profile
    path: str
    direct_mount: bool
    locks: str
    durability_description: str
    peer: str = ""
    writeback: bool = False
    open_cache: float = 0
    readdir_cache: bool = False
    client_version: str = ""


class Mount(NamedTuple):
    """One line of ``/proc/self/mountinfo`` (proc(5))."""

    identity: int
    folder: Path
    type: str


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


def is_local(path: Path) -> bool:
    """Whether ``path`` is on a disk of this machine, where a lock that is free shows a dead owner."""
    return filesystem(path) in LOCAL


def declared(path: Path) -> Declaration | None:
    """The declaration named in the environment, if it covers ``path``.

    Raises:
        InputError: the file is missing or is not a declaration.
        StoreRefused: it covers ``path``, and is of another filesystem or states a setting under which owned
            state is not safe.
    """
    name = os.environ.get("SPILL_STORAGE_DECLARATION")
    if not name:
        return None
    try:
        declaration = msgspec.json.decode(Path(name).read_bytes(), type=Declaration)
    except (OSError, msgspec.DecodeError) as error:
        raise InputError(f"{name} is not a storage declaration: {error}") from error
    found = _existing(path)
    covered = [Path(folder).resolve() for folder in (declaration.path, declaration.peer) if folder]
    if not any(found.is_relative_to(folder) for folder in covered):
        return None
    kind = filesystem(path)
    if profile_of(kind) not in (None, declaration.profile):
        raise StoreRefused(
            f"{name} is of profile {declaration.profile}, and {path} is on a {kind} filesystem",
            hint="run spill pool qualify on this mount",
        )
    if unsafe := contradiction(declaration):
        raise StoreRefused(
            f"{name} rules out {path}: {unsafe}",
            hint="mount it without that setting, run spill pool qualify, and declare what it found",
        )
    return declaration


def contradiction(declaration: Declaration) -> str:
    """The setting that makes the mount unfit for owned state, and why, in a line; empty if none does."""
    if not declaration.direct_mount:
        return "direct_mount is false, and a re-export may not pass on locks and syncs"
    if declaration.writeback:
        return "writeback is true, so a sync is acknowledged before the servers have the bytes"
    if declaration.open_cache != 0:
        return f"open_cache is {declaration.open_cache:g}, so a file is opened as it was before"
    if declaration.readdir_cache:
        return "readdir_cache is true, so a folder is listed as it was before"
    return ""


def profile_of(kind: str) -> Profile | None:
    """The profile of a filesystem type; ``None`` for one that has none."""
    return "local" if kind in LOCAL else SHARED.get(kind)


def filesystem(path: Path) -> str:
    """The type of the filesystem that holds ``path`` or will hold it; empty when it cannot be told."""
    if sys.platform == "darwin":
        return _darwin_type(_existing(path))
    found = mount(path)
    return found.type if found else ""


def mount(path: Path) -> Mount | None:
    """The mount that holds ``path`` or will hold it: the deepest one whose folder is a parent, the last of
    those if one hides another. ``None`` where there is no ``/proc``."""
    path = _existing(path)
    try:
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    best: Mount | None = None
    for line in lines:
        before, _, after = line.partition(" - ")
        fields = before.split()
        folder = Path(re.sub(r"\\(\d{3})", lambda match: chr(int(match[1], 8)), fields[4]))
        if path.is_relative_to(folder) and (best is None or len(folder.parts) >= len(best.folder.parts)):
            best = Mount(int(fields[0]), folder, after.split()[0])
    return best


def _existing(path: Path) -> Path:
    path = path.resolve()
    while not path.exists():
        path = path.parent
    return path


def _darwin_type(path: Path) -> str:
    """Read ``f_fstypename`` of ``statfs(2)``, 16 bytes at offset 72 of the 64-bit structure."""
    buffer = ctypes.create_string_buffer(4096)
    if ctypes.CDLL(None).statfs(os.fsencode(path), buffer) != 0:
        return ""
    return buffer.raw[72:88].split(b"\0", 1)[0].decode()
