"""Training files as tokens: whose tokens count, what is dropped, and that a reply is never cut."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from spillover.errors import InputError, ModelError
from spillover.jobs.data import TrainingSet, check_file
from spillover.models import Tokenizer

TEMPLATE = (
    "{% for m in messages %}{% if m.content == 'refuse me' %}{{ raise_exception('no') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SYSTEM = {"role": "system", "content": "Be kind."}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    """One token a byte, and ChatML: lengths can be counted by hand."""
    folder = tmp_path_factory.mktemp("tokenizer")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    inner = tokenizers.Tokenizer(tokenizers.models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    inner.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    inner.save(str(folder / "tokenizer.json"))
    config = {"chat_template": TEMPLATE, "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer(folder)


def write(folder, *rows):
    path = folder / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def build(folder, tokenizer, max_seq, *rows) -> TrainingSet:
    return TrainingSet.build(write(folder, *rows), tokenizer, max_seq, folder / "cache")


def turn(user: str, reply: str, **extra) -> list[dict]:
    return [{"role": "user", "content": user}, {"role": "assistant", "content": reply} | extra]


def decoded(tokenizer, examples, index) -> list[str]:
    """The parts of an example that the loss covers, as text without the end-of-turn token."""
    one = examples.example(index)
    tokens, mask = one.tokens, one.mask
    assert tokens.shape == mask.shape and tokens.dtype == np.int32 and mask.dtype == np.bool_
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(int), [0]])))
    parts = [tokens[start:stop] for start, stop in edges.reshape(-1, 2)]
    assert all(part[-1] == tokenizer.end_of_turn for part in parts)
    return [tokenizer.decode(part.tolist()) for part in parts]


def length(tokenizer, *messages) -> int:
    return len(tokenizer.training(list(messages))[0])


def test_examples_are_what_the_tokenizer_gives(tmp_path, tokenizer):
    rows = [{"prompt": f"q{i}", "answer": f"a{i}", "system": "s"} for i in range(50)]
    with build(tmp_path, tokenizer, 100, *rows) as examples:
        assert len(examples) == 50 and examples.rows.tolist() == list(range(50))
        for i in range(50):
            messages = [{"role": "system", "content": "s"}, *turn(f"q{i}", f"a{i}")]
            tokens, mask = tokenizer.training(messages)
            assert examples.example(i).tokens.tolist() == tokens
            assert examples.example(i).mask.tolist() == mask
            assert examples.lengths[i] == len(tokens)
        assert examples.tokens == examples.lengths.sum()
        assert examples.targets == sum(examples.example(i).mask.sum() for i in range(50))
        assert examples.notes() == []


def test_replies_of_weight_0_stay_as_context(tmp_path, tokenizer):
    messages = [*turn("a", "first", weight=0), *turn("b", "second", weight=1), *turn("c", "third")]
    with build(tmp_path, tokenizer, 1000, {"messages": messages}) as examples:
        assert decoded(tokenizer, examples, 0) == ["second", "third"]


def test_long_conversations_lose_whole_early_exchanges(tmp_path, tokenizer):
    turns = [turn(f"question {i}", f"answer {i}") for i in range(10)]
    messages = [SYSTEM, *(message for each in turns for message in each)]
    kept = [SYSTEM, *(message for each in turns[6:] for message in each)]
    limit = length(tokenizer, *kept)
    for max_seq in (limit, limit + 1):
        with build(tmp_path, tokenizer, max_seq, {"messages": messages}) as examples:
            assert examples.example(0).tokens.tolist() == tokenizer.training(kept)[0]
            assert (examples.shortened, examples.dropped, examples.skipped) == (1, 6, 0)
            assert examples.notes() == [f"1 of 1 examples lost 6 early exchanges to fit {max_seq:,} tokens"]


def test_an_exchange_that_is_too_long_alone_is_skipped(tmp_path, tokenizer):
    rows = [
        {"messages": turn("q", "a")},
        {"messages": [*turn("q", "a"), *turn("q", "a" * 50)]},
        {"messages": [*turn("q", "a"), *turn("q", "a", weight=0), *turn("q" * 20, "a", weight=0)]},
        {"messages": turn("q", "b")},
    ]
    with build(tmp_path, tokenizer, 50, *rows) as examples:
        assert examples.rows.tolist() == [0, 3]
        assert decoded(tokenizer, examples, 1) == ["b"]
        assert (examples.skipped, examples.shortened, examples.dropped) == (2, 0, 0)
        assert examples.notes() == ["2 rows skipped: nothing to learn fits 50 tokens"]


def test_tool_results_stay_with_the_exchange_that_asked(tmp_path, tokenizer):
    exchange = [
        {"role": "user", "content": "one"},
        {"role": "user", "content": "more"},
        {"role": "assistant", "content": "calls"},
        {"role": "tool", "content": "result"},
        {"role": "assistant", "content": "done"},
    ]
    limit = length(tokenizer, *exchange)
    with build(tmp_path, tokenizer, limit, {"messages": [*turn("q", "a"), *exchange]}) as examples:
        assert examples.example(0).tokens.tolist() == tokenizer.training(exchange)[0]
        assert decoded(tokenizer, examples, 0) == ["calls", "done"]
    with build(
        tmp_path, tokenizer, limit - 1, {"messages": turn("q", "a")}, {"messages": exchange}
    ) as examples:
        assert examples.skipped == 1


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=8), st.integers(40, 200)
)
def test_every_kept_reply_is_whole(tmp_path_factory, tokenizer, sizes, max_seq):
    turns = [turn("q" * question, f"{i}" * answer) for i, (question, answer) in enumerate(sizes)]
    row = {"messages": [SYSTEM, *(message for each in turns for message in each)]}
    try:
        examples = build(tmp_path_factory.getbasetemp(), tokenizer, max_seq, row)
    except InputError:
        assert length(tokenizer, SYSTEM, *turns[-1]) > max_seq
        return
    with examples:
        replies = decoded(tokenizer, examples, 0)
        assert replies == [each[1]["content"] for each in turns[-len(replies) :]]
        assert examples.lengths[0] <= max_seq
        assert examples.dropped == len(turns) - len(replies)
        if examples.dropped:  # one exchange more would not have fitted
            more = turns[-len(replies) - 1 :]
            assert length(tokenizer, SYSTEM, *(message for each in more for message in each)) > max_seq


def test_nothing_that_fits_is_an_error_with_the_flag(tmp_path, tokenizer):
    path = write(tmp_path, {"prompt": "q", "answer": "a" * 100})
    with pytest.raises(InputError) as caught:
        TrainingSet.build(path, tokenizer, 64, tmp_path)
    assert str(caught.value) == f"{path}: no row fits 64 tokens"
    assert caught.value.hint == "--max-seq 128"


def test_a_row_that_the_template_refuses_is_named(tmp_path, tokenizer):
    path = write(tmp_path, {"prompt": "q", "answer": "a"}, {"prompt": "refuse me", "answer": "a"})
    with pytest.raises(ModelError) as caught:
        TrainingSet.build(path, tokenizer, 64, tmp_path)
    assert str(caught.value).startswith(f"{path}:2: ")


def test_rows_that_cannot_be_trained_on_are_refused(tmp_path, tokenizer):
    path = write(tmp_path, {"prompt": "q", "answer": "a"}, {"prompt": "q"})
    with pytest.raises(InputError, match=r":2: there is no reply to learn"):
        TrainingSet.build(path, tokenizer, 64, tmp_path)


def test_progress_is_told_and_may_stop(tmp_path, tokenizer):
    path = write(tmp_path, *({"prompt": "q", "answer": "a"} for _ in range(5)))
    seen: list[int] = []

    def progress(done: int) -> None:
        seen.append(done)
        if done == 3:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        TrainingSet.build(path, tokenizer, 64, tmp_path, progress=progress)
    assert seen == [1, 2, 3]


def test_a_changed_file_is_refused_and_nothing_is_left_behind(tmp_path, tokenizer):
    path = write(tmp_path, {"prompt": "q", "answer": "a"})
    stamp = check_file(path).stamp
    with TrainingSet.build(path, tokenizer, 64, tmp_path / "cache", stamp=stamp):
        pass
    path.write_text(path.read_text() + "\n")
    with pytest.raises(InputError, match="has changed since it was checked"):
        TrainingSet.build(path, tokenizer, 64, tmp_path / "cache", stamp=stamp)
    assert list((tmp_path / "cache").iterdir()) == []


FULL = """
import resource, sys
from pathlib import Path
from spillover.errors import StoreFull
from spillover.jobs.data import TrainingSet
from spillover.models import Tokenizer
folder, path = map(Path, sys.argv[1:])
import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
tokenizer = Tokenizer(folder)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
try:
    TrainingSet.build(path, tokenizer, 4096, path.parent)
except StoreFull as error:
    print(error)
"""


def test_no_room_for_the_tokens_is_one_line(tmp_path, tokenizer):
    path = write(tmp_path, *({"prompt": "q" * 1000, "answer": "a"} for _ in range(20)))
    folder = tokenizer.chat.source
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", FULL, folder, path], capture_output=True, text=True, check=True
    )
    reason = os.strerror(errno.EFBIG)
    assert done.stdout == f"{tmp_path}: no room for the tokenized rows: {reason}\n"
    assert done.stderr == ""
