"""One bit flips somewhere: it is noticed, named, and costs no more than what it hit."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pool.content import records, require
from spillover.errors import Collected, Corrupt, SpillError, StoreError
from spillover.pool import Pool, Reader, Record, Ref
from spillover.pool.intake import relocation_draft
from spillover.pool.layout import HEADER
from spillover.store.disk import Disk

STEP = 7
SMALL = ["one.300", "two.900", "three.100"]


@pytest.fixture
def memory() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
    yield folder
    shutil.rmtree(folder)


@contextlib.contextmanager
def flipped(path: Path, place: int, bit: int = 0) -> Iterator[None]:
    """The file with one bit of one byte turned over."""
    file = os.open(path, os.O_RDWR)
    try:
        byte = os.pread(file, 1, place)[0]
        os.pwrite(file, bytes([byte ^ 1 << bit]), place)
        yield
        os.pwrite(file, bytes([byte]), place)
    finally:
        os.close(file)


def outcome(pool: Pool, ref: Ref, ident: str) -> str:
    """Empty if everything reads back exactly, else the one line that says why not."""
    try:
        require(pool.reader(), ref, ident)
    except Corrupt as error:
        return str(error)
    return ""


@pytest.mark.parametrize("sealed", [True, False])
def test_a_bit_anywhere_in_a_pack(memory: Path, sealed: bool) -> None:
    """Verification sees every byte; a read sees what it touches, and the neighbours still read."""
    pool = Pool.open(memory / "pool", create=True)
    refs = {ident: pool.publish(records(ident)) for ident in SMALL}
    last = pool.publish([Record("end", b"x" * 200)])
    if sealed:
        pool.close()
    else:  # its process died
        pool.writer._gate.leave()
    (pack,) = (memory / "pool" / "packs").iterdir()
    for place in [*range(HEADER), *range(HEADER, pack.stat().st_size, STEP)]:
        with flipped(pack, place, place % 8):
            fresh = Pool.open(memory / "pool")
            damaged = fresh.verify().damaged
            at_the_end = last.offset <= place and not sealed
            assert damaged or at_the_end, f"byte {place} is not noticed"
            if at_the_end:  # nobody can tell it from a publication that was cut off
                assert fresh.verify().torn == last.length
            assert all(pack.name in line and "\n" not in line for line in damaged)
            for ident, ref in refs.items():
                said = outcome(fresh, ref, ident)
                inside = ref.offset + HEADER <= place < ref.offset + ref.length
                assert bool(said) == ((inside and not padding(fresh, ref, place)) or place < HEADER), (
                    place,
                    said,
                )
                if inside and said:
                    assert f"extent at {ref.offset}" in said
                    if "record" in said:
                        assert re.search(r"record '(note|raw|rows)' .* chunk 0, bytes \d+ to \d+", said), said
                        assert any(said in line for line in damaged)


def padding(pool: Pool, ref: Ref, place: int) -> bool:
    """Whether a byte of an extent is one of the zeros between payloads, which no read touches."""
    try:
        index = Reader(pool.folder).index(ref)
    except Corrupt:
        return False
    spans = [(entry.start, entry.start + entry.length) for entry in index.entries()]
    inside = place - ref.offset
    return inside < index.trailer.index_at and not any(start <= inside < stop for start, stop in spans)


def test_damage_to_one_chunk_leaves_the_other_rows(memory: Path) -> None:
    pool = Pool.open(memory / "pool", create=True)
    array = np.arange(40_000, dtype=np.int64).reshape(1000, 40)  # 320 bytes a row, five chunks
    ref = pool.publish([Record("w", array), Record("note", {"a": 1})])
    pool.close()
    (pack,) = (memory / "pool" / "packs").iterdir()
    with flipped(pack, ref.offset + HEADER + 3 * 65536 + 100):
        pool = Pool.open(memory / "pool")
        tensor = pool.tensor(ref.at(0))
        assert (tensor[0:600] == array[0:600]).all()
        assert (tensor[900:1000] == array[900:1000]).all()
        assert pool.record(ref.at(1)).payload == {"a": 1}
        with pytest.raises(Corrupt, match="record 'w' of the extent at 64 is damaged in chunk 3"):
            tensor[615:616]
        with pytest.raises(Corrupt, match="chunk 3"):
            tensor.numpy()
        (line,) = pool.verify().damaged
        assert "record 'w'" in line
        assert "chunk 3" in line


def test_damage_before_a_whole_publication_hides_nothing_of_a_dead_writer(memory: Path) -> None:
    """What a killed writer acknowledged behind the damage is still adopted, and found by its submission."""
    pool = Pool.open(memory / "pool", create=True)
    refs = {ident: pool.publish(records(ident), submission=ident) for ident in SMALL}
    writer = pool.writer.id
    pool.writer._gate.leave()
    pool.writer._held.close()
    (pack,) = (memory / "pool" / "packs").iterdir()
    for place in (refs["one.300"].offset + 5, refs["one.300"].offset + HEADER + 5):
        with flipped(pack, place):
            fresh = Pool.open(memory / "pool")
            assert fresh.verify().damaged
            assert fresh.receipt("two.900") == [refs["two.900"]]
            with fresh.owners() as owners:
                found = owners.retire(writer, adopt="found")
                assert found == [refs["two.900"], refs["three.100"]]
                owners.release("found")


def test_damage_is_not_carried_on(memory: Path) -> None:
    """A pack with damage to what is owned is neither compacted nor exported, and the rest goes on."""
    path = memory / "pool"
    with Pool.open(path, create=True, pack_bytes=6000) as pool:
        refs = {ident: pool.publish(records(ident)) for ident in ["a.2000", "b.2500", "c.2000", "d.2600"]}
    assert len({ref.pack for ref in refs.values()}) == 2
    pack = pool.folder.path_of(refs["a.2000"].pack)
    kept = {ident: refs[ident] for ident in ("a.2000", "c.2000")}
    with Pool.open(path).owners() as owners, flipped(pack, refs["a.2000"].offset + 1000):
        owners.retain("bad", [refs["a.2000"]])
        owners.retain("good", [refs["c.2000"]])
        done = owners.compact(min_owned=1.0)
        assert done.rewritten == 1
        (line,) = done.damaged
        assert "record 'raw'" in line
        assert not owners.collect().damaged
        with pytest.raises(Corrupt, match="record 'raw'"):
            owners.export(["bad"], memory / "export")
        assert [path.name for path in memory.iterdir()] == ["pool"]
        require(pool, refs["c.2000"], "c.2000")
    for ident, ref in kept.items():  # the bit is as it was: nothing had been thrown away
        require(pool, ref, ident)


class Lying(Disk):
    """Turns a bit over on its way to the disk, and reports success."""

    def __init__(self, place: int) -> None:
        self.place = place
        self.lying = False

    def write_at(self, file: int, parts: Sequence[bytes | memoryview], offset: int) -> None:
        data = bytearray(b"".join(parts))
        if self.lying and offset <= self.place < offset + len(data):
            data[self.place - offset] ^= 1
        super().write_at(file, [data], offset)


@pytest.mark.parametrize("place", [10, 64 + 10, 64 + 500, 64 + 2600, "table", "seal"])
def test_a_copy_is_checked_before_the_original_goes(memory: Path, place: int | str) -> None:
    """The new pack is read back from the disk; what does not check replaces nothing."""
    path, disk = memory / "pool", Lying(0)
    pool = Pool.open(path, create=True, disk=disk)
    refs = {ident: pool.publish(records(ident)) for ident in ["a.2000", "b.2500"]}
    pool.close()
    length = refs["a.2000"].length
    places = {"table": HEADER + length + 70, "seal": HEADER + length + table_bytes() + 20}
    with pool.owners() as owners:
        owners.retain("kept", [refs["a.2000"]])
        disk.place, disk.lying = places.get(str(place), 0) or int(place), True
        with pytest.raises((StoreError, Corrupt)):
            owners.compact(min_owned=1.0)
        disk.lying = False
        require(Pool.open(path), refs["a.2000"], "a.2000")
        owners.collect()
        require(Pool.open(path), refs["a.2000"], "a.2000")
        assert owners.compact(min_owned=1.0).rewritten == 1
        require(Pool.open(path), refs["a.2000"], "a.2000")


def table_bytes() -> int:
    return relocation_draft([(1, 2, 3, 4)], 5).length


@pytest.fixture
def moved(memory: Path) -> tuple[Path, dict[str, Ref]]:
    """A closed pool whose owned publications were relocated."""
    path = memory / "pool"
    with Pool.open(path, create=True) as pool:
        refs = {ident: pool.publish(records(ident)) for ident in ["rest.3000", *SMALL, "more.3000"]}
    with Pool.open(path).owners() as owners:
        owners.retain("kept", [refs[ident] for ident in SMALL])
        assert owners.compact(min_owned=1.0).rewritten
        owners.collect()
        owners.retain("late", [refs["two.900"]])
    return path, {ident: refs[ident] for ident in SMALL}


def test_a_bit_anywhere_in_a_pack_of_relocated_extents(moved: tuple[Path, dict[str, Ref]]) -> None:
    """Damage to what leads to an extent is called damage, never collection."""
    path, refs = moved
    (pack,) = (path / "packs").iterdir()
    for place in range(0, pack.stat().st_size, STEP):
        with flipped(pack, place, place % 8):
            fresh = Pool.open(path)
            assert fresh.verify().damaged, place
            for ident, ref in refs.items():
                outcome(fresh, ref, ident)
    for place in range(pack.stat().st_size - HEADER, pack.stat().st_size):
        with flipped(pack, place):
            assert all("table" in said or "seal" in said for said in every(path, refs)), place


def test_a_bit_anywhere_in_moved(moved: tuple[Path, dict[str, Ref]]) -> None:
    path, refs = moved
    before = (path / "moved").read_bytes()
    for place in range(len(before)):
        with flipped(path / "moved", place, place % 8):
            assert all("moved" in said for said in every(path, refs)), place
    with (
        flipped(path / "moved", 70),
        Pool.open(path).owners() as owners,
    ):  # it is written anew from the catalogue
        assert owners.collect().deleted == 0
    assert every(path, refs) == [""] * len(refs)


def every(path: Path, refs: dict[str, Ref]) -> list[str]:
    fresh = Pool.open(path)
    return [outcome(fresh, ref, ident) for ident, ref in refs.items()]


def test_a_bit_anywhere_in_the_identity(memory: Path) -> None:
    """The pool does not open, or refuses what it does not recognise, or nothing is lost but the limit."""
    path = memory / "pool"
    with Pool.open(path, create=True, max_bytes=1 << 20) as pool:
        ref = pool.publish(records("one.300"))
        with pool.owners() as owners:
            owners.retain("kept", [ref])
    identity = path / "pool.json"
    for place in range(identity.stat().st_size):
        for bit in range(8):
            with flipped(identity, place, bit):
                try:
                    fresh = Pool.open(path)
                    require(fresh, ref, "one.300")
                    with fresh.owners() as owners:
                        owners.collect()
                except SpillError as error:
                    assert "\n" not in str(error)
    require(Pool.open(path), ref, "one.300")


def test_a_bit_anywhere_in_a_gate(memory: Path) -> None:
    """Only the lock on a gate counts; what it says is for people."""
    pool = Pool.open(memory / "pool", create=True)
    ref = pool.publish(records("one.300"))
    gate = pool.folder.gate_of(pool.writer.id)
    with Pool.open(memory / "pool").owners() as owners:
        for place in range(gate.stat().st_size):
            with flipped(gate, place, place % 8):
                assert [info.id for info in owners.writers()] == [pool.writer.id]
                assert not owners.collect().deleted
        pool.publish(records("two.900"))
        require(pool, ref, "one.300")


def test_a_bit_anywhere_in_the_catalogue_loses_nothing_owned(memory: Path) -> None:
    """Every page, in steps: either one clear error, or all that is owned is there after a collection."""
    path = memory / "pool"
    with Pool.open(path, create=True, pack_bytes=2000) as pool:
        refs = {f"kept{n}.500": pool.publish(records(f"kept{n}.500")) for n in range(6)}
        with pool.owners() as owners:
            for number, ref in enumerate(refs.values()):
                owners.retain(f"owner{number % 2}", [ref])
    catalogue = path / "catalogue.sqlite"
    lost = []
    size = catalogue.stat().st_size
    for number, place in enumerate(used(catalogue, size)):
        copy = memory / "copy"
        shutil.copytree(path, copy)
        with flipped(copy / "catalogue.sqlite", place, number % 8):
            pass_through(copy, refs, lost, place)
        shutil.rmtree(copy)
    assert not lost, f"{len(lost)} flips lost something owned: {lost[:10]}"


def used(catalogue: Path, size: int) -> list[int]:
    """Places in the database that are not just zeros: every third, and all of its first hundred bytes."""
    data = catalogue.read_bytes()
    return [place for place in range(size) if place < 100 or (data[place] and place % 3 == 0)]


def pass_through(path: Path, refs: dict[str, Ref], lost: list[Any], place: int) -> None:
    pool = Pool.open(path)
    try:
        with pool.owners() as owners:
            owners.collect()
    except SpillError as error:
        assert "\n" not in str(error)
    for ident, ref in refs.items():
        try:
            require(pool, ref, ident)
        except Collected:
            lost.append((place, ident))
