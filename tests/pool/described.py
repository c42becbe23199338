"""A reader of packs made from ``docs/formats.md`` alone: every offset and type comes from its tables."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from data import ROOT

FORMATS = (ROOT / "docs" / "formats.md").read_text(encoding="utf-8")
TABLE = re.compile(r"<!-- (?P<label>[^>]+?) -->\n\n(?P<rows>(?:\|.*\n)+)")
INTEGERS = {"u8": "B", "u16": "H", "u32": "I", "u64": "Q", "i64": "q"}


class Field(NamedTuple):
    """A row of a table."""

    offset: int
    format: str
    name: str

    @property
    def size(self) -> int:
        return struct.calcsize("<" + self.format)


def rows(label: str) -> list[list[str]]:
    """The cells of a table, without backquotes."""
    [found] = [match["rows"] for match in TABLE.finditer(FORMATS) if match["label"] == label]
    return [[cell.strip().strip("`") for cell in row.split("|")[1:-1]] for row in found.splitlines()[2:]]


def fields(kind: str) -> list[Field]:
    """What the table of a structure says."""
    return [Field(int(offset), _format(type_), name) for offset, type_, name, _ in rows(f"bytes: {kind}")]


def size_of(kind: str) -> int:
    """Bytes that a structure has."""
    return sum(field.size for field in fields(kind))


def unpacked(kind: str, data: bytes, at: int = 0) -> dict[str, Any]:
    """A structure by its named fields; its checksum, where it has one, is compared."""
    named = [field for field in fields(kind) if field.name]
    found = {
        field.name: struct.unpack_from("<" + field.format, data, at + field.offset)[0] for field in named
    }
    if "checksum" in found:
        assert found["checksum"] == xxhash.xxh3_64_intdigest(data[at : at + 56])
    return found


class Pack:
    """A whole pack, or an export."""

    def __init__(self, path: Path) -> None:
        self.data = path.read_bytes()
        self.header = unpacked("pack header", self.data)
        assert self.header["magic"] == b"SPILPACK"
        seal = self.data[-64:]
        self.seal = unpacked("seal", seal) if seal[:4] == b"SEAL" else None
        self.end = self.seal["end"] if self.seal else len(self.data)
        assert self.seal is None or self.end == len(self.data) - 64

    def extents(self) -> Iterator[dict[str, Any]]:
        """Every whole extent; up to what is cut off where there is no seal."""
        at = 64
        while at < self.end:
            found = unpacked("extent header", self.data, at)
            assert found["magic"] == b"EXT1"
            if at + found["length"] > self.end:
                assert self.seal is None
                return
            yield self._extent(at, found)
            at += found["length"]

    def relocations(self) -> list[dict[str, int]]:
        """The rows of the relocation table."""
        assert self.seal is not None
        if not self.seal["relocations"]:
            return []
        [extent] = [found for found in self.extents() if found["at"] == self.seal["relocations"]]
        [record] = extent["records"]
        size = size_of("relocation")
        return [unpacked("relocation", record["payload"], at) for at in range(0, record["length"], size)]

    def _extent(self, at: int, header: dict[str, Any]) -> dict[str, Any]:
        stop = at + header["length"]
        trailer = unpacked("trailer", self.data, stop - 64)
        assert trailer["magic"] == b"END1"
        assert all(header[name] == trailer[name] for name in ("flags", "length", "index_at"))
        index = self.data[at + header["index_at"] : stop - 64]
        assert xxhash.xxh3_128(index).digest() == trailer["digest"]
        links = trailer["records"] * size_of("entry")
        chunks = links + trailer["dependencies"] * size_of("reference")
        heap = index[chunks + trailer["chunks"] * 16 :]
        entries = [unpacked("entry", index, start) for start in range(0, links, size_of("entry"))]
        for entry in entries:
            self._fill(entry, at, index[chunks:], heap)
        needs = [unpacked("reference", index, start) for start in range(links, chunks, 48)]
        return header | {"at": at, "records": entries, "dependencies": needs, "digest": trailer["digest"]}

    def _fill(self, entry: dict[str, Any], at: int, checksums: bytes, heap: bytes) -> None:
        """Add id, metadata, shape and payload."""
        rest = heap[entry["heap"] :]
        label, rest = rest[: entry["id_length"]], rest[entry["id_length"] :]
        note, rest = rest[: entry["metadata_length"]], rest[entry["metadata_length"] :]
        start = at + entry["start"]
        payload = self.data[start : start + entry["length"]]
        for number, first in enumerate(range(0, len(payload), 1 << 16), entry["chunk"]):
            digest = xxhash.xxh3_128(payload[first : first + (1 << 16)]).digest()
            assert digest == checksums[number * 16 : number * 16 + 16]
        entry["id"] = label.decode()
        entry["metadata"] = json.loads(note) if note else None
        entry["shape"] = [*struct.unpack_from(f"<{entry['rank']}q", rest)]
        entry["payload"] = payload


def _format(type_: str) -> str:
    if type_ in INTEGERS:
        return INTEGERS[type_]
    count, _, kind = type_.partition(" ")
    return f"{count}{'s' if kind == 'bytes' else 'x'}"
