"""A folder appears complete or not at all, and a disk that refuses is one line."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from spillover.errors import ModelError
from spillover.models.folders import home, publish, replace


def test_home_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPILL_HOME", str(tmp_path / "x"))
    assert home() == tmp_path / "x"
    monkeypatch.delenv("SPILL_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert home() == tmp_path / ".spillover"


def test_publish_builds_once_and_continues_an_attempt(tmp_path: Path) -> None:
    final = tmp_path / "deep" / "final"

    def killed(partial: Path) -> None:
        (partial / "first").write_text("1")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        publish(final, killed)
    assert not final.exists()
    publish(final, lambda partial: (partial / "second").write_text((partial / "first").read_text()))
    assert {path.name for path in final.iterdir()} == {"first", "second"}
    publish(final, lambda partial: pytest.fail("built again"))


@pytest.mark.parametrize("swap", [True, False], ids=["one call", "two renames"])
def test_replace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, swap: bool) -> None:
    if not swap:
        monkeypatch.setattr("spillover.models.folders._swap", lambda first, second: False)
    final = tmp_path / "final"
    for text in ("old", "new"):
        new = tmp_path / "next"
        new.mkdir()
        (new / text).write_text(text)
        replace(new, final)
    assert [path.name for path in final.iterdir()] == ["new"]
    assert [path.name for path in tmp_path.iterdir()] == ["final"]


def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    def full(partial: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(ModelError, match="final cannot be written: no space left on device") as caught:
        publish(tmp_path / "final", full)
    assert "SPILL_HOME" in str(caught.value.hint)
