"""Carrying publications to another pool: whole, once, and under the references that they had."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spillover.errors import Collected, Corrupt, InputError, SpillError, StoreFull
from spillover.pool import Link, Owners, Pool, Publication, Record, Ref


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Pool]:
    with Pool.open(tmp_path / "source", create=True, pack_bytes=30_000) as found:
        yield found


@pytest.fixture
def target(tmp_path: Path) -> Iterator[Pool]:
    with Pool.open(tmp_path / "target", create=True, pack_bytes=30_000) as found:
        yield found


@pytest.fixture
def there(target: Pool) -> Iterator[Owners]:
    with target.owners() as found:
        yield found


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "export"


def checkpoint(pool: Pool) -> tuple[Ref, list[Ref], np.ndarray[Any, Any]]:
    """A manifest whose payload names other publications by the text of their references."""
    array = np.random.default_rng(3).standard_normal(9000)
    tensors = pool.publish_tensors({"w": array, "v": array[:10]})
    data = pool.publish_many([Publication([Record("n", number)]) for number in range(20)])
    content = {
        "tensors": {name: str(ref) for name, ref in tensors.items()},
        "data": [str(ref) for ref in data],
    }
    manifest = pool.publish(
        [Record("manifest", content), Link("w", tensors["w"])],
        dependencies=[tensors["w"].whole(), *data],
        submission="manifest",
    )
    return manifest, data, array


def require_checkpoint(pool: Pool, manifest: Ref, array: np.ndarray[Any, Any]) -> None:
    """Follow the references inside of the payload."""
    found = pool.read(manifest)
    content = found["manifest"].payload
    for number, text in enumerate(content["data"]):
        assert pool.record(Ref.parse(text).at(0)).payload == number
    np.testing.assert_array_equal(pool.tensor(Ref.parse(content["tensors"]["w"])).numpy(), array)
    np.testing.assert_array_equal(found["w"].payload[4:9], array[4:9])


def export(pool: Pool, owned: dict[str, list[Ref]], file: Path) -> Any:
    with pool.owners() as owners:
        owners.retain_many({name: iter(refs) for name, refs in owned.items()})
        return owners.export([*owned], file)


def test_references_inside_payloads_stay_valid(source: Pool, target: Pool, there: Owners, file: Path) -> None:
    manifest, data, array = checkpoint(source)
    other = source.publish([Record("n", "stays")])
    done = export(source, {"checkpoint:1": [manifest], "some data": data[:3]}, file)
    assert done.pool == source.id
    assert done.owners == ["checkpoint:1", "some data"]
    assert done.publications == 22
    assert done.bytes == file.stat().st_size
    taken = there.import_(file)
    assert (taken.pool, taken.owners, taken.publications) == (source.id, done.owners, 22)
    require_checkpoint(target, manifest, array)
    assert there.owned("checkpoint:1") == [manifest]
    assert {*there.owned("some data")} == {*data[:3]}
    with pytest.raises(SpillError):
        target.read(other)
    there.collect()
    require_checkpoint(target, manifest, array)
    found = target.verify()
    assert found.damaged == []


def test_importing_again_takes_in_nothing(source: Pool, target: Pool, there: Owners, file: Path) -> None:
    manifest, _, array = checkpoint(source)
    export(source, {"a": [manifest]}, file)
    there.import_(file)
    used = target.folder.used()
    for _ in range(2):
        again = there.import_(file)
        assert (again.publications, again.bytes, again.owners) == (0, 0, ["a"])
    assert target.folder.used() == used
    there.release("a")
    assert there.collect().packs == 0
    with pytest.raises(SpillError):
        target.read(manifest)
    assert there.import_(file).publications == 22
    require_checkpoint(target, manifest, array)


def test_importing_into_the_pool_it_came_from(source: Pool, file: Path) -> None:
    manifest, _, array = checkpoint(source)
    done = export(source, {"a": [manifest]}, file)
    source.close()
    with source.owners() as owners:
        assert owners.import_(file).publications == 0
        owners.release("a")
        owners.collect()
        with pytest.raises(Collected):
            source.read(manifest)
        assert owners.import_(file).publications == done.publications
        require_checkpoint(source, manifest, array)
        owners.collect()
        require_checkpoint(source, manifest, array)


def test_only_what_is_missing_is_taken_in(
    source: Pool, target: Pool, there: Owners, file: Path, tmp_path: Path
) -> None:
    manifest, data, array = checkpoint(source)
    export(source, {"part": data}, file)
    assert there.import_(file).publications == 20
    with source.owners() as owners:
        owners.retain("all", [manifest])
        owners.export(["all"], tmp_path / "all")
    assert there.import_(tmp_path / "all").publications == 2
    require_checkpoint(target, manifest, array)
    there.release("part")
    there.collect()
    require_checkpoint(target, manifest, array)


def test_compaction_export_and_import_in_every_order(source: Pool, tmp_path: Path) -> None:
    """From pool to pool, rewritten before and after every step: the first references lead on."""
    manifest, _, array = checkpoint(source)
    with source.owners() as owners:
        owners.retain("a", [manifest])
    source.close()
    pool, names = source, []
    for number in range(4):
        with pool.owners() as owners:
            assert owners.compact(min_owned=1.1).rewritten > 0
            require_checkpoint(pool, manifest, array)
            assert owners.compact(min_owned=1.1).rewritten > 0
            owners.collect()
            require_checkpoint(pool, manifest, array)
            owners.export(["a"], tmp_path / f"file {number}")
        names.append(tmp_path / f"file {number}")
        following = Pool.open(tmp_path / f"pool {number}", create=True)
        with following.owners() as owners:
            assert owners.import_(names[-1]).publications == 22
        require_checkpoint(following, manifest, array)
        pool = following
    with source.owners() as owners:  # and home again, where all of it still is
        assert owners.import_(names[-1]).publications == 0
        owners.release("a")
        owners.collect()
        assert owners.import_(names[-1]).publications == 22
        require_checkpoint(source, manifest, array)


def test_what_was_imported_can_be_depended_on(source: Pool, target: Pool, there: Owners, file: Path) -> None:
    manifest, _, array = checkpoint(source)
    export(source, {"a": [manifest]}, file)
    there.import_(file)
    new = target.updated(manifest, {"note": "continued here"})
    there.retain("b", [new])
    there.release("a")
    target.close()
    there.collect()
    assert target.read(new)["note"].payload == "continued here"
    np.testing.assert_array_equal(target.read(new)["w"].payload.numpy(), array)
    require_checkpoint(target, manifest, array)


def test_a_receipt_travels(source: Pool, target: Pool, there: Owners, file: Path) -> None:
    manifest, _, array = checkpoint(source)
    export(source, {"a": [manifest]}, file)
    there.import_(file)
    (found,) = target.receipt("manifest") or []
    require_checkpoint(target, found, array)


@pytest.mark.parametrize("cut", [0, 1, 63, 64, 128, 5000, -1, -64, -65, -200])
def test_a_cut_export_is_refused_and_nothing_is_taken_in(
    source: Pool, target: Pool, there: Owners, file: Path, cut: int
) -> None:
    manifest, _, _ = checkpoint(source)
    export(source, {"a": [manifest]}, file)
    os.truncate(file, cut if cut >= 0 else file.stat().st_size + cut)
    with pytest.raises(Corrupt, match=str(file)):
        there.import_(file)
    require_untouched(target, there)


def require_untouched(target: Pool, there: Owners) -> None:
    assert there.names() == []
    target.close()
    there.collect()
    assert target.folder.used() == 0
    assert target.folder.list_writers() == []


def test_a_damaged_export_is_refused_or_harmless(
    source: Pool, target: Pool, there: Owners, file: Path
) -> None:
    """A bit flips anywhere. What cannot be seen is in no publication and under no checksum."""
    manifest, _, array = checkpoint(source)
    export(source, {"a": [manifest]}, file)
    data, luck, refused = file.read_bytes(), random.Random(11), 0
    for _ in range(60):
        place = luck.randrange(len(data))
        broken = bytearray(data)
        broken[place] ^= 1 << luck.randrange(8)
        file.write_bytes(broken)
        try:
            there.import_(file)
        except Corrupt as error:
            refused += 1
            assert "\n" not in str(error)
            assert there.names() == []
        else:
            require_checkpoint(target, manifest, array)
            there.release("a")
        there.collect()
        assert target.folder.used() == 0
    assert refused == 60


@pytest.mark.parametrize("content", [b"", b"text", b"\0" * 1000, b"SPILPACK" + bytes(200)])
def test_what_is_no_export_is_refused(target: Pool, there: Owners, file: Path, content: bytes) -> None:
    file.write_bytes(content)
    with pytest.raises(Corrupt, match=str(file)):
        there.import_(file)
    for wrong in (file.parent, file.parent / "missing"):
        with pytest.raises(InputError, match=str(wrong)):
            there.import_(wrong)
    require_untouched(target, there)


def test_an_open_pack_is_no_export(source: Pool, target: Pool, there: Owners) -> None:
    checkpoint(source)
    for pack in source.folder.list_packs():
        with pytest.raises(Corrupt, match="no export"):
            there.import_(pack.path)
    require_untouched(target, there)


def test_an_export_that_fails_leaves_no_file(source: Pool, file: Path) -> None:
    manifest, data, _ = checkpoint(source)
    with source.owners() as owners:
        owners.retain("a", [manifest])
        with pytest.raises(InputError, match="'b'"):
            owners.export(["a", "b"], file)
        pack = source.folder.path_of(data[0].pack)
        whole = pack.read_bytes()
        broken = bytearray(whole)
        broken[data[0].offset + 70] ^= 1
        pack.write_bytes(broken)
        with pytest.raises(Corrupt):
            owners.export(["a"], file)
        pack.write_bytes(whole)
        assert not [path for path in file.parent.iterdir() if "export" in path.name]
        owners.export(["a"], file)
        with pytest.raises(InputError, match="exists"):
            owners.export(["a"], file)


def test_no_room_for_an_import(source: Pool, tmp_path: Path, file: Path) -> None:
    manifest, _, array = checkpoint(source)
    export(source, {"a": [manifest]}, file)
    with Pool.open(tmp_path / "small", create=True, max_bytes=20_000) as small, small.owners() as owners:
        with pytest.raises(StoreFull):
            owners.import_(file)
        assert owners.names() == []
        owners.collect()
        assert small.folder.used() == 0
        small.folder.limit(None)
        owners.import_(file)
        require_checkpoint(small, manifest, array)


def test_an_import_brings_back_what_a_collection_was_about_to_delete(source: Pool, file: Path) -> None:
    """A collection that was cut off behind its record: the file is there and counts as gone."""
    manifest, _, array = checkpoint(source)
    export(source, {"a": [manifest]}, file)
    source.close()
    with source.owners() as owners:
        owners.release("a")
        with owners.catalogue.changing() as cursor:
            cursor.executemany(
                "INSERT INTO packs VALUES(?, 'deleting', 0)",
                [(pack.pack,) for pack in source.folder.list_packs()],
            )
            owners.catalogue.ledger.load(cursor)
    with source.owners() as owners:
        assert owners.import_(file).publications == 22
        owners.collect()
        require_checkpoint(source, manifest, array)


def test_large_publications_are_copied_in_pieces(
    source: Pool, target: Pool, there: Owners, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A system call reads 2 GiB at most; here it reads 16 MiB at most."""
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda file, size, offset: pread(file, min(size, 16 << 20), offset))
    array = np.random.default_rng(5).integers(0, 256, 20 << 20).astype(np.uint8)
    ref = source.publish([Record("t", array)])
    export(source, {"a": [ref]}, file)
    there.import_(file)
    np.testing.assert_array_equal(target.tensor(ref.at(0)).numpy(), array)
