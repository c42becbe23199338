"""How far a long command is, on a real pseudo-terminal, and nothing of it anywhere else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.command import Shell
from cli.test_pool import fill
from cli.test_terminal import terminal
from spillover.pool import Pool, Record
from spillover.queue import Client, Coordinator, Task


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    """A shell in a folder with a pool: 1 MB owned by ``ckpt`` through a link, 3 MB by nobody."""
    work = tmp_path / "work"
    (tmp_path / "logs").mkdir()
    work.mkdir()
    fill(work / "pool")
    yield Shell(work, tmp_path / "home", tmp_path / "logs")


def test_progress_is_shown_at_a_terminal_and_only_there(shell):
    with Pool.open(shell.folder / "pool") as pool:
        refs = [pool.publish([Record("x", bytes(4_000_000))]) for _ in range(8)]
        with pool.owners() as owners:
            owners.retain("large", refs)
    for words, end in (
        ("verify pool", "3 packs, 11 publications, 36.0 MB: nothing damaged"),
        ("export pool f.pack large", "8 publications, 32.0 MB, written to f.pack"),
        ("import other f.pack --create", "8 publications, 32.0 MB taken in; owners: large"),
        ("compact pool", "rewrote 1 pack as 1: 1.0 MB copied, 4.0 MB deleted"),
    ):
        with terminal(shell, "pool", *words.split()) as screen:
            screen.until(rf"{words.split()[0]} ━+.* 100% (\d+\.\d)/\1 MB ")
            assert screen.end() == 0
            assert end in screen.text
    with terminal(shell, "pool", "verify", "pool", "--json") as screen:
        assert screen.end() == 0
        assert json.loads(screen.text)["publications"] == 11
    outcome = shell("pool", "verify", "pool")
    assert outcome.out.startswith("3 packs, ")
    assert outcome.err == ""


def test_gc_shows_what_it_looks_at_and_what_is_deleted_for_good(shell):
    """Two bars: how much was looked at, and how much is deleted, durably, with their rates."""
    with Pool.open(shell.folder / "pool", pack_bytes=1) as pool:
        for _ in range(20):
            pool.publish([Record("garbage", bytes(2_000_000))])
    with terminal(shell, "pool", "gc", "pool", "--dry-run") as screen:
        screen.until(r"look +━+.* 100% 44\.0/44\.0 MB ")
        assert screen.end() == 0
        assert "deleted, durably" not in screen.text
        assert "would delete 20 packs, 40.0 MB" in screen.text
    with terminal(shell, "pool", "gc", "pool") as screen:
        screen.until(r"look +━+.* 100% 44\.0/44\.0 MB ")
        screen.until(r"deleted, durably ━+.* 100% 40\.0/40\.0 MB ")
        assert screen.end() == 0
        assert "deleted 20 packs, 40.0 MB" in screen.text
    with terminal(shell, "pool", "gc", "pool", "--json") as screen:
        assert screen.end() == 0
        assert json.loads(screen.text)["deleted"] == 0
    outcome = shell("pool", "gc", "pool")
    assert (outcome.err, outcome.out.count("\n")) == ("", 2)


@pytest.mark.slow
def test_qualify_shows_which_check_runs_and_how_the_last_one_ended(shell):
    (shell.folder / "mount").mkdir()
    with terminal(shell, "pool", "qualify", "mount", "--peer", "mount") as screen:
        screen.until(r"qualify ━*.* \d+% +\d+/15 checks 0:00:\d\d now: flock")
        screen.until(r"\d+% +\d+/15 checks .* now: [\w ]+; [\w ]+ holds \(\d+\.\d s\)")
        screen.until(r"100% 15/15 checks 0:\d\d:\d\d SQLite changes hands holds \(\d+\.\d s\)")
        assert screen.end() == 0
        assert "holds   SQLite changes hands: " in screen.text


def test_verifying_a_queue_counts_payloads_and_not_bytes(shell):
    with Pool.open(shell.folder / "pool") as pool, Coordinator(pool) as coordinator:
        queue = Client(coordinator, "work")
        queue.create()
        queue.submit([Task(f"task {n}", pool.publish([Record("n", n)])) for n in range(7)])
    with terminal(shell, "queue", "verify", "pool") as screen:
        screen.until(r"verify ━+.* 100% 7/7 payloads 0:00:\d\d")
        assert screen.end() == 0
        assert "1 queues, 7 tasks, 7 payloads: all is well" in screen.text
