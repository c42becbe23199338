"""Zeros ahead of a pack's end: they make syncs cheap, and mean nothing to anybody."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from pool.content import records, require
from spillover.errors import StoreError, StoreFull
from spillover.pool import Pool, Ref, ahead
from spillover.pool.folder import PackFile
from spillover.store.disk import Disk


@pytest.fixture(autouse=True)
def in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever the tests run, as on a filesystem that overwrites in place."""
    monkeypatch.setattr(ahead, "filesystem", lambda path: "ext4")


class Watched(Disk):
    """Notes the size of a file at each sync; has room for files of ``room`` bytes; can fail in one write."""

    def __init__(self, room: int = 1 << 62) -> None:
        self.sizes: list[int] = []
        self.room = room
        self.refused = 0
        self.failing = False

    def write_at(self, file: int, parts: Sequence[bytes | memoryview], offset: int) -> None:
        data = b"".join(parts)
        super().write_at(file, [data[: max(0, self.room - offset)]], offset)
        if self.failing:
            self.failing = False
            raise OSError(errno.EIO, "Input/output error")
        if offset + len(data) > self.room:
            self.refused += 1
            raise OSError(errno.ENOSPC, "No space left on device")

    def sync_data(self, file: int) -> None:
        self.sizes.append(os.fstat(file).st_size)
        super().sync_data(file)


def only_pack(pool: Pool) -> PackFile:
    (pack,) = pool.folder.list_packs()
    return pack


def test_few_syncs_of_small_publications_change_a_size(tmp_path: Path) -> None:
    disk = Watched()
    with Pool.open(tmp_path / "pool", create=True, disk=disk) as pool:
        refs = [pool.publish(records(f"n{number}.1000")) for number in range(500)]
        assert len(disk.sizes) == 500
        assert 2 <= len({*disk.sizes}) < 12
        assert max(disk.sizes) < 2 * (refs[-1].offset + refs[-1].length)
        for number, ref in enumerate(refs):
            require(Pool.open(tmp_path / "pool"), ref, f"n{number}.1000")
        found = pool.verify()
        assert (found.publications, found.torn, found.damaged) == (500, 0, [])
        pool.seal()
        assert only_pack(pool).size == refs[-1].offset + refs[-1].length + 64
        with pool.owners() as owners:
            assert owners.collect().packs == 1
            pool.settle(refs)
            assert owners.collect().packs == 0


def test_large_publications_have_none_behind_them(tmp_path: Path) -> None:
    with Pool.open(tmp_path / "pool", create=True) as pool:
        for number in range(4):
            ref = pool.publish(records(f"n{number}.300000"))
            assert only_pack(pool).size == ref.offset + ref.length


@pytest.mark.parametrize("kind", ["btrfs", "fuse.juicefs", "nfs4", "apfs", ""])
def test_other_filesystems_get_none(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "filesystem", lambda path: kind)
    with Pool.open(tmp_path / "pool", create=True) as pool:
        for number in range(4):
            ref = pool.publish(records(f"n{number}.1000"))
            assert only_pack(pool).size == ref.offset + ref.length


def test_a_pack_goes_no_further_than_its_size(tmp_path: Path) -> None:
    with Pool.open(tmp_path / "pool", create=True, pack_bytes=50_000) as pool:
        for number in range(3):
            pool.publish(records(f"n{number}.1000"))
        assert 45_000 < only_pack(pool).size <= 50_000


def test_a_writer_that_dies_leaves_zeros_which_are_nothing(tmp_path: Path) -> None:
    pool = Pool.open(tmp_path / "pool", create=True)
    child = os.fork()
    if not child:
        try:
            dying = Pool.open(tmp_path / "pool")
            for number in range(3):
                dying.publish(records(f"n{number}.1000"), submission=f"n{number}")
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    pack = only_pack(pool)
    assert pack.path.read_bytes().endswith(bytes(50_000))
    with pool.owners() as owners:
        (writer,) = pool.folder.list_writers()
        found = owners.retire(writer, adopt="found")
        assert not pool.folder.list_writers()
        assert (pool.verify().publications, pool.verify().torn) == (3, 0)
        for number in range(3):
            (ref,) = pool.receipt(f"n{number}") or [None]
            assert ref in found
            require(pool, ref, f"n{number}.1000")
        owners.compact()
        assert only_pack(pool).size < pack.size - 50_000
        for number, ref in enumerate(sorted(found, key=lambda ref: ref.offset)):
            require(pool, ref, f"n{number}.1000")


