"""A tiny model with two adapters, and servers of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.folders import tiny_llama
from served import LONG, Running
from spillover.models import Adapter, LoraConfig, ModelConfig, adapters, initial


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ``SPILL_HOME`` with the adapters ``a`` and ``b`` for `tiny`."""
    return tmp_path_factory.mktemp("serve") / "home"


@pytest.fixture(scope="session")
def tiny(home: Path) -> Path:
    folder = tiny_llama(home.parent / "tiny", **LONG)
    config = LoraConfig(rank=4, alpha=64.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPILL_HOME", str(home))
        for seed, name in enumerate("ab"):
            tensors = initial(config, ModelConfig.read(folder), seed)
            source = np.random.default_rng(seed)
            alive = {
                key: source.normal(size=value.shape).astype(np.float32) if key.endswith("_b") else value
                for key, value in tensors.items()
            }
            adapters.save(name, Adapter(config, alive))
    return folder


@pytest.fixture(scope="session")
def server(tiny: Path, home: Path) -> Iterator[Running]:
    """A server that tests share."""
    state = str(home.parent / "shared")
    options = ("--state", state, "--batch", "8", "--context", "8192")
    with Running(f"{tiny}+a+b", home, home.parent / "shared.log", options) as running:
        yield running


@pytest.fixture
def serving(tiny: Path, home: Path, tmp_path: Path) -> Iterator[Callable[..., Running]]:
    """Starts servers of a test's own, with files in its folder."""
    started: list[Running] = []

    def start(*options: str, model: str = str(tiny), **more: Any) -> Running:
        options = ("--state", str(tmp_path / "state"), "--context", "8192", *options)
        running = Running(model, home, tmp_path / f"server-{len(started)}.log", options, **more)
        started.append(running)
        return running.start()

    yield start
    for running in started:
        if running.process is not None:
            running.kill()
