"""Room that runs out, a limit that is reached, and a mount that takes nothing."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pool.content import records, require
from pool.others import Other, filled, mounted, refused
from spillover.errors import (
    StoreFull,
    StoreRefused,
)
from spillover.pool import Pool, Ref, ahead


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Callable[[], Other]]:
    started: list[Other] = []
    Pool.open(tmp_path / "pool", create=True)

    def start() -> Other:
        started.append(Other(tmp_path / "pool"))
        return started[-1]

    yield start
    for process in started:
        process.close()


@pytest.mark.parametrize("leaving", [0, 4 << 10, 8 << 10, 20 << 10, 60 << 10, 100 << 10])
@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_a_disk_that_is_really_full(
    tmp_path: Path, leaving: int, begun: bool, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One clear error at whatever call meets the end; with room again the same objects go on.

    With zeros ahead of packs, and without.
    """
    monkeypatch.setattr(ahead, "filesystem", lambda path: kind)
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=3m", "tmpfs") as disk:
        path = disk / "pool"
        pool = Pool.open(path, create=True, pack_bytes=120_000)
        first = pool.publish(records("first.5000")) if begun else None
        with pool.owners() as owners:
            if first:
                owners.retain("kept", [first])
            with filled(disk, leaving):
                done = {}
                with refused(StoreFull, "no space left", "free some space"):
                    for number in range(50):
                        ident = f"full{number}.9000"
                        done[ident] = pool.publish(records(ident), submission=ident)
                for ident, ref in done.items():
                    require(pool, ref, ident)
                if first:
                    require(pool, first, "first.5000")
                with refused(StoreFull):
                    pool.publish(records("full.90000"))
            pool.publish(records("small.100"))  # shorter than what the last failure may have left behind
            pool.seal()
            last = pool.publish(records("last.90000"), submission="last")
            for ident, ref in [*done.items(), ("last.90000", last)]:
                require(Pool.open(path), ref, ident)
            owners.retain("kept", [*done.values(), last])
            assert not pool.verify().damaged
        pool.close()
        assert pool.verify().torn == 0
        with Pool.open(path).owners() as owners:
            assert not owners.collect().damaged
            for ident, ref in [*done.items(), ("last.90000", last)]:
                require(Pool.open(path), ref, ident)


@pytest.mark.parametrize("leaving", [0, 4 << 10, 24 << 10])
def test_a_full_disk_below_the_catalogue(tmp_path: Path, leaving: int) -> None:
    """Owning, collecting and compacting fail as a whole, and succeed when there is room."""
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=3m", "tmpfs") as disk:
        path = disk / "pool"
        with Pool.open(path, create=True, pack_bytes=30_000) as pool:
            refs = {f"n{n}.4000": pool.publish(records(f"n{n}.4000")) for n in range(40)}
        kept = dict([*refs.items()][::8])
        pool = Pool.open(path, pack_bytes=30_000)
        with pool.owners() as owners:
            owners.retain("kept", [*kept.values()])
            with filled(disk, leaving):
                for act in (
                    lambda: owners.retain_many({f"more{n}": [*refs.values()] for n in range(20)}),
                    lambda: owners.compact(),
                    lambda: owners.export(["kept"], disk / "export"),
                ):
                    try:
                        act()
                    except StoreFull as error:
                        assert "\n" not in str(error)
                    for ident, ref in kept.items():
                        require(pool, ref, ident)
                assert not [path for path in disk.iterdir() if path.name.endswith(".part")]
                owners.release(*[name for name in owners.names() if name != "kept"])
            for ident, ref in kept.items():
                require(pool, ref, ident)
            owners.compact()
            owners.collect()
            assert owners.stats().packs < 5
        for ident, ref in kept.items():
            require(Pool.open(path), ref, ident)


def test_a_full_disk_can_be_collected(tmp_path: Path) -> None:
    """Letting go is how room is made, so that it must not need any."""
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=3m", "tmpfs") as disk:
        with Pool.open(disk / "pool", create=True, pack_bytes=30_000) as pool:
            refs = [pool.publish(records(f"n{n}.4000")) for n in range(40)]
        pool = Pool.open(disk / "pool")
        with pool.owners() as owners:
            owners.retain("kept", refs)
            with filled(disk, 64 << 10):  # what the log of the catalogue needs
                owners.release("kept")
                assert owners.collect().packs == 0
                pool.publish(records("again.90000"))
        pool.close()


def test_a_limit_that_several_writers_share(tmp_path: Path, other: Callable[[], Other]) -> None:
    limit = 1 << 20
    path = tmp_path / "pool"
    Pool.open(path).folder.limit(limit)
    writers = [other() for _ in range(3)]
    refs: list[tuple[str, str]] = []
    open_writers, number = [*writers], 0
    while open_writers:
        for writer in [*open_writers]:
            number += 1
            said = writer.publish(f"n{number}.9000")
            if said.startswith("StoreFull"):
                assert "of its 1,048,576 bytes" in said
                assert "spill pool gc" in said
                open_writers.remove(writer)
            else:
                refs.append((said, f"n{number}.9000"))
    pool = Pool.open(path)
    used = pool.folder.used()
    assert limit * 0.9 < used < limit * (1 + 3 / 64) + 3 * 20_000
    for ref, ident in refs:
        require(pool, Ref.parse(ref), ident)
    for writer in writers:
        writer.close()
    with pool.owners() as owners:
        assert owners.collect().packs == 0
    pool.publish(records("again.9000"))


def test_a_pool_at_its_limit_can_be_sealed_and_closed(tmp_path: Path) -> None:
    pool = Pool.open(tmp_path / "pool", create=True, max_bytes=30_000)
    ref = pool.publish(records("one.9000"))
    with refused(StoreFull, "30,000"):
        pool.publish(records("two.9000"))
    pool.seal()
    require(pool, ref, "one.9000")
    pool.close()
    assert not pool.folder.list_writers()


def test_a_read_only_mount(tmp_path: Path) -> None:
    path = tmp_path / "pool"
    with Pool.open(path, create=True, pack_bytes=4000) as pool:
        refs = {f"n{n}.900": pool.publish(records(f"n{n}.900"), submission=f"n{n}") for n in range(4)}
        with pool.owners() as owners:
            owners.retain("kept", [*refs.values()][:2])
            owners.compact(min_owned=1.0)
    with mounted(tmp_path / "seen", "--bind", str(path)) as seen:
        subprocess.run(["mount", "-o", "remount,ro,bind", str(seen)], check=True)
        pool = Pool.open(seen)
        for ident, ref in refs.items():
            require(pool, ref, ident)
        assert pool.receipt("n1") == [refs["n1.900"]]
        assert not pool.verify().damaged
        with pool.pin([*refs.values()]):
            pass
        with refused(StoreRefused, "read-only mount", "mount it for writing"):
            pool.publish(records("new.900"))
        with refused(StoreRefused, "read-only mount"):
            pool.owners()
        with refused(StoreRefused, "read-only mount"):
            Pool.open(seen / "sub", create=True)
        pool.close()
