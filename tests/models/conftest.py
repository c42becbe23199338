"""A private ``SPILL_HOME`` per test, the expanded demo model per session, and small models on the spot."""

from __future__ import annotations

from pathlib import Path

import pytest

from models.folders import tiny_llama
from spillover.models import Model, resolve


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty ``SPILL_HOME``."""
    monkeypatch.setenv("SPILL_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """The demo model, expanded once for the session."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPILL_HOME", str(tmp_path_factory.mktemp("demo-home")))
        return resolve("demo")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a random two-layer Llama with a tokenizer; tests that change it copy it first."""
    return tiny_llama(tmp_path_factory.mktemp("tiny"))
