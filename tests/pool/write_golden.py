"""Writes the golden pools: with fixed ids, so that equal code gives equal bytes.

    python tests/pool/write_golden.py FOLDER

``golden/version-1`` holds what the first version of the format wrote. It is never written again: a version
that writes other bytes gets a folder of its own, and reads this one for ever.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import secrets
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from spillover.pool import Link, Pool, Publication, Record, Ref, Tensor
from spillover.pool.codecs import dtype_numbered

FIRST, SECOND = bytes(range(16)).hex(), bytes(range(16, 32)).hex()
TORN = 100
"""Bytes that the last publication of a pack lacks."""
Expected = dict[str, list[dict[str, Any]]]


def write(folder: Path) -> None:
    """Write two pools, an export, and what reading them must give."""
    with _fixed_writers():
        expected = _records(_pool(folder / "records", FIRST), folder / "export.pack")
        expected |= _compacted(_pool(folder / "compacted", SECOND), folder / "export.pack")
    for pool in ("records", "compacted"):
        for passing in ("owner", "writers"):  # of the processes at work, with their dates
            shutil.rmtree(folder / pool / passing)
        (folder / pool / ".lock").unlink(missing_ok=True)
    lines = [f"{json.dumps(ref)}: {json.dumps(read, ensure_ascii=False)}" for ref, read in expected.items()]
    (folder / "expected.json").write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def described(record: Record) -> dict[str, Any]:
    """A record that was read, as ``expected.json`` has it."""
    payload, facts = record.payload, {"id": record.id, "metadata": record.metadata}
    if isinstance(payload, Tensor):
        data = bytearray(payload.nbytes)
        payload.read_into(data)
        facts |= {"dtype": payload.dtype, "shape": [*payload.shape]}
    elif isinstance(payload, bytes):
        data = bytearray(payload)
    else:
        return facts | {"value": payload}
    return facts | {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def tensors() -> Iterator[Record]:
    """A tensor of every dtype, of two rows, with elements of every pattern of bits."""
    for number in itertools.count(1):
        if (dtype := dtype_numbered(number)) is None:
            return
        data = torch.arange(6 * dtype.size, dtype=torch.uint8) * 37 + number
        if dtype.name == "bool":
            data %= 2
        yield Record(dtype.name, data.view(getattr(torch, dtype.name)).reshape(2, 3), {"number": number})


def _records(pool: Pool, export: Path) -> Expected:
    with pool:
        many: Sequence[Record] = [
            Record("", b"the empty id"),
            Record("bytes", b"\0\xff" * 50, {"why": "zählt", "deep": [1, 2.5, None, {"a": True}]}),
            Record("no bytes", b""),
            Record("chunks", bytes(np.arange(2 * 65536 + 100, dtype=np.uint32).astype(np.uint8))),
            Record("json", {"text": "東京 🙂", "numbers": [0, -1, 2**53, 1e-300], "none": None}),
            Record("json string", "x"),
            Record("scalar", np.float64(-0.0)),
            Record("nothing", np.zeros((0, 3), np.float32)),
            Record("five dimensions", np.arange(32, dtype=np.int16).reshape(2, 2, 2, 2, 2)),
        ]
        everything = pool.publish(many)
        dtypes = pool.publish([*tensors()])
        pool.seal()
        base = pool.publish([Record("base", b"shared"), Record("other", [1])], submission="the first")
        group = pool.publish_many(
            [
                Publication([Link("alias", base.at(0)), Record("own", "mine")], [dtypes]),
                Publication([Record("second", b"2")], [0]),
                Publication([Record("empty metadata", b"3", {})]),
            ],
            submission="three at once",
        )
        chain = pool.publish([Link("alias of an alias", group[0].at(0))])
        with pool.owners() as owners:
            owners.retain("all", [everything, dtypes, chain])
            owners.retain("zweite", [group[1], base.at(1)])
            owners.export(["zweite"], export)
        whole = [everything, dtypes, base, *group, chain]
        expected = _read(pool, whole)
    with Pool(pool.folder) as another:
        kept = another.publish([Record("kept", b"acknowledged")])
        cut = another.publish([Record("cut", b"cut off" * 20)])
        path = pool.folder.path_of(cut.pack)
        expected |= _read(another, [kept])
        data = path.read_bytes()[: cut.offset + cut.length]  # the zeros behind depend on the filesystem
    path.write_bytes(data[:-TORN])
    return expected


def _compacted(pool: Pool, export: Path) -> Expected:
    kept = []
    with pool:
        for number in range(3):
            refs = [pool.publish([Record("number", number), Record("pad", bytes(500))]) for _ in range(4)]
            kept += [refs[number], pool.publish([Link("again", refs[number].at(0))])]
            pool.seal()
    with Pool.open(pool.path) as pool, pool.owners() as owners:
        owners.retain("kept", kept)
        owners.compact()
        owners.import_(export)
        return _read(pool, [*kept, *owners.owned("zweite")])


def _read(pool: Pool, refs: Sequence[Ref]) -> Expected:
    read = {str(ref.whole()): pool.read(ref).values() for ref in refs}
    return {ref: [described(record) for record in records] for ref, records in read.items()}


def _pool(path: Path, identity: str) -> Pool:
    path.mkdir(parents=True)
    (path / "packs").mkdir()
    (path / "writers").mkdir()
    (path / "pool.json").write_text(json.dumps({"format": 1, "id": identity, "max_bytes": None}))
    return Pool.open(path)


@contextmanager
def _fixed_writers() -> Iterator[None]:
    """Let writers draw 1, 2, 3 and so on instead of random ids."""
    numbers = itertools.count(1)
    with mock.patch.object(secrets, "randbits", lambda bits: next(numbers)):
        yield


if __name__ == "__main__":
    write(Path(sys.argv[1]))
