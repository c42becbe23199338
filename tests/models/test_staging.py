"""Weights from shared storage are copied once, whole, and checked from then on."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from spillover.errors import ModelError
from spillover.models import resolve
from spillover.models.fingerprint import fingerprint
from spillover.store import open_store


@pytest.fixture(autouse=True)
def room(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPILL_DISK_FLOOR_GB", "0")


def upload(uri: str, folder: Path) -> None:
    store = open_store(uri)
    for path in folder.iterdir():
        store.write(path.name, path)


def test_a_second_staging_copies_nothing(tiny: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(tiny, tmp_path / "shared" / "tiny"))
    seen: list[tuple[str, int, int]] = []
    model = resolve("org/any", weights=str(source), report=lambda *report: seen.append(report))
    assert model.fingerprint == fingerprint(tiny)
    assert model.path != source and model.path.name.startswith("staged--tiny-")
    assert seen[-1][1] == seen[-1][2]
    shutil.rmtree(source)
    assert resolve("org/any", weights=str(source)).path == model.path


def test_an_object_store_serves_weights(tiny: Path, s3: Callable[[], str]) -> None:
    uri = s3()
    upload(uri, tiny)
    open_store(uri).create("README.md", b"not needed")
    model = resolve("org/any", weights=uri)
    assert model.fingerprint == fingerprint(tiny)
    assert not (model.path / "README.md").exists()


def test_a_killed_staging_keeps_the_files_that_arrived(tiny: Path, tmp_path: Path, home: Path) -> None:
    source = Path(shutil.copytree(tiny, tmp_path / "tiny"))
    first = resolve("org/any", weights=str(source))
    partial = home / "models" / f".{first.path.name}.partial"
    first.path.rename(partial)
    (partial / "model.safetensors").rename(partial / "model.safetensors.part")
    stamp = (partial / "tokenizer.json").stat().st_mtime_ns
    again = resolve("org/any", weights=str(source))
    assert again.fingerprint == first.fingerprint
    assert (again.path / "tokenizer.json").stat().st_mtime_ns == stamp
    assert {path.name for path in again.path.iterdir()} == {path.name for path in tiny.iterdir()}


def test_a_staged_file_that_changed_is_found(tiny: Path) -> None:
    model = resolve("org/any", weights=str(tiny))
    (model.path / "generation_config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"generation_config\.json changed since"):
        resolve("org/any", weights=str(tiny))


def test_refusals(tmp_path: Path, tiny: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ModelError, match=f"there is no model at {empty}"):
        resolve("org/any", weights=str(empty))
    monkeypatch.setenv("SPILL_DISK_FLOOR_GB", "1000000")
    with pytest.raises(ModelError, match="not enough disk"):
        resolve("org/any", weights=str(tiny))
    assert not [path for path in (home / "models").iterdir() if path.name.startswith("staged")]
