"""How jobs end: preempted, fenced off, refused, told to a URL. Whatever it is, the same command continues."""

from __future__ import annotations

import json
import signal
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from cli.command import ROWS, RUN, STEPS, TUNE, answers, current, same_tensors


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_preempted_tune_saves_and_exits_75(shell, whole, number):
    process = shell.start(*TUNE)
    process.until("step", 5)
    process.send(number)
    first = process.end()
    assert first.code == 75
    assert first.kinds[-1] == "preempted"
    done = first.of("step")[-1]["step"]
    assert first.of("checkpoint")[-1]["step"] == done < STEPS
    assert len(shell.losses()) == done
    second = shell(*TUNE)
    assert second.code == 0
    assert [event["step"] for event in first.of("step") + second.of("step")] == [*range(1, STEPS + 1)]
    assert shell.losses() == whole.shell.losses()
    assert same_tensors(shell.adapter(), whole.shell.adapter())


def test_a_preempted_run_saves_and_exits_75(shell, whole):
    process = shell.start(*RUN)
    process.until("row", 30)
    process.send(signal.SIGTERM)
    first = process.end()
    assert first.code == 75
    assert first.kinds[-1] == "preempted"
    second = shell(*RUN)
    assert second.code == 0
    seen = [event["custom_id"] for event in first.of("row") + second.of("row")]
    assert sorted(seen) == [f"row-{n:06d}" for n in range(1, ROWS + 1)]
    wanted = answers(whole.shell.run_folder("run") / "results.jsonl")
    assert answers(shell.run_folder("run") / "results.jsonl") == wanted


def test_preempted_before_the_work_begins_is_preempted_all_the_same(shell):
    process = shell.start(*TUNE)
    process.until("stage")  # the model's files are read, torch is not even imported
    process.send(signal.SIGTERM)
    outcome = process.end()
    assert outcome.code == 75
    assert outcome.kinds[-1] == "preempted"
    assert "Traceback" not in outcome.err


def test_of_two_processes_one_works_and_the_other_says_who(shell, whole):
    processes = [shell.start(*TUNE) for _ in range(2)]
    outcomes = [process.end() for process in processes]
    loser, winner = sorted(outcomes, key=lambda outcome: -outcome.code)
    assert (loser.code, winner.code) == (1, 0)
    owner = processes[outcomes.index(winner)].child.pid
    line = loser.err.splitlines()[-1]
    assert line.startswith(
        f"spill: this work is owned by process {owner} on {socket.gethostname()}, which is alive"
    )
    assert "--takeover" in line
    assert loser.kinds[-1] == "error"
    assert loser.of("step") == []
    assert [event["step"] for event in winner.of("step")] == [*range(1, STEPS + 1)]
    assert shell.losses() == whole.shell.losses()


def test_takeover_fences_the_owner_off_and_no_step_is_counted_twice(shell, whole):
    words = [*TUNE, "--state", "state"]
    owner = shell.start(*words, "--grad-accum", "40")
    owner.until("checkpoint")
    other = shell(*words, "--grad-accum", "40", "--takeover", "--stop-after", "1")
    fenced = owner.end()
    assert other.code == 0
    assert fenced.code == 1
    line = fenced.err.splitlines()[-1]
    assert line.startswith("spill: ")
    assert "generation 2" in line
    assert fenced.kinds[-1] == "error"
    done = other.of("step")[-1]["step"]
    assert len(current(shell.folder / "state", "ckpt").read("params.safetensors")) > 0
    assert len(shell.losses(shell.folder / "state")) == done
    by_step = {event["step"]: event["loss"] for event in fenced.of("step")}
    assert by_step.get(done, other.of("step")[-1]["loss"]) == other.of("step")[-1]["loss"]


class Listener(HTTPServer):
    """Keeps what is posted to it."""

    def __init__(self) -> None:
        self.posted: list[tuple[str, Any]] = []
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/done"


class Handler(BaseHTTPRequestHandler):
    server: Listener

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.posted.append((self.headers["Content-Type"], json.loads(body)))
        self.send_response(204)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def listener() -> Iterator[Listener]:
    with Listener() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_the_end_is_told_to_a_url(shell, listener):
    outcome = shell(*RUN, "--stop-after", "1", "--notify", listener.url)
    assert outcome.code == 0
    [(kind, document)] = listener.posted
    assert kind == "application/json"
    assert document["run"] == shell.run_folder("run").name
    assert document["message"].startswith("stopped on purpose: ")


def test_a_url_that_does_not_answer_fails_nothing(whole):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for url in (f"http://127.0.0.1:{port}/", "nonsense"):
        outcome = whole.shell(*RUN, "--notify", url)
        assert outcome.code == 0
        assert outcome.err.splitlines()[0].startswith(f"could not notify {url}: ")
        assert f"already complete: {ROWS} of {ROWS} rows" in outcome.err


def test_tail_follows_a_run_until_it_ends(shell):
    process = shell.start(*TUNE)
    process.until("step")
    follower = shell.start("tail", "-f", "-n", "1000")
    outcome, followed = process.end(), follower.end()
    assert (outcome.code, followed.code) == (0, 0)
    lines = [line.split(maxsplit=1)[1] for line in followed.out.splitlines()]
    assert [line.split()[2] for line in lines if line.startswith("step ")] == [
        str(n) for n in range(1, STEPS + 1)
    ]
    assert lines[-1].startswith(f"done       done at step {STEPS}")
