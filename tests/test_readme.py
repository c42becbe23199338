"""The README does what it says: its commands run as they are written."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from data import ROOT
from reporting.made import a_tune

README = (ROOT / "README.md").read_text(encoding="utf-8")


def block(name: str) -> str:
    """The shell commands between the markers ``name`` and ``end``."""
    found = re.search(rf"<!-- {name} -->\n```sh\n(.*?)\n```\n<!-- end -->", README, re.DOTALL)
    assert found is not None, name
    return found[1]


def shell(commands: str, folder: Path) -> str:
    """Run commands as a reader's terminal would; their output, stdout and stderr together."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path}
    done = subprocess.run(
        ["bash", "-c", commands],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    return done.stdout


@pytest.fixture(autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of this page's commands alone; the demo model is expanded into it once."""
    home = tmp_path_factory.getbasetemp() / "readme-home"
    shutil.rmtree(home / "adapters", ignore_errors=True)
    monkeypatch.setenv("SPILL_HOME", str(home))
    return home


def test_both_commands_set_up_everything_with_pip_alone() -> None:
    for name, extra, last in (("main", "demo", "spill run"), ("test", "dev", "python -m pytest")):
        steps = block(name).split(" && ")
        assert steps[:2] == ["python3 -m venv .venv", ". .venv/bin/activate"]
        assert steps[2] == f'pip install -q -c constraints.txt -e ".[{extra}]"'
        assert steps[-1].startswith(last)


@pytest.mark.slow
@pytest.mark.model
def test_the_main_command_ends_in_a_tuned_adapter_and_answers(tmp_path: Path, home: Path) -> None:
    steps = block("main").split(" && ")[3:]  # what comes before is this very environment
    output = shell(" && ".join(steps), tmp_path)
    assert (home / "adapters/tickets/adapter_config.json").exists()
    found = re.search(r"48 of 48 rows, (\d+) of 48 as expected", output)
    assert found is not None, output[-3000:]
    assert int(found[1]) >= 34


@pytest.mark.slow
@pytest.mark.model
def test_the_dry_run_is_streamed(tmp_path: Path) -> None:
    output = shell(block("dry"), tmp_path)
    assert "streamed on cpu" in output and "of 0.6 GB" in output
    assert re.search(r"a pass .* reads 0\.\d+ GB from the drive", output) is not None


@pytest.mark.slow
@pytest.mark.model
def test_the_story_of_a_kill_runs_as_written(tmp_path: Path) -> None:
    output = shell(block("story"), tmp_path)
    continued = re.search(r"continuing after step (\d+) of 40", output)
    assert continued is not None, output[-3000:]
    assert 10 <= int(continued[1]) < 40
    assert len((tmp_path / "answers.jsonl").read_text().splitlines()) == 48


@pytest.mark.slow
@pytest.mark.model
def test_the_exports_are_published_with_their_figures(tmp_path: Path) -> None:
    tune = "spill example tickets && spill tune demo tickets/train.jsonl --name tickets --lr 5e-4 --steps 20"
    output = shell(f"{tune} && {block('export')}", tmp_path)
    assert output.count("agrees with the trained model on") == 2
    assert {"tickets.gguf", "tickets.export.json", "tickets.Modelfile"} <= set(os.listdir(tmp_path))
    assert (tmp_path / "tickets-model" / "export.json").exists()


@pytest.mark.slow
@pytest.mark.model
def test_two_models_are_compared(tmp_path: Path) -> None:
    output = shell(block("eval"), tmp_path)
    found = re.search(r"demo\+tickets against demo, exact_match: \+(0\.\d+) .*worse on 0, p = ", output)
    assert found is not None, output[-3000:]
    assert float(found[1]) > 0.3
    assert re.search(r"demo\+tickets +0\.\d+ \[0\.\d+, \d\.\d+\] n=48", output) is not None


def test_the_report_of_a_run_is_a_table_and_a_page(tmp_path: Path) -> None:
    a_tune(tmp_path / "runs" / "tune-a-1").write()
    output = shell(block("report"), tmp_path)
    assert output.startswith("tune-a-1: completed") and "2, continued each time" in output
    assert "<figure " in (tmp_path / "runs" / "tune-a-1" / "report.html").read_text()


def test_the_library_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    found = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert found is not None
    exec(compile(found[1], "README.md", "exec"), {})
    assert capsys.readouterr().out == "{'step': 3}\n"


def test_the_pool_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    found = re.search(r"<!-- pool -->\n```python\n(.*?)```\n<!-- end -->", README, re.DOTALL)
    assert found is not None
    assert len(found[1].splitlines()) <= 10
    exec(compile(found[1], "README.md", "exec"), {})
    assert capsys.readouterr().out == "(1000000,) [5 6 7]\n"
    assert shell("spill pool ls samples", tmp_path).split()[:2] == ["step-1", "1"]


def test_the_queue_example_runs_and_runs_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    found = re.search(r"<!-- queue -->\n```python\n(.*?)```\n<!-- end -->", README, re.DOTALL)
    assert found is not None
    for _ in range(2):
        exec(compile(found[1], "README.md", "exec"), {})
    assert capsys.readouterr().out == "99 9801\n" * 2
    assert "completed 100" in shell("spill queue stats jobs --queue squares", tmp_path)


@pytest.mark.model
def test_the_served_model_answers(tmp_path: Path) -> None:
    output = shell(block("serve"), tmp_path)
    assert output.startswith("ok\n")
    assert "Paris" in output
    assert '"event":"done"' in (tmp_path / "serve.log").read_text()
