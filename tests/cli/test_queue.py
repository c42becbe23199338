"""``spill queue``: what it says and does, as text and as JSON, and every mistake in one line."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cli.command import Outcome, Shell, eventually
from cli.test_terminal import CTRL_C, terminal
from spillover.errors import Full
from spillover.pool import Pool, Record
from spillover.queue import Client, Coordinator, Task


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    """A shell in a folder with a queue: one task accepted, one dead, one leased, two pending."""
    work = tmp_path / "work"
    (tmp_path / "logs").mkdir()
    work.mkdir()
    fill(work / "pool")
    shell = Shell(work, tmp_path / "home", tmp_path / "logs")
    yield shell
    for process in shell.started:
        if process.child.poll() is None:
            process.child.kill()
            process.child.wait()


def fill(path: Path) -> None:
    with Pool.open(path, create=True) as pool, Coordinator(pool) as coordinator:
        queue = Client(coordinator, "work")
        queue.create()
        queue.submit([Task(f"task:{n}", metadata={"n": n}) for n in range(5)])
        done, dead, _ = queue.acquire("worker", limit=3).leases
        queue.complete(done, pool.publish([Record("square", 0)]))
        queue.fail(dead, "no such file", retryable=False)


def document(outcome: Outcome) -> Any:
    """The one JSON document on stdout."""
    assert outcome.code == 0, outcome.err
    return json.loads(outcome.out)


def test_stats_counts_and_draws(shell: Shell) -> None:
    lines = shell("queue", "stats", "pool", "--queue", "work").out.splitlines()
    assert lines[0].startswith("queue work: open, generation")
    assert len(lines[1]) == 50
    assert lines[2] == "█ completed 1  ▓ leased 1  ░ pending 2  x dead 1  - cancelled 0"
    found = document(shell("queue", "stats", "pool", "--queue", "work", "--json"))
    assert (found["pending"], found["leased"], found["positions"], found["end"]) == (2, 1, 1, False)


def test_limit_bounds_a_queue_and_stats_says_how_full_it_is(shell: Shell) -> None:
    lines = shell("queue", "limit", "pool", "--queue", "work", "--unfinished", "3").out.splitlines()
    assert lines[3:] == [
        "accepted positions: 1, 1 of them undelivered",
        "unfinished 3 of at most 3: full, submissions wait",
    ]
    found = document(shell("queue", "limit", "pool", "--queue", "work", "--undelivered", "5", "--json"))
    assert (found["max_unfinished"], found["max_undelivered"]) == (3, 5)
    lines = shell("queue", "stats", "pool", "--queue", "work").out.splitlines()
    assert lines[-1] == "undelivered or leased 2 of at most 5"
    with Pool.open(shell.folder / "pool") as pool, Coordinator(pool) as coordinator, pytest.raises(Full):
        Client(coordinator, "work").submit([Task("more")])
    outcome = shell("queue", "limit", "pool", "--queue", "work", "--unfinished", "none")
    assert "at most 3" not in outcome.out
    found = document(shell("queue", "stats", "pool", "--queue", "work", "--json"))
    assert (found["max_unfinished"], found["max_undelivered"]) == (None, 5)


def test_ls_show_and_dead_name_tasks(shell: Shell) -> None:
    lines = shell("queue", "ls", "pool", "--queue", "work").out.splitlines()
    assert [line.split()[:2] for line in lines] == [
        ["task:0", "completed"],
        ["task:1", "dead"],
        ["task:2", "leased"],
        ["task:3", "pending"],
        ["task:4", "pending"],
    ]
    pending = document(shell("queue", "ls", "pool", "--queue", "work", "--status", "pending", "--json"))
    assert [task["id"] for task in pending] == ["task:3", "task:4"]
    assert "failure  no such file" in shell("queue", "show", "pool", "task:1", "--queue", "work").out
    lines = shell("queue", "dead", "pool", "--queue", "work").out.splitlines()
    assert lines[0].split(maxsplit=1) == ["task:1", "1 attempts: no such file"]
    assert lines[1] == "next: spill queue retry pool --queue work --all"


def test_retry_makes_dead_tasks_pending(shell: Shell) -> None:
    assert shell("queue", "retry", "pool", "--queue", "work", "--all").out == "1 tasks are pending again\n"
    assert document(shell("queue", "stats", "pool", "--queue", "work", "--json"))["pending"] == 3
    assert shell("queue", "retry", "pool", "task:1", "--queue", "work").out == "0 tasks are pending again\n"


def test_verify_and_export(shell: Shell) -> None:
    assert shell("queue", "verify", "pool").out == "1 queues, 5 tasks, 1 payloads: all is well\n"
    outcome = shell("queue", "export", "pool", "all.jsonl", "--queue", "work")
    assert outcome.out == "6 lines written to all.jsonl\n"
    lines = [json.loads(line) for line in (shell.folder / "all.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["task"] * 5 + ["accepted"]
    assert lines[-1]["task"] == "task:0"


def test_top_watches_until_ctrl_c(shell: Shell) -> None:
    with terminal(shell, "queue", "top", "pool", "--queue", "work", "--seconds", "0.05") as screen:
        screen.until(r"queue work: open, generation \d+")
        screen.until(r"completed 1 .*\n(.*\n)*.*0\.0 accepted a second +▁▁▁+  3 to go, - left")
        screen.press(CTRL_C)
        assert screen.end() == 0
        assert "Traceback" not in screen.text


def test_a_lost_payload_is_named(shell: Shell) -> None:
    for pack in (shell.folder / "pool" / "packs").iterdir():
        pack.unlink()
    outcome = shell("queue", "verify", "pool")
    assert outcome.code == 1
    assert re.search(r"queue 'work': .* is gone", outcome.out)


def test_a_served_queue_is_asked_by_its_address_and_ends_at_sigterm(shell: Shell) -> None:
    bounds = ("--max-unfinished", "3", "--max-undelivered", "none", "--max-waiting", "50")
    serving = shell.start("queue", "serve", "pool", "--port", "0", "--queue", "work", *bounds)
    said = serving._out
    eventually(lambda: said.read_text().endswith("\n"), lambda: "it does not serve")
    (url,) = re.findall(r"http://[0-9.]+:[0-9]+", said.read_text())
    found = document(shell("queue", "stats", url, "--queue", "work", "--json"))
    assert (found["completed"], found["max_unfinished"], found["max_undelivered"]) == (1, 3, None)
    with Client(url, "work") as client, pytest.raises(Full):
        client.submit([Task("more")])
    shell("queue", "limit", url, "--queue", "work", "--unfinished", "4")
    with Client(url, "work") as client:
        assert client.submit([Task("more")]).added == 1
    assert (
        "accepted a second" in shell("queue", "top", url, "--queue", "work", "--once", "--seconds", "0.1").out
    )
    outcome = shell("queue", "stats", "pool", "--queue", "work")
    assert (outcome.code, outcome.err.count("\n")) == (1, 1)
    assert "which is alive. Try: name its address" in outcome.err
    serving.send(signal.SIGTERM)
    assert serving.end().code == 0
    assert shell("queue", "stats", "pool", "--queue", "work").code == 0


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("stats nowhere", "holds no pool"),
        ("stats pool --queue other", "there is no queue 'other'"),
        ("show pool task:9 --queue work", "has no task 'task:9'"),
        ("ls pool --queue work --status asleep", "there is no status 'asleep'"),
        ("retry pool --queue work", "name the tasks, or say --all"),
        ("export pool pool --queue work", "pool exists"),
        ("stats http://127.0.0.1:9 --queue work", "given up after"),
        ("serve pool --host 0.0.0.0", "0.0.0.0 is open to others"),
        ("serve pool --max-unfinished 0", "--max-unfinished 0 is no bound. Try: --max-unfinished 10000"),
        ("serve pool --max-undelivered many", "--max-undelivered many is no bound"),
        ("serve pool --max-waiting 0", "--max-waiting 0 lets nobody in"),
        ("limit pool --queue work", "say which bound"),
        ("limit pool --queue work --unfinished -1", "--unfinished -1 is no bound"),
        ("limit pool --queue other --unfinished 1", "there is no queue 'other'"),
    ],
)
def test_a_mistake_is_told_in_one_line(shell: Shell, words: str, told: str) -> None:
    outcome = shell("queue", *words.split())
    assert outcome.code == 1
    assert told in outcome.err
    assert outcome.err.count("\n") == 1
