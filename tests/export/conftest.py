"""A home of its own for every test, a tiny model with an adapter, and the demo model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from export.families import adapter_for, build
from models.folders import tiny_llama
from spillover.models import MODULES, Adapter, Model, resolve
from spillover.models.adapters import save


@dataclass(frozen=True)
class Trained:
    """A model and its adapter, called ``name`` on the command line."""

    model: Model
    adapter: Adapter
    name: str


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPILL_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny Llama whose answers are sure of themselves; tests that change it copy it first."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPILL_HOME", str(tmp_path_factory.mktemp("home")))
        return build(tmp_path_factory.mktemp("model") / "tiny", "llama").path


@pytest.fixture
def trained(base: Path, home: Path) -> Trained:
    model = resolve(str(base))
    adapter = adapter_for(model.config, MODULES, base="tiny", fingerprint=model.fingerprint)
    save("mine", adapter)
    return Trained(model, adapter, f"{base}+mine")


@pytest.fixture(scope="session")
def half(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny Llama in bf16."""
    return tiny_llama(tmp_path_factory.mktemp("half") / "tiny")


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """The demo model, expanded once for the session."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPILL_HOME", str(tmp_path_factory.mktemp("demo-home")))
        return resolve("demo")
