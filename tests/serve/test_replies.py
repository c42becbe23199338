"""Text piece by piece, from tokens that are parts of characters."""

from __future__ import annotations

import pytest

from models.folders import write_tokenizer
from spillover.models import Tokenizer
from spillover.serve.replies import Speech


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(write_tokenizer(tmp_path_factory.mktemp("bytes"), corpus=["x"]))


def pieces(tokenizer: Tokenizer, ids: list[int], stop: tuple[str, ...] = ()) -> list[str]:
    speech = Speech(tokenizer, stop)
    return [*(speech.push(token) for token in ids), speech.end()]


@pytest.mark.parametrize("text", ["🙂🙃 東京", "👩‍👩‍👧‍👦 family", "Größe", "a🙂b", "🇫🇷🇮🇹"])
def test_characters_of_several_tokens_come_whole(tokenizer, text):
    ids = tokenizer.encode(text)
    assert len(ids) > len(text)  # every byte is a token
    shown = pieces(tokenizer, ids)
    assert "".join(shown) == text
    assert "\ufffd" not in "".join(shown)
    assert [len(piece) for piece in shown if piece] == [1] * len(text)


def test_what_the_limit_cuts_off_is_what_decoding_makes_of_it(tokenizer):
    ids = tokenizer.encode("ab🙂")[:-1]
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


def test_stop_strings_of_many_tokens(tokenizer):
    ids = tokenizer.encode("hello 🙂STOP")
    assert "".join(pieces(tokenizer, ids, ("🙂STOP",))) == "hello "
    assert "".join(pieces(tokenizer, ids[:-1], ("🙂STOP",))) == "hello 🙂STO"


def test_the_end_of_turn_says_nothing(tokenizer):
    (end,) = tokenizer.encode("<|im_end|>")
    assert pieces(tokenizer, [*tokenizer.encode("hi"), end])[-2:] == ["", ""]
