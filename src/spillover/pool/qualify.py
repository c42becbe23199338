"""Whether two mounts of one filesystem keep the promises that the pool and the queue rest on.

A mount is tried from two clients at once, because each of these promises is easily kept for one client alone.
Two processes, one on each mount, do what the pool and the queue do: lock, append and sync, rename, open a
database, die. Every check says what it saw, every wait has a deadline, and nothing stays behind.
``docs/design/filesystems.md`` says why.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from spillover.errors import InputError, StoreRefused
from spillover.pool.partner import COMMAND, Failed, Process
from spillover.pool.promises import APPENDS, CHECKS, EXCLUDES, PLACES, RELEASED, SAME, Pair
from spillover.store.filesystem import Declaration, Profile, contradiction, filesystem, profile_of
from spillover.store.local import LocalStore

__all__ = ["Check", "Qualification", "qualify", "write_declaration"]

SCRATCH = ".spill-qualify-"
VERSION_COMMANDS = {"gluster": ("glusterfs", "--version"), "juicefs": ("juicefs", "--version")}


class Check(msgspec.Struct, frozen=True):
    """One thing that was tried.

    Args:
        name: what should hold.
        passed: whether it did.
        seen: what was seen, in a line: figures if it did, the first contradiction if not.
        seconds: how long the check took.
    """

    name: str
    passed: bool
    seen: str
    seconds: float


class Qualification(msgspec.Struct, frozen=True):
    """What two mounts proved.

    Args:
        profile: the kind of filesystem, told by its type.
        path: the folder on the one mount, absolute.
        peer: the same folder on the other.
        client_version: the client software that was tried.
        checks: in the order in which they ran. Where one of the first two fails, the rest is not tried.
    """

    profile: Profile
    path: str
    peer: str
    client_version: str
    checks: list[Check]

    @property
    def passed(self) -> bool:
        """Whether everything was tried and held."""
        return len(self.checks) == len(CHECKS) and all(check.passed for check in self.checks)

    def declaration(
        self,
        *,
        durability_description: str = "",
        direct_mount: bool = True,
        writeback: bool = False,
        open_cache: float = 0,
        readdir_cache: bool = False,
    ) -> Declaration:
        """What may be declared of the two mounts. Fields are those of `Declaration`.

        Args:
            durability_description: what is known of the servers. No check can cut their power, so without it
                the declaration says that this is unknown.

        Raises:
            StoreRefused: a check failed, or a setting contradicts what owned state needs.
        """
        for check in self.checks:
            if not check.passed:
                raise StoreRefused(
                    f"{self.path} cannot be declared: {check.name}: {check.seen}",
                    hint="mount it without client caches, or use another filesystem",
                )
        seen = {check.name: check.seen for check in self.checks}
        declaration = Declaration(
            profile=self.profile,
            path=self.path,
            peer=self.peer,
            direct_mount=direct_mount,
            writeback=writeback,
            open_cache=open_cache,
            readdir_cache=readdir_cache,
            client_version=self.client_version,
            locks=f"{seen[PLACES]}; {seen[EXCLUDES]}; {seen[RELEASED]}",
            durability_description=durability_description or f"power loss not tried; {seen[APPENDS]}",
        )
        if unsafe := contradiction(declaration):
            raise StoreRefused(
                f"{self.path} cannot be declared: {unsafe}", hint="mount it without that setting"
            )
        return declaration


def write_declaration(declaration: Declaration, file: Path) -> None:
    """Write what `spillover.store.filesystem.declared` reads, whole or not at all, and durably.

    Raises:
        StoreError: the file cannot be written.
    """
    data = msgspec.json.format(msgspec.json.encode(declaration), indent=2) + b"\n"
    LocalStore(file.parent).write(file.name, data)


def qualify(
    path: Path,
    peer: Path,
    *,
    profile: Profile | None = None,
    client_version: str | None = None,
    rounds: int = 200,
    patience: float = 10.0,
    partner: Sequence[str] = COMMAND,
    progress: Callable[[list[Check], int, str], None] = lambda done, total, now: None,
) -> Qualification:
    """Try two folders that should be one folder on two mounts, by two processes.

    Args:
        path: the folder on the mount to declare.
        peer: the same folder on a second mount, made by a second client.
        profile: what the filesystem must be; ``None``: what its type says.
        client_version: the client software; ``None``: asked of the installed client or of the kernel.
        rounds: repetitions of what can go wrong once in many times.
        patience: seconds after which an answer, a lock of a dead process or a change counts as not coming.
        partner: the command that works in ``peer``; the folder follows.
        progress: told of the checks that are done, how many there are, and what is tried now.

    Raises:
        InputError: a folder is missing, the filesystems differ or have no profile, or it is not ``profile``.
    """
    path, peer = path.resolve(), peer.resolve()
    found = _profile(path, peer, profile)
    scratch = SCRATCH + secrets.token_hex(6)
    near, far = Process(COMMAND, path / scratch, patience), Process(partner, peer / scratch, patience)
    pair = Pair(near, far, profile=found, rounds=rounds, patience=patience)
    try:
        checks = _run(pair, progress)
    finally:
        _clean(pair)
    version = _version(found) if client_version is None else client_version
    return Qualification(found, str(path), str(peer), version, checks)


def _profile(path: Path, peer: Path, wanted: Profile | None) -> Profile:
    for folder in (path, peer):
        if not folder.is_dir():
            raise InputError(f"{folder} is not a folder", hint="create it, or mount the filesystem there")
    kind, other = filesystem(path), filesystem(peer)
    found = profile_of(kind)
    if found is None:
        raise InputError(
            f"{path} is on a {kind or 'n unknown'} filesystem, for which there is no profile",
            hint="profiles: local, juicefs, gluster, cephfs, lustre, nfs4, each mounted by its own client",
        )
    if other != kind:
        raise InputError(f"{path} is on {kind}, {peer} on {other or 'an unknown filesystem'}")
    if wanted not in (None, found):
        raise InputError(f"{path} is on a {kind} filesystem, whose profile is {found}, not {wanted}")
    return found


def _version(profile: Profile) -> str:
    if profile in VERSION_COMMANDS:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            command = VERSION_COMMANDS[profile]
            text = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
            return text.partition("\n")[0].strip()
    system = os.uname()
    return f"{system.sysname} {system.release}"


def _run(pair: Pair, progress: Callable[[list[Check], int, str], None]) -> list[Check]:
    checks: list[Check] = []
    for name, check in CHECKS:
        progress([*checks], len(CHECKS), name)
        start = time.monotonic()
        try:
            passed, seen = True, check(pair)
        except Failed as failure:
            passed, seen = False, " ".join(str(failure).split())
        checks.append(Check(name, passed, seen, time.monotonic() - start))
        if passed:
            continue
        if name in (SAME, PLACES):
            break
        try:
            _start_again(pair)
        except Failed:  # the mount hangs: what failed already says why
            break
    progress([*checks], len(CHECKS), "")
    return checks


def _start_again(pair: Pair) -> None:
    """Be rid of whatever a failed check left locked, open or unanswered."""
    for process in (pair.near, pair.far):
        process.kill()
        process.start()


def _clean(pair: Pair) -> None:
    """Kill both and remove what they made, each by another process: a mount may hang."""
    for process in (pair.near, pair.far):
        with contextlib.suppress(Failed):
            process.kill()
    for process in (pair.near, pair.far):
        cleaner = Process(COMMAND, process.folder, pair.patience)
        with contextlib.suppress(Failed):
            cleaner.ask("remove", pair.patience / 2)
        with contextlib.suppress(Failed):
            cleaner.kill()
