"""``spill eval`` as it is typed: killed, preempted, stopped, resumed, and read by a program."""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path

import pytest

from cli.command import SAVE_ROWS, Shell, tree
from jobs.scenarios import write_evals
from models.folders import tiny_llama

ROWS = 120
METRICS = "--metric exact_match --metric regex:[a-m]"
EVAL = f"eval evals.jsonl tiny other --batch 4 --numerics float32 {METRICS}".split()
FILES = ("report.json", "scores.jsonl", "disagreements.jsonl")


@pytest.fixture(scope="session")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "other"
    return tiny_llama(folder, intermediate_size=48, initializer_range=1.0)


@pytest.fixture
def evals(shell: Shell, other: Path) -> Shell:
    """A shell with two models and rows to score them on."""
    write_evals(shell.folder / "evals.jsonl", ROWS)
    (shell.folder / "other").symlink_to(other)
    return shell


def written(shell: Shell) -> dict[str, bytes]:
    folder = shell.run_folder("eval")
    return {name: (folder / name).read_bytes() for name in FILES}


@pytest.mark.slow
def test_killed_anywhere_it_comes_to_the_same_report(evals: Shell) -> None:
    """In the first model's rows, in the second's, and while nothing is durable yet."""
    moments = random.Random(20261201)
    killed, restored = 0, []
    for count in (1, SAVE_ROWS + 5, ROWS - 10, ROWS, moments.randint(1, ROWS)):
        process = evals.start(*EVAL, "--state", "killed")
        process.until("row", count)
        process.send(signal.SIGKILL)
        outcome = process.end()
        killed += outcome.code == -signal.SIGKILL
        restored += outcome.of("restore")
    last = evals(*EVAL, "--state", "killed")  # there may be nothing left to answer
    assert last.code == 0 and killed >= 3
    found = written(evals)
    durable = [event["step"] for event in last.of("restore")]
    assert len(last.of("row")) <= 2 * ROWS - sum(durable) and any(event["step"] for event in restored)
    assert evals(*EVAL, "--state", "whole").code == 0
    assert written(evals) == found


def test_a_preempted_eval_exits_75_and_continues(evals: Shell) -> None:
    process = evals.start(*EVAL)
    process.until("row", ROWS + 1)
    process.send(signal.SIGTERM)
    first = process.end()
    assert first.code == 75, first.err
    assert first.of("preempted")[0]["message"].startswith("preempted: other has answered ")
    assert evals("status").out.startswith("eval at ")
    second = evals("resume")
    assert second.code == 0
    assert len(first.of("row")) + len(second.of("row")) == 2 * ROWS
    assert evals("runs").out.split()[1] == "completed"


def test_stop_asks_the_owner_of_the_answers_under_way(evals: Shell) -> None:
    write_evals(evals.folder / "evals.jsonl", 2000)
    process = evals.start(*EVAL)
    process.until("row", 3)
    assert evals("stop").code == 0
    outcome = process.end()
    assert outcome.code == 0
    assert "stopped on purpose: tiny has answered" in outcome.err
    assert not (evals.run_folder("eval") / "report.json").exists()


@pytest.mark.slow
def test_two_at_the_same_answers_is_one_too_many(evals: Shell) -> None:
    """The second says who is at it; with another model it works beside the first, and both are whole."""
    write_evals(evals.folder / "evals.jsonl", 2000)
    first = evals.start(*EVAL)
    first.until("row", 3)
    first.send(signal.SIGSTOP)  # or it would be at the other model before long
    second = evals(*EVAL)
    assert second.code == 1 and f"owned by process {first.child.pid}" in second.err
    beside = evals("eval", "evals.jsonl", "other", "--numerics", "float32", "--stop-after", "50")
    assert beside.code == 0 and "stopped on purpose: other has answered" in beside.err
    first.send(signal.SIGTERM)
    first.send(signal.SIGCONT)
    assert first.end().code == 75


