"""Memory stays bounded: many small publications, and one large tensor."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

COMMON = """
import os, resource, sys, tempfile
from spillover.pool import Pool, Publication, Record

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()

pool = Pool.open(sys.argv[1], create=True, pack_bytes=16 << 20)
"""

SMALL = """
before, refs, sizes = None, [], []
for turn in range(20):
    for part in range(50):
        many = [Publication([Record("r", {"turn": turn, "part": part, "number": n})]) for n in range(200)]
        refs = pool.publish_many(many, submission=f"{turn} {part}" if "submissions" in sys.argv else None)
        with pool.reader() as reader:
            for ref in refs:
                reader.record(ref.at(0))
        pool.settle(refs)
    sizes.append(resident())
print(*[(size - sizes[4]) >> 10 for size in sizes])
print((max(sizes[5:]) - sizes[4]) >> 20)
"""

SINGLE = """
sizes = []
for turn in range(10):
    for number in range(4000):
        ref = pool.publish([Record("r", b"x" * 100)], submission=f"{turn} {number}")
        pool.record(ref.at(0))
    sizes.append(resident())
print(*[(size - sizes[0]) >> 10 for size in sizes])
print((sizes[-1] - sizes[0]) // 36000)
"""

LARGE = """
import numpy as np

size = 256 << 20
array = np.arange(size // 8)
ref = pool.publish([Record("t", array)]).at(0)
del array
tensor = pool.tensor(ref)
tensor[0:1]
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the peak is counted from here on
before = resident()
found = tensor.numpy() if sys.argv[2] == "new" else None
if found is None:
    buffer = np.zeros(size // 8, np.int64)
    buffer.fill(1)
    before = resident() - size
    found = tensor.numpy(buffer)
with open("/proc/self/status") as file:
    peak = next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM"))
assert found[-1] == size // 8 - 1
print((peak - before) / size)
"""


def run(program: str, pool: Path, *words: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", COMMON + program, str(pool), *words],
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("words", [[], ["submissions"]], ids=["plain", "submissions"])
def test_many_small_publications(tmp_path: Path, words: list[str]) -> None:
    """200,000 of them: what is remembered of them is full after a quarter, and grows no more."""
    course, growth = run(SMALL, tmp_path / "pool", *words)
    assert int(growth) <= 8, f"MiB; in KiB after every 10,000: {course}"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["new", "given"])
def test_loading_a_large_tensor(tmp_path: Path, kind: str) -> None:
    (factor,) = run(LARGE, tmp_path / "pool", kind)
    assert float(factor) <= 1.05
