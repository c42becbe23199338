"""A folder with data, and a tiny random model that every test of a session shares."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobs.scenarios import write_prompts, write_training
from models.folders import tiny_llama


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with ``train.jsonl`` and ``prompts.jsonl`` and a ``SPILL_HOME`` of its own."""
    monkeypatch.setenv("SPILL_HOME", str(tmp_path / "home"))
    write_training(tmp_path / "train.jsonl")
    write_prompts(tmp_path / "prompts.jsonl")
    return tmp_path
