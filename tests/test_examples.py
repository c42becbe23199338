"""The packaged examples: valid rows, balanced labels, and tests that the training rows do not give away."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import unicodedata
from collections import Counter
from importlib import resources
from itertools import combinations, product
from pathlib import Path

import pytest

from spillover.jobs.data import check_file

LABELS = {
    "delivery",
    "refund",
    "damaged_item",
    "wrong_item",
    "payment",
    "account",
    "product_question",
    "cancel_order",
}
ROWS = {
    "tickets/train.jsonl": 160,
    "tickets/test.jsonl": 48,
    "prompts/prompts.jsonl": 12,
    "sample.jsonl": 20,
}


def packaged(name):
    return resources.files("spillover.examples").joinpath(*name.split("/"))


def rows(name):
    return [json.loads(line) for line in packaged(name).read_text(encoding="utf-8").splitlines()]


def words(text):
    """The words of a message, without case, accents and punctuation."""
    letters = (c for c in unicodedata.normalize("NFKD", text.casefold()) if not unicodedata.combining(c))
    return tuple(re.findall(r"\w+", "".join(letters)))


def likeness(one, other):
    """Jaccard similarity of the sets of words."""
    first, second = set(words(one)), set(words(other))
    return len(first & second) / len(first | second)


@pytest.mark.parametrize("name", ROWS)
def test_every_row_can_be_answered(name):
    with resources.as_file(packaged(name)) as path:
        assert check_file(path, "prompt").rows == ROWS[name]


def test_the_tickets_train_and_their_test_set_has_answers_to_compare():
    with resources.as_file(packaged("tickets")) as folder:
        assert "train" in check_file(folder / "train.jsonl", "train").fits
        assert "eval" in check_file(folder / "test.jsonl", "eval").fits


def test_labels_are_balanced_in_both_files_and_interleaved():
    train = [row["answer"] for row in rows("tickets/train.jsonl")]
    test = [row["expected"] for row in rows("tickets/test.jsonl")]
    assert Counter(train) == dict.fromkeys(LABELS, 20)
    assert Counter(test) == dict.fromkeys(LABELS, 6)
    assert all(set(labels[i : i + 8]) == LABELS for labels in (train, test) for i in range(0, len(labels), 8))


def test_answers_of_the_test_set_are_short():
    assert {row["max_tokens"] for row in rows("tickets/test.jsonl")} == {8}


def test_no_message_occurs_twice():
    messages = [row["prompt"] for name in ("train", "test") for row in rows(f"tickets/{name}.jsonl")]
    assert [pair for pair in combinations(messages, 2) if words(pair[0]) == words(pair[1])] == []


def test_no_test_message_resembles_a_training_message():
    train, test = ([row["prompt"] for row in rows(f"tickets/{name}.jsonl")] for name in ("train", "test"))
    assert [pair for pair in product(train, test) if likeness(*pair) >= 0.8] == []


def test_the_prompts_show_what_a_row_may_say():
    prompts = rows("prompts/prompts.jsonl")
    assert {"system", "max_tokens", "custom_id"} <= set().union(*prompts)


def test_the_sample_begins_with_the_question_that_the_documentation_shows():
    assert rows("sample.jsonl")[0] == {"prompt": "What is the capital of France?", "max_tokens": 32}


@pytest.mark.parametrize("name", ["tickets", "prompts"])
def test_the_commands_of_a_readme_name_files_that_the_example_brings(name):
    readme = packaged(f"{name}/README.md").read_text(encoding="utf-8")
    named = {Path(file) for file in re.findall(r"^    spill .*?(\S+\.jsonl)", readme, re.MULTILINE)}
    assert named
    assert all(file.parent == Path(name) and packaged(file.as_posix()).is_file() for file in named)


def test_the_commands_of_the_pool_example_run_as_they_are_written(tmp_path):
    readme = packaged("pool/README.md").read_text(encoding="utf-8")
    commands = ["spill example pool", *re.findall(r"^    (.+)$", readme, re.MULTILINE)]
    assert len(commands) == 7
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-ec", "\n".join(commands)],
        cwd=tmp_path,
        env=os.environ | {"PATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "32 samples of 4 processes; the best 5 are kept\n2.6 MB became 0.4 MB" in done.stdout
    assert "2 packs, 7 publications, 403.1 kB: nothing damaged" in done.stdout
    assert done.stdout.endswith("6 publications, 402.6 kB taken in; owners: batch-1\n")
    assert sorted(path.name for path in (tmp_path / "pool").iterdir()) == ["README.md", "share.py"]


def example(name, *arguments):
    """What an example program prints."""
    with resources.as_file(packaged(name)) as path:
        done = subprocess.run(
            [sys.executable, str(path), *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=120,
            env=os.environ | {"RAY_AUTH_MODE": "disabled", "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"},
        )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_queue_example_does_each_task_once(tmp_path):
    for _ in range(2):
        assert example("queue/work.py", tmp_path / "jobs") == "100 squares, the last is 9801\n"


def test_the_crash_story_ends_well(tmp_path):
    told = example("queue/crash.py", tmp_path / "jobs").splitlines()
    assert "the first worker ended with -9" in told
    assert told[-1] == "6 tasks, each accepted once"


def test_the_commands_of_the_queue_example_run_as_they_are_written(tmp_path):
    readme = packaged("queue/README.md").read_text(encoding="utf-8")
    commands = [line for line in re.findall(r"^    (.+)$", readme, re.MULTILINE) if "ray_" not in line]
    assert len(commands) == 4
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-ec", "\n".join(["spill example queue", *commands])],
        cwd=tmp_path,
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "100 squares, the last is 9801" in done.stdout
    assert "6 tasks, each accepted once" in done.stdout
    assert "accepted positions: 100, 100 of them undelivered" in done.stdout
    assert done.stdout.endswith("1 queues, 100 tasks, 100 payloads: all is well\n")


@pytest.mark.slow
def test_the_ray_example_runs_on_one_machine(tmp_path):
    told = example("queue/ray_workers.py", tmp_path / "jobs").splitlines()
    assert told[-1] == "40 tasks by 2 workers; each accepted once"
