"""A forked child has none of what its parent holds, and takes nothing from it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pool.content import records, require
from pool.others import TESTS
from spillover.errors import (
    StateError,
)
from spillover.pool import Pool, Ref


def test_a_forked_child(tmp_path: Path) -> None:
    """It has a writer of its own, and may use none of its parent's."""
    pool = Pool.open(tmp_path / "pool", create=True)
    writer = pool.writer
    ref = pool.publish(records("one.900"))
    context = multiprocessing.get_context("fork")
    answers = context.Queue()

    def child() -> None:
        with pytest.raises(StateError, match="forked"):
            writer.publish(records("two.900"))
        with pytest.raises(StateError, match="forked"):
            writer.seal()
        require(pool, ref, "one.900")
        answers.put(str(pool.publish(records("three.900"))))
        pool.close()

    process = context.Process(target=child)
    process.start()
    three = Ref.parse(answers.get(timeout=30))
    process.join(30)
    assert process.exitcode == 0
    assert three.pack >> 24 != writer.id
    require(pool, three, "three.900")
    require(pool, pool.publish(records("four.900")), "four.900")
    assert pool.folder.list_writers() == [writer.id]
    pool.close()


FORKING = """
import os, sys, time
from pool.content import records
from spillover.errors import StateError
from spillover.pool import Pool
pool = Pool.open(sys.argv[1])
ref = pool.publish(records("one.900"))
pool.reader().read(ref)
reader = pool.reader()
reader.read(ref)
owners = pool.owners()
owners.retain("before", [ref])
{}
print(child, ref, flush=True)
time.sleep(600)
"""


@contextmanager
def forking(folder: Path, middle: str) -> Iterator[tuple[int, Ref]]:
    """A parent with a writer, a reader and the ownership, which forks in ``middle`` and then is killed."""
    Pool.open(folder, create=True)
    with subprocess.Popen(
        [sys.executable, "-c", FORKING.format(middle), str(folder)],
        cwd=TESTS,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        assert parent.stdout is not None
        child, ref = parent.stdout.readline().split()
        parent.kill()
        os.waitid(os.P_PID, parent.pid, os.WEXITED | os.WNOWAIT)
        yield int(child), Ref.parse(ref)


def test_a_child_that_ends_takes_nothing_from_its_owning_parent(tmp_path: Path) -> None:
    """SQLite would delete the log of the catalogue when the child closes what it inherited."""
    middle = """
if (child := os.fork()) == 0:
    for act in (owners.names, lambda: owners.retain("mine", [ref]), owners.collect):
        try:
            act()
        except StateError as error:
            assert "forked" in str(error)
        else:
            os._exit(1)
    with owners:
        pass
    del owners
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
owners.retain("after", [ref])
"""
    with forking(tmp_path / "pool", middle) as (_, ref), Pool.open(tmp_path / "pool").owners() as owners:
        assert owners.names() == ["after", "before"]
        owners.collect()
        require(Pool.open(tmp_path / "pool"), ref, "one.900")


def test_a_child_that_outlives_its_parent_holds_no_packs(tmp_path: Path) -> None:
    middle = """
owners.release("before")
owners.close()
if (child := os.fork()) == 0:
    sys.stdin.read()  # until the test is over
    os._exit(0)
"""
    with forking(tmp_path / "pool", middle) as (child, ref), Pool.open(tmp_path / "pool").owners() as owners:
        os.kill(child, 0)
        (info,) = owners.writers()
        assert owners.retire(info.id) == [ref]
        collected = owners.collect()
        assert (collected.packs, collected.held) == (0, 0)
        os.kill(child, signal.SIGKILL)


def test_a_child_that_outlives_its_parent_does_not_own(tmp_path: Path) -> None:
    middle = """
if (child := os.fork()) == 0:
    sys.stdin.read()
    os._exit(0)
"""
    with forking(tmp_path / "pool", middle) as (child, _):
        try:
            with Pool.open(tmp_path / "pool").owners() as owners:
                assert owners.names() == ["before"]
        finally:
            os.kill(child, signal.SIGKILL)
