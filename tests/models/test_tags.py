"""What a model is called, and what a name that is none gets to hear."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from spillover.errors import ModelError
from spillover.models import TAGS, parse


@pytest.mark.parametrize(
    ("spec", "kind", "base", "adapters"),
    [
        ("demo", "demo", "demo", ()),
        ("demo+banking", "demo", "demo", ("banking",)),
        ("qwen2.5:0.5b+a+b", "hub", "qwen2.5:0.5b", ("a", "b")),
        ("org/name", "hub", "org/name", ()),
        ("org/name@v1.0+x", "hub", "org/name@v1.0", ("x",)),
    ],
)
def test_names(spec, kind, base, adapters) -> None:
    ref = parse(spec)
    assert (ref.kind, ref.base, ref.adapters) == (kind, base, adapters)


def test_sources() -> None:
    assert parse("org/name@abc").source.revision == "abc"
    assert parse("org/name").source.revision is None
    assert parse("qwen2.5:0.5b").source.repo == "Qwen/Qwen2.5-0.5B-Instruct"


def test_folders_win_even_with_a_plus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org/name").mkdir(parents=True)
    (tmp_path / "a+b").mkdir()
    assert parse("org/name").kind == "folder"
    assert parse("org/other").kind == "hub"
    assert (parse("./a+b+c").base, parse("./a+b+c").adapters) == ("./a+b", ("c",))
    assert parse(str(tmp_path)).kind == "folder"


@pytest.mark.parametrize(
    ("spec", "message", "hint"),
    [
        ("qwen2.5:0.6b", "no model tag 'qwen2.5:0.6b'", "qwen2.5:0.5b"),
        ("dmeo", "no model tag 'dmeo'", "demo"),
        ("llama3.2", "no model tag", "llama3.2:1b"),
        ("zzz", "no model tag", "use demo"),
        ("", "no model tag ''", "use demo"),
        ("demo+", "empty adapter name", "demo+banking"),
        ("./nowhere/at/all", "folder ./nowhere/at/all does not exist", "ls"),
    ],
)
def test_refusals(spec, message, hint) -> None:
    with pytest.raises(ModelError, match=re.escape(message)) as caught:
        parse(spec)
    assert hint in str(caught.value.hint)


def test_pins_are_whole() -> None:
    for tag, source in TAGS.items():
        assert parse(tag).kind == "hub"
        assert source.revision is None or re.fullmatch("[0-9a-f]{40}", source.revision)
        assert all(re.fullmatch("[0-9a-f]{64}", sha256) and size for size, sha256 in source.files.values())
