"""A shell with a tiny model and data, and the results of jobs that nothing interrupted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from cli.command import RUN, TUNE, Outcome, Shell, shell_in
from models.folders import tiny_llama


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def shell(tmp_path: Path, model: Path) -> Iterator[Shell]:
    shell = shell_in(tmp_path, model)
    yield shell
    for process in shell.started:
        if process.child.poll() is None:
            process.child.kill()
            process.child.wait()


@dataclass(frozen=True)
class Whole:
    """A shell in which `TUNE` and `RUN` were typed and ran to their ends. Tests must not change it."""

    shell: Shell
    tune: Outcome
    run: Outcome


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Whole:
    shell = shell_in(tmp_path_factory.mktemp("whole"), model)
    tune, run = shell.start(*TUNE), shell.start(*RUN)
    return Whole(shell, tune.end(), run.end())
