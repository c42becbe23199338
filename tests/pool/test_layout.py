"""The structures of a pack: what is encoded decodes, and anything else is damage, never an accident."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from spillover.errors import Corrupt
from spillover.pool import layout
from spillover.pool.extent import Draft, Index, Publication, Record
from spillover.pool.layout import (
    HEADER,
    ExtentHeader,
    PackHeader,
    Seal,
    Trailer,
    extent_header,
    extent_trailer,
)
from spillover.pool.relocation import decode_moved, decode_table, encode_moved, encode_table

U64 = st.integers(0, 2**64 - 1)
U32 = st.integers(0, 2**32 - 1)
DIGEST = st.binary(min_size=16, max_size=16)
STRUCTURES: list[Any] = [
    st.builds(PackHeader, DIGEST, U64, U64),
    st.builds(ExtentHeader, U32, U64, U64, DIGEST, U32, U32, U64),
    st.builds(Trailer, U32, U64, U64, U32, U32, U64, DIGEST),
    st.builds(Seal, U64, U64, U64),
]
KINDS = [PackHeader, ExtentHeader, Trailer, Seal]


def encoded(found: Any) -> bytes:
    if isinstance(found, ExtentHeader):
        return extent_header(*found)
    if isinstance(found, Trailer):
        return extent_trailer(*found)
    data: bytes = found.encode()
    return data


@given(found=st.one_of(STRUCTURES))
def test_structures(found: Any) -> None:
    data = encoded(found)
    assert len(data) == HEADER
    assert type(found).decode(data, "here") == found


@given(found=st.one_of(STRUCTURES), place=st.integers(0, HEADER * 8 - 1))
def test_a_flipped_bit_is_damage(found: Any, place: int) -> None:
    data = bytearray(encoded(found))
    data[place // 8] ^= 1 << place % 8
    with pytest.raises(Corrupt, match="here"):
        type(found).decode(bytes(data), "here")


@given(data=st.binary(max_size=200), kind=st.sampled_from(KINDS))
def test_garbage_is_damage(data: bytes, kind: Any) -> None:
    with pytest.raises(Corrupt):
        kind.decode(data, "here")


@given(found=st.one_of(STRUCTURES), size=st.integers(0, HEADER - 1))
def test_a_cut_structure_is_damage(found: Any, size: int) -> None:
    with pytest.raises(Corrupt):
        type(found).decode(encoded(found)[:size], "here")


@given(found=st.one_of(STRUCTURES), kind=st.sampled_from(KINDS))
def test_one_structure_is_not_another(found: Any, kind: Any) -> None:
    assume(kind is not type(found))
    with pytest.raises(Corrupt):
        kind.decode(encoded(found), "here")


def test_another_version_says_so() -> None:
    head = layout._PACK.pack(b"SPILPACK", 2, 1, 16, bytes(16), 1, 1, 0)
    with pytest.raises(Corrupt, match="version 2") as refused:
        PackHeader.decode(layout.checked(head), "here")
    assert "upgrade" in str(refused.value.hint)


def test_another_checksum_says_so() -> None:
    head = layout._PACK.pack(b"SPILPACK", 1, 9, 16, bytes(16), 1, 1, 0)
    with pytest.raises(Corrupt, match="unknown kind"):
        PackHeader.decode(layout.checked(head), "here")


def draft(records: list[tuple[str, bytes]]) -> tuple[bytes, Trailer]:
    made = Draft(Publication([Record(name, data, {"n": name}) for name, data in records]), 7)
    *_, index, trailer = made.parts
    assert sum(map(len, made.parts)) == made.length
    return bytes(index), Trailer.decode(bytes(trailer), "here")


RECORDS = st.lists(
    st.tuples(st.text(st.characters(exclude_categories=["Cs"]), max_size=20), st.binary(max_size=100)),
    unique_by=lambda record: record[0],
    max_size=8,
)


@given(records=RECORDS)
def test_an_index(records: list[tuple[str, bytes]]) -> None:
    data, trailer = draft(records)
    index = Index(data, trailer, "here")
    assert index.records == len(records)
    for place, (entry, (name, payload)) in enumerate(zip(index.entries(), records, strict=True)):
        assert index.entry(place) == entry
        assert index.id(entry) == name
        assert index.metadata(entry) == {"n": name}
        assert entry.length == len(payload)
        assert entry.start % layout.ALIGN == 0
    for place in (-1, len(records)):
        with pytest.raises(IndexError):
            index.entry(place)


@given(records=RECORDS, place=st.integers(0, 10**6))
@settings(max_examples=50)
def test_a_damaged_index_is_damage(records: list[tuple[str, bytes]], place: int) -> None:
    data, trailer = draft(records)
    assume(data)
    broken = bytearray(data)
    broken[place % len(data)] ^= 0x40
    for wrong in (bytes(broken), data[:-1], data + b"\0", b""):
        with pytest.raises(Corrupt, match="index of here"):
            Index(wrong, trailer, "here")


ROWS = st.lists(st.tuples(U64, U64, U64, U64), unique=True)


@given(rows=ROWS)
def test_relocation_tables(rows: list[Any]) -> None:
    assert decode_table(encode_table(rows)) == sorted(rows)


@given(rows=st.lists(st.tuples(U64, U64, U64), unique=True))
def test_tables_of_moved_packs(rows: list[Any]) -> None:
    data = encode_moved(rows)
    assert decode_moved(data, "moved") == sorted(rows)
    for wrong in (data[:-1], data + b"\0", data[: HEADER - 1], b"", b"X" + data[1:]):
        with pytest.raises(Corrupt, match="moved"):
            decode_moved(wrong, "moved")


def test_a_flipped_bit_in_the_header_of_moved_packs_is_damage() -> None:
    data = encode_moved([(1, 2, 3), (4, 5, 6)])
    for place in range(HEADER * 8):
        broken = bytearray(data)
        broken[place // 8] ^= 1 << place % 8
        with pytest.raises(Corrupt, match="moved"):
            decode_moved(bytes(broken), "moved")


@given(length=st.integers(0, 2**40))
def test_padding(length: int) -> None:
    assert 0 <= layout.padding(length) < layout.ALIGN
    assert (length + layout.padding(length)) % layout.ALIGN == 0
