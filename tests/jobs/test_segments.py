"""Segments: sorted, merged, few, and read back in order."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spillover.errors import Corrupt
from spillover.jobs.segments import KIND, Cursor, Line, Segments
from spillover.state import Owned, State
from spillover.store import LocalStore, MemoryStore

IDENTITY = {"work": "segments"}


def line(row: int) -> Line:
    return Line(row, json.dumps({"custom_id": f"r{row}", "spillover": {"row": row}}).encode())


def add(owned: Owned, segments: Segments, rows: list[int]) -> None:
    reference = segments.write(owned, [line(row) for row in rows], Cursor(next=max(rows, default=0)), {})
    owned.publish(KIND, reference, {})


def rows_of(segments: Segments) -> list[int]:
    return [json.loads(data)["spillover"]["row"] for data in segments.lines()]


@settings(max_examples=40, deadline=None)
@given(
    count=st.integers(0, 300),
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=60),
    seed=st.integers(0, 99),
)
def test_any_rows_in_any_order_come_back_sorted(count: int, sizes: list[int], seed: int) -> None:
    pending = [*range(count)]
    random.Random(seed).shuffle(pending)
    with State(MemoryStore(), lease_seconds=3600).acquire(IDENTITY) as owned:
        segments = Segments(owned.open, None)
        written = 0
        for size in sizes:
            fresh, pending = pending[:size], pending[size:]
            add(owned, segments, fresh)
            written += len(fresh)
            assert segments.done == written
        done = sorted(set(range(count)) - set(pending))
        assert rows_of(segments) == done
        again = Segments(owned.open, owned.document.current[KIND])
        assert rows_of(again) == done


def test_many_rows_are_few_files_and_each_line_is_rewritten_seldom() -> None:
    store = MemoryStore()
    moved = 0
    with State(store, lease_seconds=3600).acquire(IDENTITY) as owned:
        segments = Segments(owned.open, None)
        for start in range(0, 20_000, 25):
            add(owned, segments, [*range(start, start + 25)])
            moved += segments.cursor.lines
            assert len(segments.cursor.pieces) < 40
        assert rows_of(segments) == [*range(20_000)]
    folders = {entry.key.split("/")[1] for entry in store.list("rows/")}
    assert len(folders) < 60
    assert moved < 6 * 20_000


def test_a_row_with_two_results_is_an_error() -> None:
    with State(MemoryStore(), lease_seconds=3600).acquire(IDENTITY) as owned:
        segments = Segments(owned.open, None)
        add(owned, segments, [0, 1])
        add(owned, segments, [1])
        with pytest.raises(Corrupt, match="row 2 has two results"):
            rows_of(segments)


def test_a_damaged_segment_is_an_error(tmp_path: Path) -> None:
    with State(LocalStore(tmp_path)).acquire(IDENTITY) as owned:
        segments = Segments(owned.open, None)
        add(owned, segments, [0, 1])
        path = tmp_path / owned.document.current[KIND].folder / "results.jsonl"
        path.write_bytes(path.read_bytes().replace(b"r1", b"r7"))
        with pytest.raises(Corrupt, match="does not match its checksum"):
            rows_of(segments)
