"""The format is what the documentation says, and what the first version wrote stays readable for ever."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import pytest
import xxhash

from pool import write_golden
from pool.described import Pack, fields, rows, size_of, unpacked
from pool.write_golden import SECOND, TORN, described
from spillover.errors import Corrupt
from spillover.pool import Pool, Ref, codecs
from spillover.pool.layout import (
    ENTRY,
    Entry,
    ExtentHeader,
    PackHeader,
    Seal,
    Trailer,
    extent_header,
    extent_trailer,
)
from spillover.pool.ledger import SCHEMA, VERSION
from spillover.pool.reference import pack_name
from spillover.pool.relocation import encode_moved, encode_table

GOLDEN = Path(__file__).parent / "golden"
VERSIONS = sorted(GOLDEN.iterdir())
PACK_HEADER = PackHeader(bytes(range(16)), 17, 18)
EXTENT_HEADER = ExtentHeader(1, 20, 21, bytes(range(16)), 22, 23, 24)
TRAILER = Trailer(1, 31, 32, 33, 34, 35, bytes(range(16)))
SEAL = Seal(41, 42, 43)
KINDS = {
    "pack header": (PACK_HEADER, PACK_HEADER.encode()),
    "extent header": (EXTENT_HEADER, extent_header(*EXTENT_HEADER)),
    "trailer": (TRAILER, extent_trailer(*TRAILER)),
    "seal": (SEAL, SEAL.encode()),
}


@pytest.fixture(params=VERSIONS, ids=lambda path: path.name)
def golden(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of what a version wrote, with the empty folder that it lacks."""
    shutil.copytree(request.param, tmp_path / "golden")
    for pool in ("records", "compacted"):
        (tmp_path / "golden" / pool / "writers").mkdir()
    return tmp_path / "golden"


