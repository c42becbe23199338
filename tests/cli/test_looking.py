"""Commands that look at work and prepare it: status, runs, tail, models, adapters, check, example, doctor."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys

import pytest

from cli.command import ROWS, RUN, STEPS, answers, tree

HEAVY = ("torch", "transformers", "safetensors", "tokenizers", "huggingface_hub")
PROBE = f"""
import sys
from spillover.cli import main
try:
    main()
finally:
    print([name for name in {HEAVY} if name in sys.modules], file=sys.stderr)
"""


@pytest.mark.parametrize(
    "words", ["--help", "status", "runs", "check prompts.jsonl", "tail", "report --json"]
)
def test_looking_imports_no_heavy_library(whole, words):
    shell = whole.shell
    done = subprocess.run(
        [sys.executable, "-c", PROBE, *words.split()],
        cwd=shell.folder,
        env=shell.environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0
    assert done.stderr.splitlines() == ["[]"]


def test_status_says_where_work_stands(whole):
    run = whole.shell.run_folder("tune")
    for words in ((run.name,), ("tune-",), (str(run / "state"),)):
        lines = whole.shell("status", *words).out.splitlines()
        assert lines[0].startswith(f"tune at {run / 'state'}: completed, generation 1, revision ")
        assert lines[1].startswith(f"progress: step {STEPS}")
        [current] = [line for line in lines if line.startswith("current ckpt: ")]
        assert f"ckpt/step-{STEPS:09d}-g000001-" in current
        assert not any(line.startswith("owner: ") for line in lines)
    document = json.loads(whole.shell("status", run.name, "--json").out)
    assert (document["status"], document["identity"]["command"]) == ("completed", "tune")
    assert document == json.loads((run / "state" / "control.json").read_bytes())


def test_runs_lists_them_newest_first(whole):
    shell = whole.shell
    lines = shell("runs").out.splitlines()
    by_time = sorted(
        (shell.run_folder(command) for command in ("tune", "run")),
        key=lambda folder: (folder / "manifest.json").stat().st_mtime,
        reverse=True,
    )
    assert [line.split()[0] for line in lines] == [folder.name for folder in by_time]
    assert all(re.search(r" completed +20\d\d-\d\d-\d\d \d\d:\d\d:\d\d +tiny, \d+ rows$", x) for x in lines)
    assert shell("runs", "--limit", "1").out.splitlines() == lines[:1]


def test_tail_shows_the_last_events_and_follows_to_the_end(whole):
    shell = whole.shell
    lines = shell("tail", "tune-").out.splitlines()
    assert len(lines) == 10
    assert re.fullmatch(r"\d\d:\d\d:\d\d done       done at step 40 of 40, .*", lines[-1])
    assert any(re.search(rf"step 39 of {STEPS}  loss \d\.\d{{4}}  lr \d\.\d\de-\d\d", line) for line in lines)
    assert shell("tail", "run-", "-f", "-n", "2").out.splitlines()[0].split()[1] == "checkpoint"


def test_tail_shows_a_step_whose_loss_is_no_number(shell, whole):
    shutil.copytree(whole.shell.folder / "runs", shell.folder / "runs")
    path = shell.run_folder("tune") / "events.jsonl"
    event = next(json.loads(x) for x in path.read_text().splitlines() if '"event":"step"' in x) | {
        "loss": None
    }
    with path.open("a") as file:
        file.write(json.dumps(event) + "\n")
    assert "  loss -  lr " in shell("tail", "tune-", "-n", "1").out


def test_a_beginning_that_fits_several_runs_is_refused(whole):
    shell = whole.shell
    shutil.copytree(shell.run_folder("tune"), shell.folder / "runs" / "tune-copy")
    try:
        for command in ("status", "tail", "resume"):
            outcome = shell(command, "tune-")
            assert outcome.code == 1
            assert outcome.err == "spill: 2 runs begin with 'tune-'. Try: spill runs lists them\n"
    finally:
        shutil.rmtree(shell.folder / "runs" / "tune-copy")


def test_one_damaged_state_does_not_hide_the_other_runs(shell, whole):
    shutil.copytree(whole.shell.folder / "runs", shell.folder / "runs")
    manifest = shell.run_folder("tune") / "manifest.json"
    facts = json.loads(manifest.read_bytes()) | {
        "status": "running",
        "state": str(shell.run_folder("tune") / "state"),
    }
    manifest.write_text(json.dumps(facts))
    (shell.run_folder("tune") / "state" / "control.json").write_bytes(b"\0")
    outcome = shell("runs")
    assert outcome.code == 0
    assert len(outcome.out.splitlines()) == 2


def test_adapters_are_listed_and_removed(shell, whole):
    assert "no adapters yet" in shell("adapters").out
    shutil.copytree(whole.shell.home / "adapters", shell.home / "adapters")
    [line] = shell("adapters").out.splitlines()
    assert line.split()[:3] == ["tiny+tiny", "rank", "4"]
    assert shell("adapters", "--remove", "tiny").out == f"removed {shell.home / 'adapters' / 'tiny'}\n"
    assert [*(shell.home / "adapters").iterdir()] == []


def test_models_lists_the_tags_and_what_is_here(shell, model):
    lines = {line.split()[0]: line for line in shell("models").out.splitlines()}
    assert lines["demo"].split()[1] == "-"
    assert "Qwen/Qwen2.5-0.5B-Instruct" in lines["qwen2.5:0.5b"]
    shutil.copytree(model, shell.home / "models" / "demonstration")
    lines = {line.split()[0]: line for line in shell("models").out.splitlines()}
    assert lines["demo"].split()[1] == "-"
    assert lines["demonstration"].endswith(f" GB  {shell.home / 'models' / 'demonstration'}")
    fetched = shell("models", "--fetch", "tiny").out.splitlines()[-1]
    assert re.fullmatch(r"tiny: \S+, fingerprint [0-9a-f]{16}", fetched)


def test_check_says_what_a_file_is_good_for(whole):
    shell = whole.shell
    lines = shell("check", "train.jsonl").out.splitlines()
    assert lines == [
        "train.jsonl: 16 plain rows, 0.0 MB",
        "can be used by: spill run MODEL train.jsonl",
        "can be used by: spill tune MODEL train.jsonl",
        "can be used by: spill eval train.jsonl MODEL",
    ]
    facts = json.loads(shell("check", "prompts.jsonl", "--json").out)
    assert (facts["rows"], facts["shape"], facts["fits"]) == (ROWS, "plain", ["prompt"])
    assert facts["bytes"] == (shell.folder / "prompts.jsonl").stat().st_size


def test_an_example_is_written_once_and_its_rows_are_good(shell):
    outcome = shell("example", "tickets")
    assert outcome.code == 0
    assert "spill tune" in outcome.out
    assert {path.name for path in (shell.folder / "tickets").iterdir()} == {
        "README.md",
        "train.jsonl",
        "test.jsonl",
    }
    assert "spill tune MODEL" in shell("check", "tickets/train.jsonl").out
    before = tree(shell.folder)
    assert shell("example", "tickets").code == 1
    assert tree(shell.folder) == before
    (shell.folder / "tickets" / "train.jsonl").write_text("mine")
    assert shell("example", "tickets", "--force").code == 0
    assert tree(shell.folder) == before
    assert shell("example", "tickets", "--to", "a/b").code == 0
    assert tree(shell.folder / "a" / "b") == tree(shell.folder / "tickets")


def test_doctor_describes_the_machine_wherever_home_is(whole, tmp_path):
    shell = whole.shell
    environment = shell.environment | {"SPILL_HOME": str(tmp_path / "not" / "yet")}
    done = subprocess.run(
        [sys.executable, "-c", PROBE, "doctor"],
        cwd=shell.folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0
    lines = {line.split()[0]: line for line in done.stdout.splitlines()}
    assert f"{os.cpu_count()} cores" in lines["machine"]
    assert lines["home"].startswith(f"home      {tmp_path / 'not' / 'yet'}, ")
    assert lines["runs"] == "runs      0 unfinished here"
    assert {"spillover", "torch", "gguf", "obstore"} <= lines.keys()


def test_the_packaged_questions_can_be_answered(shell):
    outcome = shell("run", "tiny", "sample", "--max-tokens", "4", *RUN[3:], "--out", "answers.jsonl")
    assert outcome.code == 0
    assert len(answers(shell.folder / "answers.jsonl")) == 20
    assert outcome.of("start")[0]["run"].startswith("run-tiny-sample-")


def test_report_prints_a_table_and_writes_a_page(shell, whole):
    shutil.copytree(whole.shell.folder / "runs", shell.folder / "runs")
    run = shell.run_folder("tune")
    outcome = shell("report", "tune-")
    lines = dict(re.split(r"  +", line, maxsplit=1) for line in outcome.out.splitlines()[1:])
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.startswith(f"{run.name}: completed\n")
    assert lines["what"] == "tune tiny on train.jsonl, 16 rows"
    assert lines["steps"] == f"{STEPS} of {STEPS}"
    last = whole.tune.of("step")[-1]["loss"]
    assert f", last {last:.4f}, best " in lines["loss"]
    assert lines["interruptions"] == "none"
    assert lines["page"] == str(run.relative_to(shell.folder) / "report.html")
    assert (run / "report.html").read_text().count("<figure ") == 4
    assert shell("status", "tune-").out.splitlines()[-1] == f"next: spill report {run.name}"


def test_report_as_json_writes_only_what_was_asked(shell, whole, tmp_path):
    shutil.copytree(whole.shell.folder / "runs", shell.folder / "runs")
    figures = json.loads(shell("report", str(shell.run_folder("run")), "--json").out)
    assert (figures["command"], figures["status"], figures["done"]) == ("run", "completed", ROWS)
    assert sum(figures["answers"]["finish"].values()) == ROWS
    assert not (shell.run_folder("run") / "report.html").exists()
    assert json.loads(shell("report", "run-", "--json", "--out", str(tmp_path / "a.html")).out) == figures
    assert "Answer lengths" in (tmp_path / "a.html").read_text()


def test_report_refuses_in_one_line(shell, whole, tmp_path):
    shutil.copytree(whole.shell.folder / "runs", shell.folder / "runs")
    (shell.run_folder("run") / "report.html").mkdir()
    for words, said in (
        (("report", "nothing"), "no run is called 'nothing'"),
        (("report", "last", "--out", str(tmp_path)), f"--out {tmp_path} is a folder. Try: name a file"),
        (("report", "last", "--out", "/proc/x/y.html"), "/proc/x/y.html cannot be written"),
        (
            ("report", "run-"),
            f"{shell.run_folder('run').relative_to(shell.folder)}/report.html cannot be written",
        ),
    ):
        outcome = shell(*words)
        assert outcome.code == 1 and outcome.err.startswith(f"spill: {said}") and outcome.err.count("\n") == 1
