"""Downloads over real HTTP: what is fetched, resumed, refused and pinned."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from models.hub_server import Hub, Repo, serve
from spillover.errors import ModelError
from spillover.models import TAGS, resolve
from spillover.models.fingerprint import fingerprint
from spillover.models.tags import Source

COMMIT = "a" * 40
LATER = "b" * 40
NAME = "acme/tiny"


@pytest.fixture
def hub(tiny: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    files = {path.name: path.read_bytes() for path in tiny.iterdir()}
    files |= {"model/../../escape.safetensors": b"x", "model-old/model.safetensors": b"x"}
    files |= {"README.md": b"# tiny", "consolidated.safetensors": b"again", "original/params.json": b"{}"}
    with serve() as hub:
        hub.repos[NAME] = Repo(COMMIT, files)
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        monkeypatch.setenv("SPILL_DISK_FLOOR_GB", "0")
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.setenv("HF_HOME", str(home / "hf"))
        yield hub


def refusal(spec: str) -> ModelError:
    with pytest.raises(ModelError) as caught:
        resolve(spec)
    assert "\n" not in str(caught.value)
    return caught.value


def test_only_what_counts_is_fetched_once_and_it_is_the_model(hub: Hub, tiny: Path, home: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    model = resolve(NAME, report=lambda *report: seen.append(report))
    assert model.fingerprint == fingerprint(tiny)
    assert {path.name for path in model.path.iterdir()} == {path.name for path in tiny.iterdir()}
    size = sum(path.stat().st_size for path in tiny.iterdir())
    assert (f"download {NAME}", size, size) in seen
    hub.calls.clear()
    assert resolve(NAME).path == model.path
    assert not hub.calls, "what is on disk needs no network"
    pin = json.loads((home / "models/pins/acme--tiny.json").read_text())
    assert pin["commit"] == COMMIT
    assert all(len(file["sha256"]) == 64 for file in pin["files"].values())


def test_the_same_name_stays_the_same_bytes(hub: Hub) -> None:
    model = resolve(NAME)
    repo = hub.repos[NAME]
    repo.history[COMMIT] = repo.files
    repo.commit, repo.files = LATER, {**repo.files, "config.json": b"{}"}
    shutil.rmtree(model.path)
    assert resolve(NAME).fingerprint == model.fingerprint
    assert any(f"/resolve/{COMMIT}/" in call.path for call in hub.calls)
    repo.history[COMMIT] = {**repo.history[COMMIT], "tokenizer_config.json": b'{"chat_template": "evil"}'}
    shutil.rmtree(model.path)
    assert "tokenizer_config.json of acme/tiny@aaaaaaaaaaaa arrived with the wrong content" in str(
        refusal(NAME)
    )


def test_a_revision_is_its_own_model(hub: Hub) -> None:
    repo = hub.repos[NAME]
    repo.history[LATER] = repo.files
    assert resolve(f"{NAME}@{LATER}").path.name == f"acme--tiny@{LATER}"
    error = refusal(f"{NAME}@v9")
    assert str(error) == f"{NAME} has no revision v9"


def test_one_cut_connection_is_bridged(hub: Hub, tiny: Path) -> None:
    hub.cut_once["model.safetensors"] = 20_000
    assert resolve(NAME).fingerprint == fingerprint(tiny)
    assert [call.range for call in hub.gets("model.safetensors")] == [None, "bytes=20000-"]


def test_a_killed_download_continues_where_it_stopped(hub: Hub, tiny: Path, home: Path) -> None:
    hub.stall["model.safetensors"] = 30_000
    code = f"from spillover.models import resolve; resolve({NAME!r})"
    child = subprocess.Popen([sys.executable, "-c", code], env=dict(os.environ))
    deadline = time.monotonic() + 60
    while not hub.gets("model.safetensors"):
        assert child.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    part = home / "models/.acme--tiny.partial/model.safetensors.part"
    while not (part.exists() and part.stat().st_size):
        assert child.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    child.wait()
    arrived = part.stat().st_size
    hub.stall.clear()
    hub.calls.clear()
    assert resolve(NAME).fingerprint == fingerprint(tiny)
    assert [call.range for call in hub.gets("model.safetensors")] == [f"bytes={arrived}-"]
    assert not hub.gets("config.json"), "whole files are not fetched again"


def test_a_hub_that_keeps_cutting_is_given_up_and_continued(hub: Hub, tiny: Path, monkeypatch) -> None:
    monkeypatch.setattr("spillover.models.hub._PAUSE", 0.0)
    hub.cut["model.safetensors"] = 0
    hub.cut_once["model.safetensors"] = 25_000
    error = refusal(NAME)
    assert f"{NAME} could not be fetched from {hub.endpoint}" in str(error)
    assert "continues where it stopped" in str(error.hint)
    hub.cut.clear()
    hub.calls.clear()
    assert resolve(NAME).fingerprint == fingerprint(tiny)
    assert [call.range for call in hub.gets("model.safetensors")] == ["bytes=25000-"]


@pytest.mark.parametrize("file", ["model.safetensors", "config.json"])
def test_wrong_content_is_refused_and_fetched_anew(hub: Hub, tiny: Path, home: Path, file: str) -> None:
    hub.corrupt.add(file)
    assert f"{file} of {NAME}@{COMMIT[:12]} arrived with the wrong content" in str(refusal(NAME))
    assert not (home / "models/acme--tiny").exists()
    hub.corrupt.clear()
    assert resolve(NAME).fingerprint == fingerprint(tiny)


def test_a_tag_brings_its_own_pins(hub: Hub, tiny: Path, monkeypatch) -> None:
    good = {path.name: path.read_bytes() for path in tiny.iterdir()}
    import hashlib

    pins = {name: (len(data), hashlib.sha256(data).hexdigest()) for name, data in good.items()}
    monkeypatch.setitem(TAGS, "tiny:1k", Source(NAME, COMMIT, pins))
    assert resolve("tiny:1k").fingerprint == fingerprint(tiny)
    wrong = {**pins, "tokenizer.json": (pins["tokenizer.json"][0], "0" * 64)}
    monkeypatch.setitem(TAGS, "tiny:2k", Source(NAME, LATER, wrong))
    hub.repos[NAME].history[LATER] = hub.repos[NAME].files
    assert "tokenizer.json of acme/tiny@bbbbbbbbbbbb arrived with the wrong content" in str(
        refusal("tiny:2k")
    )


def test_a_file_changed_after_the_download_is_found(hub: Hub) -> None:
    model = resolve(NAME)
    path = model.path / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    error = refusal(NAME)
    assert "model.safetensors changed since it was downloaded" in str(error)
    assert error.hint == f"rm -r {model.path} to download it again"


def test_tokens_reach_the_hub_and_no_other_host(hub: Hub, monkeypatch) -> None:
    hub.repos[NAME].token = "secret"
    hub.repos[NAME].gated = True
    monkeypatch.setenv("HF_TOKEN", "other")
    error = refusal(NAME)
    assert str(error) == f"{NAME} is gated: its owner must grant you access first"
    assert "HF_TOKEN" in str(error.hint)
    monkeypatch.setenv("HF_TOKEN", "secret")
    hub.calls.clear()
    resolve(NAME)
    assert {call.token for call in hub.calls if not call.path.startswith("/cdn/")} == {"secret"}
    assert {call.token for call in hub.calls if call.path.startswith("/cdn/")} == {None}


def test_refusals_are_one_line(hub: Hub, monkeypatch) -> None:
    error = refusal("acme/none")
    assert str(error) == f"{hub.endpoint} has no repository acme/none, or it is private"
    hub.repos["acme/gguf"] = Repo(COMMIT, {"model.gguf": b"x", "config.json": b"{}"})
    assert str(refusal("acme/gguf")) == "acme/gguf has no safetensors weights"
    assert "is no repository id" in str(refusal("acme/..--x"))
    hub.refuse = 403
    assert str(refusal(NAME)) == f"{hub.endpoint} answered 403 for {NAME}"
    hub.refuse = 500
    assert str(refusal(NAME)) == f"{hub.endpoint} answered 500 for {NAME}"
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert f"{NAME} could not be fetched from http://127.0.0.1:9" in str(refusal(NAME))


def test_a_full_disk_is_seen_before_the_first_byte(hub: Hub, home: Path, monkeypatch) -> None:
    monkeypatch.setenv("SPILL_DISK_FLOOR_GB", "1000000")
    error = refusal(NAME)
    assert str(error).startswith("not enough disk: 0.0 GB to fetch, ")
    assert str(error).endswith("and 1000000 GB stay free")
    assert not hub.gets("config.json")
