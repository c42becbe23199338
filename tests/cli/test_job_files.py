"""Commands as data: --emit-config, --config, job.json and resume."""

from __future__ import annotations

import json

import pytest

from cli.command import ROWS, RUN, STEPS, TUNE, answers, same_tensors, tree


def test_a_command_survives_the_way_through_a_file(shell):
    outcome = shell(*TUNE, "--emit-config", "job.json", "--state", "state", "--notify", "http://x")
    assert (outcome.code, outcome.out) == (0, "wrote job.json\nnext: spill tune --config job.json\n")
    assert {path.name for path in shell.folder.iterdir()} == {
        "job.json",
        "tiny",
        "train.jsonl",
        "prompts.jsonl",
    }
    job = json.loads((shell.folder / "job.json").read_text())
    assert job["command"] == "tune"
    assert job["arguments"] == {"model": "tiny", "data": "train.jsonl"}
    assert job["options"] == {
        "name": "tiny",
        "rank": 4,
        "lr": 0.01,
        "dropout": 0.1,
        "batch": 2,
        "ckpt_every": 3,
        "steps": STEPS,
        "numerics": "float32",
        "state": "state",
        "notify": "http://x",
    }
    assert shell("tune", "--config", "job.json", "--emit-config", "again.json").code == 0
    assert json.loads((shell.folder / "again.json").read_text()) == job


def test_what_is_typed_beside_a_job_file_wins(shell):
    shell(
        "run", "tiny", "prompts.jsonl", "--stop", "a", "--stop", "b", "--seed", "3", "--emit-config", "a.json"
    )
    words = "run --config a.json --seed 4 --top-k 5 --emit-config b.json"
    assert shell(*words.split()).code == 0
    job = json.loads((shell.folder / "b.json").read_text())
    assert job["arguments"] == {"model": "tiny", "data": "prompts.jsonl"}
    assert job["options"] == {"stop": ["a", "b"], "seed": 4, "top_k": 5}
    words = "run other --config a.json --emit-config c.json"
    assert shell(*words.split()).code == 0
    assert json.loads((shell.folder / "c.json").read_text())["arguments"]["model"] == "other"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (
            '{"command": "run", "arguments": {}, "options": {}}',
            "is a job for spill run. Try: spill run --config",
        ),
        ('{"command": "tune", "arguments": {}, "options": {"rnk": 4}}', "spill tune has no option 'rnk'"),
        (
            '{"command": "tune", "arguments": {}, "options": {}, "spill_config": 2}',
            "has spill_config 2, not 1",
        ),
        ('{"command": "tune", "arguments": {}}', "is no job file"),
        ('{"command": "tune", "arguments": {', "is no job file"),
        ("", "is no job file"),
        ("[1]", "is no job file"),
        (None, "No such file or directory. Try: --emit-config writes one"),
    ],
)
def test_a_file_that_is_no_job_for_the_command_is_refused(shell, content, words):
    if content is not None:
        (shell.folder / "job.json").write_text(content)
    before = tree(shell.folder)
    outcome = shell("tune", "--config", "job.json")
    assert outcome.code == 1
    [line] = outcome.err.splitlines()
    assert line.startswith("spill: job.json")
    assert words in line
    assert tree(shell.folder) == before


def test_a_value_of_the_wrong_kind_in_a_job_file_names_its_option(shell):
    job = {"command": "tune", "arguments": {"model": "tiny", "data": "train.jsonl"}, "spill_config": 1}
    (shell.folder / "job.json").write_text(json.dumps(job | {"options": {"name": "x", "rank": "four"}}))
    outcome = shell("tune", "--config", "job.json")
    assert outcome.code == 1
    [line] = outcome.err.splitlines()
    assert "'--rank'" in line


def test_a_stopped_tune_is_resumed_to_the_same_adapter(shell, whole):
    first = shell(*TUNE, "--stop-after", "7")
    assert first.code == 0
    assert [event["step"] for event in first.of("step")] == [*range(1, 8)]
    assert first.of("done")[0]["complete"] is False
    assert first.err.splitlines()[-2].startswith(f"stopped on purpose at step 7 of {STEPS}; durable at ")
    assert first.err.splitlines()[-1] == "next: the same command continues"
    assert shell("runs").out.split()[1] == "stopped"
    second = shell("resume", shell.run_folder("tune").name[:8], "--quiet")
    assert second.code == 0
    assert [event["step"] for event in second.of("restore")] == [7]
    assert [event["step"] for event in second.of("step")] == [*range(8, STEPS + 1)]
    [line] = second.err.splitlines()  # --quiet
    assert line.startswith(f"done at step {STEPS} of {STEPS}, final loss ")
    assert shell.losses() == whole.shell.losses()
    assert same_tensors(shell.adapter(), whole.shell.adapter())
    assert shell("runs").out.split()[1] == "completed"


def test_a_stopped_run_is_continued_by_its_job_file(shell, whole):
    shell(*RUN, "--state", "elsewhere", "--stop-after", "30", "--out", "out/answers.jsonl")
    run = shell.run_folder("run")
    before = len(answers(run / "results.jsonl"))
    assert before >= 30
    second = shell("run", "--config", str(run / "job.json"), "--stop-after", "1000")
    assert second.code == 0
    assert second.of("restore")[0]["step"] == before == ROWS - len(second.of("row"))
    assert not (run / "state").exists()
    wanted = answers(whole.shell.run_folder("run") / "results.jsonl")
    assert answers(run / "results.jsonl") == answers(shell.folder / "out" / "answers.jsonl") == wanted
