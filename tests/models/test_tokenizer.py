"""Decoding token by token gives the text of the whole and never half a character."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.folders import write_tokenizer
from spillover.errors import ModelError
from spillover.models import StreamDecoder, Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def pieces(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    stream = StreamDecoder(tokenizer)
    return [*(stream.push(token) for token in ids), stream.flush()]


@given(st.text())
def test_text_survives(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    parts = pieces(tokenizer, ids)
    assert "".join(parts) == tokenizer.decode(ids)
    if not any(special in text for special in ("<|", "</s>", "INST")):
        assert tokenizer.decode(ids) == text
    if "\ufffd" not in text:
        assert "\ufffd" not in "".join(parts)


@settings(max_examples=300)
@given(st.lists(st.integers(0, 408), max_size=40))
def test_any_tokens_stream_to_the_text_of_the_whole(tokenizer: Tokenizer, ids: list[int]) -> None:
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


def test_a_character_comes_out_whole(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("🦜!")
    assert len(ids) > 2, "several tokens make the character"
    parts = pieces(tokenizer, ids)
    assert [part for part in parts if part] == ["🦜", "!"]


def test_flush_ends_a_cut_character_and_starts_anew(tokenizer: Tokenizer) -> None:
    stream = StreamDecoder(tokenizer)
    assert stream.push(tokenizer.encode("🦜")[0]) == ""
    assert stream.flush() == "\ufffd"
    assert stream.push(tokenizer.encode("a")[0]) == "a"


def test_stop_ids_join_config_tokenizer_and_template(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path, eos_token="</s>")
    tokenizer = Tokenizer(folder, eos_ids=(7,))
    ids = {text: tokenizer.encode(text)[0] for text in ("</s>", "<|im_end|>")}
    assert tokenizer.stop_ids == {7, ids["</s>"], ids["<|im_end|>"]}
    assert Tokenizer(write_tokenizer(tmp_path / "base", None)).stop_ids == {ids["<|im_end|>"]}


def test_missing_and_damaged_files(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json is missing"):
        Tokenizer(tmp_path)
    write_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": 1}')
    with pytest.raises(ModelError, match=r"tokenizer\.json is damaged"):
        Tokenizer(tmp_path)