def test_stdout_is_the_report_alone_for_a_program(evals: Shell) -> None:
    outcome = evals(*EVAL, "--json")
    assert outcome.code == 0
    report = json.loads(outcome.out)
    assert report == json.loads((evals.run_folder("eval") / "report.json").read_text())
    assert [score["metric"] for score in report["scores"]] == ["exact_match", "regex:[a-m]"] * 2
    assert [
        event
        for event in (evals.run_folder("eval") / "events.jsonl").read_text().splitlines()
        if '"row"' in event
    ]


def test_people_see_a_table_and_what_to_type(evals: Shell) -> None:
    outcome = evals(*EVAL)
    *_, done, following = outcome.err.splitlines()
    table = outcome.err[outcome.err.index("model  ") :].splitlines()
    assert table[0].split() == ["model", "exact_match", "regex:[a-m]"]
    assert [line.split()[0] for line in table[1:3]] == ["tiny", "other"]
    assert table[3].startswith("other against tiny, exact_match: ")
    assert done.startswith(f"done: {ROWS} rows, 2 models, which differ on ")
    path = evals.folder / following.removeprefix("next: head -n 1 ")
    assert json.loads(path.read_text().splitlines()[0])["models"][0]["model"] == "tiny"
    assert outcome.kinds[-1] == "done" and outcome.of("done")[0]["complete"] is True
    refused = evals("report", "last")
    assert refused.code == 1 and "is an evaluation: its scores are in " in refused.err
    assert evals("eval", "evals.jsonl", "tiny", "--quiet").err.splitlines()[-1].startswith("done: ")


def test_a_command_as_data(evals: Shell) -> None:
    before = tree(evals.folder)
    outcome = evals(*EVAL, "--judge", "other", "--emit-config", "job.json")
    assert outcome.out == "wrote job.json\nnext: spill eval --config job.json\n"
    job = json.loads((evals.folder / "job.json").read_text())
    assert job["command"] == "eval"
    assert job["arguments"] == {"data": "evals.jsonl", "models": ["tiny", "other"]}
    assert job["options"] == {
        "metric": ["exact_match", "regex:[a-m]"],
        "judge": "other",
        "batch": 4,
        "numerics": "float32",
    }
    assert tree(evals.folder).keys() - before.keys() == {"job.json"}
    again = evals("eval", "--config", "job.json", "--emit-config", "again.json")
    assert again.code == 0, again.err
    assert json.loads((evals.folder / "again.json").read_text()) == job
    done = evals("eval", "--config", "job.json", "--stop-after", "2")
    assert done.code == 0 and "stopped on purpose: tiny" in done.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("eval evals.jsonl", "Missing argument 'MODEL...'"),
        ("eval none.jsonl tiny", "none.jsonl: no such file"),
        ("eval evals.jsonl tiny nothing:7b", "there is no model tag 'nothing:7b'"),
        ("eval evals.jsonl tiny --metric script:none.py", "none.py: no such file"),
        ("eval evals.jsonl tiny --judge nothing:7b", "there is no model tag 'nothing:7b'"),
        ("eval evals.jsonl tiny --state nope://x", "unknown scheme 'nope'"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(evals: Shell, words: str, said: str) -> None:
    before = tree(evals.folder)
    outcome = evals(*words.split())
    assert outcome.code == 1
    [line] = outcome.err.splitlines()
    assert said in line and " Try: " in line
    assert tree(evals.folder) == before


@pytest.mark.slow
def test_answers_can_be_continued_over_s3(evals: Shell, s3) -> None:
    evals.changes |= {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    uri = s3()
    first = evals(*EVAL, "--state", uri, "--stop-after", str(ROWS + 5))
    assert first.code == 0 and "other has answered" in first.err
    second = evals(*EVAL, "--state", uri)
    assert second.code == 0 and len(second.of("row")) <= ROWS - 5
    lines = (evals.folder / "evals.jsonl").read_text().splitlines()
    (evals.folder / "evals.jsonl").write_text("\n".join(lines[::-1]) + "\n")
    third = evals(*EVAL, "--state", uri)
    assert third.code == 0 and not third.of("row")