def expected(golden: Path) -> dict[str, list[dict[str, Any]]]:
    return json.loads((golden / "expected.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("kind", "size"),
    [(kind, 64) for kind in (*KINDS, "moved header")]
    + [("entry", 48), ("reference", 48), ("relocation", 32), ("moved row", 24)],
)
def test_the_tables_leave_no_gap(kind: str, size: int) -> None:
    found = fields(kind)
    assert [field.offset for field in found] == [
        0,
        *itertools.accumulate(field.size for field in found[:-1]),
    ]
    assert size_of(kind) == size


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_code_writes_is_where_the_table_says(kind: str) -> None:
    value, written = KINDS[kind]
    found = unpacked(kind, written)
    assert {name: found[name] for name in value._fields} == value._asdict()


def test_entries_references_and_rows_are_where_their_tables_say() -> None:
    entry = Entry(*range(100, 112))
    assert unpacked("entry", ENTRY.pack(*entry)) == entry._asdict()
    ref = Ref(1, 2, 3, 4, 5, 6, True)
    found = unpacked("reference", ref.pack_bytes())
    assert found == {"pool": 1, "pack": 2, "offset": 3, "length": 4, "check": 5, "ordinal": 6, "flags": 1}
    assert unpacked("reference", ref.whole().pack_bytes())["ordinal"] == 2**32 - 1
    assert base64.urlsafe_b64decode(str(ref)) == ref.pack_bytes()
    assert len(str(ref)) == 64
    assert [*unpacked("relocation", encode_table([(1, 2, 3, 4)])).values()] == [1, 2, 3, 4]
    data = encode_moved([(4, 5, 6), (1, 2, 3)])
    head = unpacked("moved header", data)
    assert (head["magic"], head["version"], head["count"]) == (b"SPILMOVE", 1, 2)
    assert head["digest"] == xxhash.xxh3_128(data[64:]).digest()
    assert [[*unpacked("moved row", data, at).values()] for at in (64, 88)] == [[1, 2, 3], [4, 5, 6]]
    assert len(data) == 64 + 2 * size_of("moved row")


def test_codecs_and_dtypes_are_those_of_the_code() -> None:
    assert [int(row[0]) for row in rows("codecs")] == [codecs.BYTES, codecs.JSON, codecs.TENSOR]
    numbered = map(codecs.dtype_numbered, itertools.count(1))
    known = [*itertools.takewhile(bool, numbered)]
    assert rows("dtypes") == [[str(dtype.number), dtype.name, str(dtype.size)] for dtype in known]


def test_the_catalogue_has_exactly_the_tables_and_columns_of_the_documentation() -> None:
    database = sqlite3.connect(":memory:")
    database.executescript(SCHEMA)
    tables = {name for (name,) in database.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")}
    assert tables == {"packs", "owned", "names", "roots", "moved"}
    for table in tables:
        columns = [name for _, name, *_ in database.execute(f"PRAGMA table_info({table})")]
        assert [row[0] for row in rows(f"sql: {table}")] == columns
    database.close()
    assert VERSION == 1


def test_what_a_version_wrote_is_read(golden: Path) -> None:
    wanted = expected(golden)
    pools = [Pool.open(golden / name) for name in ("records", "compacted")]
    read = 0
    for text, records in wanted.items():
        ref = Ref.parse(text)
        pool = next(pool for pool in pools if pool.folder.short == ref.pool)
        assert [described(record) for record in pool.read(ref).values()] == records
        read += 1
    assert read == len(wanted) > 10


def test_nothing_in_it_is_damaged_and_the_torn_end_is_known(golden: Path) -> None:
    with Pool.open(golden / "records") as pool:
        found = pool.verify()
        assert (found.packs, found.publications, found.damaged) == (3, 8, [])
        [torn] = [file for file in pool.folder.list_packs() if file.path.name.startswith("0000000002-")]
        last = Ref(pool.folder.short, torn.pack, 64 + 320, torn.size + TORN - 64 - 320, 0)
        assert found.torn == last.length - TORN
        with pytest.raises(Corrupt):
            pool.read(last)
    with Pool.open(golden / "compacted") as pool:
        assert (pool.verify().damaged, pool.verify().torn) == ([], 0)


def test_its_catalogues_say_who_owns_what(golden: Path) -> None:
    with Pool.open(golden / "records") as pool, pool.owners() as owners:
        assert owners.names() == ["all", "zweite"]
        assert owners.collect().damaged == []
    with Pool.open(golden / "compacted") as pool, pool.owners() as owners:
        assert {name: len(owners.owned(name)) for name in owners.names()} == {"kept": 6, "zweite": 2}
        owners.collect()
        for name in owners.names():
            for ref in owners.owned(name):
                assert [described(record) for record in pool.read(ref).values()] == expected(golden)[
                    str(ref.whole())
                ]


def test_its_export_is_taken_in_under_the_old_references(golden: Path, tmp_path: Path) -> None:
    with Pool.open(tmp_path / "new", create=True) as pool, pool.owners() as owners:
        done = owners.import_(golden / "export.pack")
        assert (done.owners, done.publications) == (["zweite"], 4)
        for ref in owners.owned("zweite"):
            assert [described(record) for record in pool.read(ref).values()] == expected(golden)[
                str(ref.whole())
            ]


def test_the_documentation_suffices_to_read_it(golden: Path) -> None:
    """Every extent, read by the tables alone, has the records that were published."""
    wanted, seen = expected(golden), set()
    names = {int(number): (name, int(size)) for number, name, size in rows("dtypes")}
    for path in golden.rglob("*.pack"):
        pack = Pack(path)
        formerly = {row["offset"]: row for row in pack.relocations()} if pack.seal else {}
        for extent in pack.extents():
            old = formerly.get(extent["at"], {"old_pack": pack.header["pack"], "old_offset": extent["at"]})
            pool = old.get("old_pool", int.from_bytes(pack.header["pool"][:8], "little"))
            check = int.from_bytes(extent["digest"][:8], "little")
            linked = bool(extent["dependencies"])
            ref = str(Ref(pool, old["old_pack"], old["old_offset"], extent["length"], check, None, linked))
            if extent["flags"] or ref not in wanted:
                continue
            seen.add(ref)
            for record, facts in zip(extent["records"], wanted[ref], strict=True):
                same(record, facts, names)
    assert seen == wanted.keys()


def same(record: dict[str, Any], facts: dict[str, Any], names: dict[int, tuple[str, int]]) -> None:
    """A record read by the tables is the one that was published."""
    assert record["id"] == facts["id"]
    if record["kind"]:
        return
    assert record["metadata"] == facts["metadata"]
    if record["codec"] == codecs.JSON:
        assert json.loads(record["payload"]) == facts["value"]
        return
    assert hashlib.sha256(record["payload"]).hexdigest() == facts["sha256"]
    if record["codec"] == codecs.TENSOR:
        name, size = names[record["dtype"]]
        assert (name, record["shape"]) == (facts["dtype"], facts["shape"])
        assert record["length"] % size == 0


def test_moved_leads_from_the_compacted_packs_to_their_successor() -> None:
    folder = GOLDEN / "version-1" / "compacted"
    data = (folder / "moved").read_bytes()
    assert unpacked("moved header", data)["count"] == (len(data) - 64) // 24
    found = [unpacked("moved row", data, at) for at in range(64, len(data), 24)]
    here = {path.stem for path in (folder / "packs").iterdir()}
    assert {pack_name(row["pack"]) for row in found} == here
    own = int.from_bytes(bytes.fromhex(SECOND)[:8], "little")
    gone = {pack_name(row["old_pack"]) for row in found if row["old_pool"] == own}
    assert gone == {f"0000000003-{serial:06}" for serial in (1, 2, 3)}


def test_the_writer_still_writes_the_same_bytes(tmp_path: Path) -> None:
    """The catalogues are SQLite's business; everything else is ours, byte for byte."""
    write_golden.write(tmp_path / "now")
    then = GOLDEN / "version-1"
    files = {path.relative_to(then) for path in then.rglob("*") if path.is_file()}
    assert {
        path.relative_to(tmp_path / "now") for path in (tmp_path / "now").rglob("*") if path.is_file()
    } == files
    ours = [path for path in files if path.suffix != ".sqlite"]
    assert [
        path for path in ours if (tmp_path / "now" / path).read_bytes() != (then / path).read_bytes()
    ] == []
