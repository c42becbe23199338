"""Tiny models, built once; measured speeds go to a folder of the test session."""

from __future__ import annotations

import functools
from dataclasses import replace

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


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    """Makes (ours, transformers' own) of the case of a name, once."""
    return functools.cache(lambda name: build(tmp_path_factory.mktemp(name), name))


@pytest.fixture(params=["planned", "torch"])
def kernels(request):
    """What generates and scores: the kernels that are planned here, and torch's."""
    return "" if request.param == "planned" else request.param


@pytest.fixture(params=FAMILIES)
def family(request, built, kernels):
    """(case, ours, transformers' own) of each family."""
    return replace(FAMILIES[request.param], kernels=kernels), *built(request.param)


@pytest.fixture(params=[name for name, case in FAMILIES.items() if case.targets])
def trained(request, built):
    """`family` where the case has an adapter, with the planned kernels."""
    return FAMILIES[request.param], *built(request.param)


@pytest.fixture(scope="session")
def llama(built):
    return built("llama")


@pytest.fixture(autouse=True)
def two_threads():
    torch.set_num_threads(2)
