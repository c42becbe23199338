"""Checking whole files: the summary, repeated ids, and memory that does not grow with the rows."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spillover.errors import InputError
from spillover.jobs.data import check_file, generated_id
from spillover.jobs.data.ids import MERGE, RUN, IdTable


def write(path, rows):
    with path.open("w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return path


def with_ids(ids):
    return [{"prompt": "a"} if id is None else {"prompt": "a", "custom_id": id} for id in ids]


def test_the_summary_describes_the_file(tmp_path):
    path = write(
        tmp_path / "rows.jsonl",
        [{"prompt": "a", "expected": "b", "custom_id": "x"}, {"prompt": "c"}, {"prompt": "d", "answer": "e"}],
    )
    summary = check_file(path)
    assert (summary.path, summary.shape, summary.rows) == (path, "plain", 3)
    assert (summary.with_expected, summary.with_ids, summary.with_tools) == (2, 1, 0)
    assert summary.bytes == path.stat().st_size
    assert summary.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert summary.fits == ("prompt",)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (["a", "b", "a"], "3: the id 'a' is already used on line 1"),
        (["a", "b", "b", "a"], "3: the id 'b' is already used on line 2"),
        ([None, "row-000001"], "2: the id 'row-000001' is already used on line 1"),
        (["row-000003", "x", None], "3: the id 'row-000003' is already used on line 1"),
        ([None, None, None, "x", "row-000002"], "5: the id 'row-000002' is already used on line 2"),
    ],
)
def test_a_repeated_id_names_both_lines(tmp_path, ids, message):
    path = write(tmp_path / "rows.jsonl", with_ids(ids))
    with pytest.raises(InputError) as caught:
        check_file(path)
    assert str(caught.value) == f"{path}:{message}"


@pytest.mark.parametrize("ids", [["a", "A", "a "], ["row-000001", None], [None, "row-2", "row-0000002"]])
def test_ids_that_only_look_alike_are_different(tmp_path, ids):
    assert check_file(write(tmp_path / "rows.jsonl", with_ids(ids))).rows == len(ids)


@given(st.lists(st.sampled_from([None, "a", "b", "c", "d", "e", "row-000002", "row-000004"]), min_size=1))
def test_equal_hashes_are_told_apart_by_the_ids(tmp_path_factory, ids):
    path = write(tmp_path_factory.getbasetemp() / "rows.jsonl", with_ids(ids))
    effective = [id or generated_id(index) for index, id in enumerate(ids)]
    for digest in (hash, lambda id: len(id), lambda id: 0):
        if len(set(effective)) == len(effective):
            assert check_file(path, digest=digest).rows == len(ids)
        else:
            with pytest.raises(InputError, match="is already used on line"):
                check_file(path, digest=digest)


@pytest.mark.parametrize("repeat", [(0, 5 * RUN), (RUN - 1, RUN), (3, 4), (2 * RUN, 5 * RUN + 7)])
def test_a_repeat_is_found_across_runs_and_merges(repeat):
    rows = 5 * RUN + 8
    assert rows > MERGE
    first, second = repeat
    with IdTable() as table:
        for row in range(rows):
            table.add(row, f"id-{first if row == second else row}")
        candidate = table.earliest()
        assert candidate is not None
        assert candidate.rows == [first, second]
        assert table.earliest({candidate.hash}) is None


def test_the_earliest_of_many_repeats_is_found():
    with IdTable() as table:
        for row in range(3 * RUN):
            table.add(row, f"id-{row % (2 * RUN)}")
        candidate = table.earliest()
        assert candidate is not None
        assert candidate.rows == [0, 2 * RUN]


MEASURE = """
import resource, sys
from spillover.jobs.data import check_file, read_rows
summary = check_file(sys.argv[1], "prompt")
rows = sum(1 for row in read_rows(sys.argv[1], "prompt", stamp=summary.stamp))
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(rows, peak * (1 if sys.platform == "darwin" else 1024))
"""


def measured(path: Path) -> tuple[int, int, float]:
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", MEASURE, path], capture_output=True, text=True, check=True)
    rows, peak = map(int, done.stdout.split())
    return rows, peak, time.perf_counter() - start


def test_memory_does_not_grow_with_the_rows(tmp_path):
    peaks = {}
    for rows in (3_000, 300_000):
        ids = (
            {"prompt": f"How do I get card {i}?", "expected": "x", "custom_id": f"q-{i}"} for i in range(rows)
        )
        found, peaks[rows], seconds = measured(write(tmp_path / f"{rows}.jsonl", ids))
        assert found == rows
    assert peaks[300_000] - peaks[3_000] < 16 * 1024**2
    assert seconds < 60  # 4 s when nothing else runs
