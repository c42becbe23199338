"""Tiny models, built once; measured speeds go to a folder of the test session."""

from __future__ import annotations

import pytest
import torch

from engine.tiny import FAMILIES, build


@pytest.fixture(scope="session")
def session_home(tmp_path_factory):
    return tmp_path_factory.mktemp("home")


@pytest.fixture(autouse=True)
def own_home(request, session_home, monkeypatch):
    if request.node.get_closest_marker("model") is None:
        monkeypatch.setenv("SPILL_HOME", str(session_home))


@pytest.fixture(scope="session", params=FAMILIES)
def family(request, tmp_path_factory):
    """(ours, transformers' own) of each family."""
    return build(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="session")
def llama(tmp_path_factory):
    return build(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(autouse=True)
def two_threads():
    torch.set_num_threads(2)
