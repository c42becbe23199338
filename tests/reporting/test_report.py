"""What is told of a run, whatever its folder holds."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from jobs.scenarios import run_job, tune_job, write_prompts, write_training
from models.folders import tiny_llama
from reporting.made import Made, a_row_job, a_tune
from spillover.jobs.runs import Run, find_run
from spillover.report import History, Summary, lines, page, read_history, summary
from spillover.report.axis import labels, smoothed, thinned, ticks

EVIL = "<script>alert(1)</script>"


def told(folder: Path) -> tuple[Summary, str, str]:
    """The figures of a folder, its table and its page."""
    history = read_history(Run(folder))
    figures = summary(Run(folder), history)
    return figures, "\n".join(lines(figures)), page(figures, history)


def test_a_tune_that_was_killed_and_preempted(tmp_path: Path) -> None:
    figures, table, html = told(a_tune(tmp_path / "tune-a-1").write())
    assert (figures.done, figures.total, figures.interruptions, figures.redone) == (120, 120, 2, 12)
    assert figures.loss is not None and figures.validation is not None
    assert (figures.validation.last, figures.validation.best_step) == (0.5, 120)
    assert [one.ending for one in figures.processes] == ["killed or lost", "preempted by SIGTERM", "finished"]
    assert [(one.host, one.after, one.until) for one in figures.processes] == [
        ("here", 0, 48),
        ("there", 36, 84),
        ("here", 84, 120),
    ]
    assert (figures.durable, figures.durable_at) == (3, 120)
    assert "interruptions  2, continued each time; 12 steps done again" in table
    assert re.search(
        r"2 +20\S+ \S+ +there +torch on cuda in float32 +37 to 84 +52\.0 s +preempted by SIGTERM", table
    )
    assert [*map(int, re.findall(r'class=durable data-count="(\d+)"', html))] == [3] * 4
    assert re.findall(r'class=interruption data-number="(\d)"', html) == ["2", "3"] * 4


def test_each_step_counts_once_with_its_last_value(tmp_path: Path) -> None:
    made = Made(tmp_path / "tune-a-1", "tune", 10)
    made.start()
    made.steps(1, 8, loss=9.0)
    made.start()  # killed before anything was durable: from the beginning
    made.steps(1, 6, loss=5.0)
    made.event("checkpoint", step=4, uri="x")
    made.start()
    made.event("restore", step=4, uri="x")
    made.steps(5, 7, loss=1.0)
    figures, _, _ = told(made.write("stopped"))
    history = read_history(Run(made.folder))
    assert [(one.step, one.loss) for one in history.points] == [
        (n, 5.0 if n < 5 else 1.0) for n in range(1, 8)
    ]
    assert figures.redone == 10 and figures.status == "stopped"
    worked = [one.worked for one in history.points]
    assert worked == sorted(worked) and worked[0] == 9.0


@pytest.mark.parametrize("command", ["run", "distill"])
def test_a_row_job(tmp_path: Path, command: str) -> None:
    figures, table, html = told(a_row_job(tmp_path / f"{command}-a-1", command).write())
    assert (figures.done, figures.redone, figures.unit) == (100, 10, "rows")
    assert figures.answers is not None
    assert figures.answers.finish == {"stop": 90, "length": 7, "error": 3}
    assert figures.answers.longest == 64
    assert "rows           100 of 100; 90 stop, 7 length, 3 error" in table
    titles = re.findall(r"<figcaption><b>(.*?)</b>", html)
    assert titles == ["Rows done", "Throughput", "Answer lengths"]
    counts = [int(one) for one in re.findall(r"<rect class=bar.*?: (\d+)</title>", html)]
    assert sum(counts) == 97


@pytest.mark.parametrize("make", [a_tune, a_row_job])
def test_no_text_of_a_run_is_markup_or_commands_a_terminal(tmp_path: Path, make) -> None:
    made = make(tmp_path / "runs" / "tune-<b>-1", model=EVIL, data="a\x1b[31m\nb.jsonl", engine=EVIL)
    made.start(EVIL, f"'\"{EVIL}")
    made.event("error", message=f"{EVIL}\x1b]0;x\x07")
    made.write(host=EVIL, hardware=EVIL, state=EVIL)
    made.lines = [line.replace('"stop"', json.dumps(EVIL)) for line in made.lines]
    made.write(host=EVIL, hardware=EVIL, state=EVIL)
    _, table, html = told(made.folder)
    assert "\x1b" not in table and "\x07" not in table and "\n" not in "".join(table.splitlines())
    assert EVIL not in html.replace(f"<script>{html.rpartition('<script>')[2]}", "")
    assert html.count("<script") == 2 and "<b>-1" not in html
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in html


def test_the_page_needs_nothing_from_anywhere(tmp_path: Path) -> None:
    html = told(a_tune(tmp_path / "tune-a-1").write())[2]
    assert not re.findall(r"https?:|//[a-z]|@import|url\(|src=|<img|<iframe", html.replace("default-src", ""))
    assert "prefers-color-scheme: dark" in html


def test_a_hundred_thousand_steps_are_a_small_page_that_keeps_every_peak(tmp_path: Path) -> None:
    made = a_tune(tmp_path / "tune-a-1", 100_000)
    place = next(n for n, line in enumerate(made.lines) if '"step": 43210,' in line)
    event = json.loads(made.lines[place])
    made.lines[place] = json.dumps(event | {"loss": 77.0})
    html = told(made.write())[2]
    assert len(html) < 1_500_000
    [data] = re.findall(r'id="curves">(.*?)</script>', html)
    loss = json.loads(data)[0]["series"][0]
    assert max(loss["y"]) == 77.0 and loss["x"][loss["y"].index(77.0)] == 43210
    assert html.count("<tr>") < 250


TORN = '{"event":"step","time":1800000000.0,"command":"tune","step":3,"lo'
STRANGE = [
    "5", "null", "[]", "{}", '"x"', '{"event": "step"}', '{"event": "step", "time": "now", "step": 1}',
    '{"event": "step", "time": 1e300, "step": 1}', '{"event": "step", "time": 1, "step": -4}',
    '{"event": "step", "time": 1, "step": 99999999999999999999999}',
    '{"event": "row", "time": 1, "step": null}',
    '{"event": "step", "time": 1, "step": 2, "loss": null}', '{"event": "restore", "time": 1}',
    '{"event": "step", "time": 1, "step": 2, "loss": 1e999}', '\udcff', "{" * 100,
]  # fmt: skip


@pytest.mark.parametrize("text", ["", "\n\n", TORN, *STRANGE, "\n".join(STRANGE)])
@pytest.mark.parametrize("command", ["tune", "run"])
def test_whatever_a_file_of_events_holds_there_is_a_table_and_a_page(
    tmp_path: Path, text: str, command: str
) -> None:
    folder = Made(tmp_path / "a-1", command, 10).write("running", pid=2**22 + 1)
    (folder / "events.jsonl").write_bytes(text.encode(errors="surrogateescape"))
    figures, table, html = told(folder)
    assert "a-1: " in table and html.endswith("</html>\n")
    assert figures.command == command


def test_missing_files_and_figures_are_left_out(tmp_path: Path) -> None:
    folder = a_tune(tmp_path / "tune-a-1").write()
    (folder / "manifest.json").write_text('{"run": "tu')
    figures, table, _ = told(folder)
    assert figures.status.startswith("unknown") and figures.done == 120 and "loss " in table
    (folder / "events.jsonl").unlink()
    assert told(folder)[0].done == 0
    made = Made(tmp_path / "tune-b-1", "tune", 2)
    made.steps(1, 2, loss=None, lr=None, grad_norm=None, tokens_per_s=None)
    figures, _, html = told(made.write())
    assert figures.loss is None and "<figure " not in html and "Values of all 2 steps" in html


def test_a_torn_last_line_costs_only_itself(tmp_path: Path) -> None:
    made = Made(tmp_path / "tune-a-1", "tune", 10)
    made.start()
    made.steps(1, 5)
    folder = made.write("running", pid=2**22 + 1, host="elsewhere")
    with (folder / "events.jsonl").open("a") as file:
        file.write(TORN)
    figures, _, _ = told(folder)
    assert figures.done == 5 and figures.processes[-1].ending == "at work, or lost"


def test_what_comes_after_a_torn_line_is_a_line_of_its_own(tmp_path: Path, monkeypatch) -> None:
    made = Made(tmp_path / "tune-a-1", "tune", 10)
    made.start()
    folder = made.write()
    with (folder / "events.jsonl").open("a") as file:
        file.write(TORN)
    run, written = Run(folder), os.write
    run.record({"event": "start", "time": 1.0})
    monkeypatch.setattr(os, "write", lambda file, data: written(file, data[:20]))  # a full disk
    run.record({"event": "step", "time": 2.0, "step": 1})
    monkeypatch.undo()
    run.record({"event": "step", "time": 3.0, "step": 2})
    run.end("stopped", {})
    assert [(event["event"], event["time"]) for event in run.events()][1:] == [("start", 1.0), ("step", 3.0)]
    assert len(read_history(run).processes) == 2


# Real jobs


def test_a_tune_continued_in_another_folder_has_its_whole_course(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("SPILL_HOME", str(tmp_path / "home"))
    model = tiny_llama(tmp_path / "tiny")
    write_training(tmp_path / "train.jsonl")
    options = {"state": str(tmp_path / "state"), "val": tmp_path / "train.jsonl"}
    first, before = tune_job(tmp_path, model, stop_after=5, runs=tmp_path / "one", **options)
    second, after = tune_job(tmp_path, model, runs=tmp_path / "two", **options)
    assert first.run is not None and second.run is not None
    losses = {event["step"]: event["loss"] for event in before + after if event["event"] == "step"}
    history = read_history(second.run)
    assert {point.step: point.loss for point in history.points} == losses
    assert sorted(history.validations) == [4, 8, 12]
    figures = summary(second.run, history)
    assert [(one.after, one.until) for one in figures.processes] == [(0, 5), (5, 12)]
    assert [one.ending for one in figures.processes] == ["not in this folder", "finished"]
    assert "losses of 5 steps that were done elsewhere" in figures.notes[0]
    assert "torch on cpu in float32" in "\n".join(lines(figures))
    (tmp_path / "state" / "control.json").write_bytes(b"{")
    history = read_history(second.run)
    assert [point.step for point in history.points] == [*range(6, 13)]
    assert history.notes[0].startswith("5 steps were done elsewhere, and ")
    assert "<figure " in page(summary(second.run, history), history)


def test_a_run_and_its_durable_points(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("SPILL_HOME", str(tmp_path / "home"))
    model = tiny_llama(tmp_path / "tiny")
    write_prompts(tmp_path / "prompts.jsonl")
    run_job(tmp_path, model, stop_after=5)
    result, _ = run_job(tmp_path, model)
    assert result.run is not None
    history = read_history(result.run)
    figures = summary(result.run, history)
    assert (figures.done, figures.total, figures.interruptions, figures.status) == (12, 12, 1, "completed")
    assert figures.durable >= 3 and figures.durable_at == 12
    assert figures.processes[0].host and figures.processes[0].where == "torch on cpu in float32"


# Runs by name


def test_a_run_is_found_by_name_as_the_last_and_by_its_folder(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    a_tune(Path("runs/tune-a-1")).write()
    for name in (None, "last", "tune-a", "runs/tune-a-1", str(tmp_path / "runs" / "tune-a-1") + "/"):
        assert find_run(name).id == "tune-a-1"
    monkeypatch.chdir(tmp_path / "runs" / "tune-a-1")
    assert find_run(".").id == "tune-a-1"


# Axes


@pytest.mark.parametrize(
    ("low", "high", "texts"),
    [
        (0, 100, ["0", "20", "40", "60", "80", "100"]),
        (0.2, 3.1, ["0", "1", "2", "3", "4"]),
        (1, 120, ["0", "50", "100", "150"]),
        (0, 1e-3, ["0", "2e-4", "4e-4", "6e-4", "8e-4", "1e-3"]),
        (0.41, 0.44, ["0.41", "0.42", "0.43", "0.44"]),
        (-1, 1, ["-1.0", "-0.5", "0.0", "0.5", "1.0"]),
        (0, 3e8, ["0", "1e8", "2e8", "3e8"]),
        (5, 5, ["0", "2", "4", "6", "8", "10"]),
        (0, 0, ["-1.0", "-0.5", "0.0", "0.5", "1.0"]),
    ],
)
def test_axes_have_round_numbers(low: float, high: float, texts: list[str]) -> None:
    marks = ticks(low, high)
    assert marks[0] <= low + 1e-12 and marks[-1] >= high - 1e-12
    assert labels(marks) == texts


def test_thinning_keeps_the_ends_and_every_extreme_in_order() -> None:
    curve = [(float(n), float((n * 7919) % 10_007)) for n in range(50_000)]
    kept = thinned(curve, 100)
    assert len(kept) <= 400 and kept == sorted(kept) and {*kept} <= {*curve}
    assert kept[0] == curve[0] and kept[-1] == curve[-1]
    for start in range(0, 50_000, 500):
        part = [y for x, y in curve if start <= x < start + 500]
        there = [y for x, y in kept if start - 5 <= x < start + 505]
        assert max(there) >= max(part) and min(there) <= min(part)


def test_smoothing_of_a_constant_is_that_constant_from_the_first() -> None:
    assert [y for _, y in smoothed([(float(n), 2.5) for n in range(20)], 7)] == pytest.approx([2.5] * 20)
    rising = smoothed([(float(n), float(n)) for n in range(100)], 9)
    assert rising[99][1] == pytest.approx(95, abs=0.1)


def test_an_empty_history_has_no_course() -> None:
    assert (History().done, History().worked, History().points) == (0, 0.0, [])
