"""The fingerprint is content: it ignores where and when, and sees every byte that counts."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

import pytest

from spillover.models import resolve
from spillover.models.fingerprint import fingerprint, hash_files


@pytest.fixture
def folder(tiny: Path, tmp_path: Path, home: Path) -> Path:
    return Path(shutil.copytree(tiny, tmp_path / "model"))


def test_is_the_documented_formula(folder: Path) -> None:
    names = [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    text = ""
    for name in names:
        data = (folder / name).read_bytes()
        text += f"{name}\0{len(data)}\0{hashlib.sha256(data).hexdigest()}\n"
    assert fingerprint(folder) == hashlib.sha256(text.encode()).hexdigest()
    assert resolve(str(folder)).fingerprint == fingerprint(folder)


def test_copies_agree_and_other_files_do_not_count(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    (copy / "README.md").write_text("hello")
    (copy / "consolidated.safetensors").write_text("the same weights again")
    os.utime(copy / "config.json", (1, 1))
    assert fingerprint(copy) == fingerprint(folder)


def test_one_changed_weight_byte_shows_although_size_and_header_are_equal(folder: Path) -> None:
    before = fingerprint(folder)
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert fingerprint(folder) != before


def test_an_unchanged_file_is_read_once(folder: Path) -> None:
    read: list[int] = []
    fingerprint(folder, lambda what, done, total: read.append(done))
    assert read
    read.clear()
    fingerprint(folder, lambda what, done, total: read.append(done))
    assert not read
    (folder / "config.json").rename(folder / "aside")
    (folder / "aside").rename(folder / "config.json")
    fingerprint(folder, lambda what, done, total: read.append(done))
    assert not read, "a renamed file keeps its hash"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"x": 1}', '{"x": "short"}', "\x00" * 100])
def test_a_damaged_cache_is_forgotten(folder: Path, home: Path, text: str) -> None:
    before = fingerprint(folder)
    cache = home / "models" / ".hashes.json"
    assert cache.exists()
    cache.write_text(text)
    assert fingerprint(folder) == before
    assert len(hash_files([folder / "config.json"])) == 1