def test_what_was_cut_off_before_zeros_is_counted_without_them(tmp_path: Path) -> None:
    pool = Pool.open(tmp_path / "pool", create=True)
    refs = [pool.publish(records(f"n{number}.1000")) for number in range(3)]
    pack = only_pack(pool)
    pool.folder.gate_of(pool.writer.id).unlink()
    with pack.path.open("r+b") as file:
        file.seek(refs[-1].offset + refs[-1].length - 64)
        file.write(bytes(64))
    found = pool.verify()
    assert not found.damaged
    assert refs[-1].length - 256 < found.torn <= refs[-1].length - 64


def test_after_a_failed_write_there_are_zeros_again(tmp_path: Path) -> None:
    disk = Watched()
    with Pool.open(tmp_path / "pool", create=True, disk=disk) as pool:
        refs = [pool.publish(records(f"n{number}.1000")) for number in range(3)]
        disk.failing = True
        with pytest.raises(StoreError, match="Input/output"):
            pool.publish(records("failed.1000"))
        assert only_pack(pool).size == refs[-1].offset + refs[-1].length
        refs += [pool.publish(records(f"n{number}.1000")) for number in range(3, 6)]
        assert only_pack(pool).size > refs[-1].offset + refs[-1].length + 50_000
        for number, ref in enumerate(refs):
            require(pool, ref, f"n{number}.1000")
    assert not pool.verify().damaged


@pytest.mark.parametrize("room", [9_000, 70_000, 131_072, 150_000])
def test_zeros_refuse_nobody(tmp_path: Path, room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a disk that is full, as much goes in with zeros as without."""

    def fill(folder: Path) -> list[Ref]:
        disk, refs = Watched(room), []
        with Pool.open(folder, create=True, disk=disk) as pool:
            with pytest.raises(StoreFull):
                while True:
                    refs.append(pool.publish(records(f"n{len(refs)}.1000")))
                    if disk.refused:
                        stopped = refs[-1].offset + refs[-1].length
                        assert only_pack(pool).size == stopped, "what nobody needs is left to others"
            assert disk.refused <= 2
            disk.room = 1 << 62
            refs += [pool.publish(records(f"n{len(refs) + more}.1000")) for more in range(3)]
            for number, ref in enumerate(refs):
                require(pool, ref, f"n{number}.1000")
        assert not pool.verify().damaged
        return refs

    with_zeros = fill(tmp_path / "with")
    monkeypatch.setattr(ahead, "filesystem", lambda path: "")
    assert [ref.offset for ref in with_zeros] == [ref.offset for ref in fill(tmp_path / "without")]


def test_zeros_count_under_a_limit_and_refuse_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = 16 << 20

    def fill(folder: Path, *, zeros: bool) -> int:
        with Pool.open(folder, create=True, max_bytes=limit) as pool:
            ref = pool.publish(records("n0.10000"))
            for number in range(1, 100):
                ref = pool.publish(records(f"n{number}.1000"))
                assert only_pack(pool).size - ref.offset - ref.length <= limit // 1024
            assert (only_pack(pool).size > ref.offset + ref.length) == zeros
            for size in (1_000_000, 10_000, 1000):
                with pytest.raises(StoreFull):
                    while True:
                        ref = pool.publish(records(f"more.{size}"))
            assert pool.folder.used() <= limit
            return ref.offset + ref.length

    end = fill(tmp_path / "with", zeros=True)
    monkeypatch.setattr(ahead, "filesystem", lambda path: "")
    assert end == fill(tmp_path / "without", zeros=False)
