"""Whether this process still owns the pool: asked of the disk each time, whoever wrote there meanwhile."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from spillover.errors import NotFound, Superseded
from spillover.pool import Pool
from spillover.queue import proof
from spillover.queue.proof import Proof
from spillover.state import State
from spillover.state.ownership import CONTROL
from spillover.store import Blob, LocalStore

LOCAL = pytest.mark.parametrize("local", [True, False])


class Owned:
    """A pool with an owner, and its control object.

    Args:
        local: whether it lies on a local disk.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, local: bool) -> None:
        monkeypatch.setattr(proof, "is_local", lambda path: local)
        self.pool = Pool.open(folder, create=True)
        self.owners = self.pool.owners()
        self.store = LocalStore(folder / "owner")
        self.control = folder / "owner" / CONTROL
        self.proof = Proof(self.store, self.owners.generation)
        self.reads = 0
        read = self.store.read

        def counted(key: str) -> Blob:
            self.reads += 1
            return read(key)

        monkeypatch.setattr(self.store, "read", counted)


@LOCAL
def test_a_takeover_is_seen_by_the_very_next_question(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, local: bool
) -> None:
    owned = Owned(tmp_path / "pool", monkeypatch, local)
    for _ in range(3):
        owned.proof.check()
    identity = {"work": "pool", "pool": owned.pool.folder.identity.id}
    new = State(LocalStore(owned.store.root)).acquire(identity, takeover=True)
    for _ in range(2):
        with pytest.raises(Superseded, match=f"generation {new.generation} has them"):
            owned.proof.check()
    new.release()
    with pytest.raises(Superseded):
        owned.proof.check()


@LOCAL
def test_a_document_that_was_rewritten_for_the_same_owner_is_read_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, local: bool
) -> None:
    owned = Owned(tmp_path / "pool", monkeypatch, local)
    owned.proof.check()
    version = owned.store.read(CONTROL).version
    owned.store.replace(CONTROL, owned.control.read_bytes() + b"\n", version)
    owned.reads = 0
    for _ in range(5):
        owned.proof.check()
    assert owned.reads == (1 if local else 5)


def test_a_file_with_the_same_time_and_size_is_another_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if the old one is gone, and the filesystem would like to use its number again."""
    owned = Owned(tmp_path / "pool", monkeypatch, local=True)
    owned.proof.check()
    before = owned.control.stat()
    mine = f'"generation":{owned.owners.generation}'.encode()
    data = owned.control.read_bytes().replace(b" ", b"")
    assert mine in data
    data = data.replace(mine, f'"generation":{owned.owners.generation + 1}'.encode())
    for _ in range(20):
        owned.control.unlink()
        owned.control.write_bytes(data.ljust(before.st_size))
        os.utime(owned.control, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert owned.control.stat().st_size == before.st_size
        with pytest.raises(Superseded):
            owned.proof.check()


@LOCAL
def test_a_document_that_is_away_proves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, local: bool
) -> None:
    owned = Owned(tmp_path / "pool", monkeypatch, local)
    owned.proof.check()
    away = owned.control.with_name("away")
    owned.control.rename(away)
    with pytest.raises(NotFound):
        owned.proof.check()
    away.rename(owned.control)
    owned.proof.check()


def test_no_file_is_left_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owned = Owned(tmp_path / "pool", monkeypatch, local=True)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        version = owned.store.read(CONTROL).version
        owned.store.replace(CONTROL, owned.control.read_bytes() + b"\n", version)
        owned.proof.check()
    assert len(os.listdir("/proc/self/fd")) == before + 1
    owned.proof.close()
    assert len(os.listdir("/proc/self/fd")) == before
