"""Rows of every shape, and the one line that each mistake gets."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data import shared
from spillover.errors import InputError
from spillover.jobs.data import Options, check_file, read_rows

TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)
USER = {"role": "user", "content": "hi"}
REPLY = {"role": "assistant", "content": "hello"}


def write(folder, *rows):
    """A file of rows: objects, or lines as text or bytes."""
    lines = [row if isinstance(row, bytes | str) else json.dumps(row) for row in rows]
    path = folder / "rows.jsonl"
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines))
    return path


def read(folder, *rows, purpose=None):
    return list(read_rows(write(folder, *rows), purpose))


def refused(folder, *rows, purpose=None) -> tuple[int, str, str | None]:
    """Line, message and hint of the error; the file is always named first."""
    path = write(folder, *rows)
    with pytest.raises(InputError) as caught:
        list(read_rows(path, purpose))
    with pytest.raises(InputError) as again:
        check_file(path, purpose)
    assert str(caught.value) == str(again.value)
    assert str(caught.value).startswith(f"{path}:") and "\n" not in str(caught.value)
    line, message = str(caught.value).removeprefix(f"{path}:").split(": ", 1)
    return int(line), message, caught.value.hint


def batch(**body):
    return {
        "custom_id": "a",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"messages": [USER]} | body,
    }


# Plain rows


def test_a_prompt_becomes_a_user_message(tmp_path):
    (row,) = read(tmp_path, {"prompt": "hi"})
    assert row.messages == [USER]
    assert (row.index, row.line, row.shape, row.id) == (0, 1, "plain", "row-000001")
    assert (row.tools, row.max_tokens, row.expected, row.options) == (None, None, None, Options())


def test_every_plain_key(tmp_path):
    full = {"prompt": "hi", "answer": "hello", "system": "Be kind.", "custom_id": "q", "max_tokens": 5}
    (row,) = read(tmp_path, full)
    assert row.messages == [{"role": "system", "content": "Be kind."}, USER]
    assert row.conversation == [*row.messages, REPLY]
    assert (row.id, row.max_tokens, row.expected) == ("q", 5, "hello")


@pytest.mark.parametrize("expected", ["a", ["a", "b"], {"k": 1}, 3, False])
def test_expected_is_any_json_value(tmp_path, expected):
    (row,) = read(tmp_path, {"prompt": "hi", "expected": expected}, purpose="eval")
    assert row.expected == expected


@given(st.lists(TEXT.filter(str.strip), min_size=1, max_size=5))
def test_prompts_come_back_as_written(tmp_path_factory, prompts):
    path = write(tmp_path_factory.getbasetemp(), *({"prompt": prompt} for prompt in prompts))
    assert [row.messages[0]["content"] for row in read_rows(path)] == prompts


@pytest.mark.parametrize(
    ("row", "message", "hint"),
    [
        ({"prompt": 3}, "prompt must be a string, not a number", None),
        ({"prompt": None}, "prompt must be a string, not null", None),
        ({"prompt": " \n"}, "prompt is empty", None),
        ({"prompt": "a", "system": []}, "system must be a string, not an array", None),
        ({"prompt": "a", "answer": {}}, "answer must be a string, not an object", None),
        (
            {"prompt": "a", "answer": "b", "expected": "b"},
            "a row has either 'answer' or 'expected', not both",
            None,
        ),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens must be from 1 to 2147483647", None),
        ({"prompt": "a", "max_tokens": 10**30}, "max_tokens must be from 1 to 2147483647", None),
        ({"prompt": "a", "max_tokens": 1.0}, "max_tokens must be a whole number, not 1.0", None),
        ({"prompt": "a", "max_tokens": "9"}, "max_tokens must be a whole number, not '9'", None),
        ({"prompt": "a", "max_tokens": True}, "max_tokens must be a whole number, not true", None),
        ({"prompt": "a", "custom_id": 7}, "custom_id must be a string, not a number", None),
        (
            {"prompt": "a", "custom_id": ""},
            "custom_id is empty",
            "leave it out to get row-000001, row-000002, ...",
        ),
        ({"prompt": "a", "expeted": "b"}, "unknown key 'expeted' in a plain row", "did you mean 'expected'?"),
        ({"prompt": "a", "label": "b"}, "unknown key 'label' in a plain row", "rename 'label' to 'expected'"),
        (
            {"prompt": "a", "zzz": "b"},
            "unknown key 'zzz' in a plain row",
            "known keys: prompt, expected, answer, system, custom_id, max_tokens, metric, schema",
        ),
        ({}, "the row has none of 'prompt', 'messages' and 'body'", None),
        (
            {"question": "a", "answer": "b"},
            "the row has none of 'prompt', 'messages' and 'body'",
            "rename 'question' to 'prompt'",
        ),
        (
            {"promt": "a"},
            "the row has none of 'prompt', 'messages' and 'body'",
            "did you mean 'prompt'?",
        ),
    ],
)
def test_mistakes_in_plain_rows(tmp_path, row, message, hint):
    found = refused(tmp_path, {"prompt": "fine"} if "prompt" in row else "", row)
    assert found == (2, message, hint)


# Chat rows


def test_a_chat_row_keeps_weights_tools_and_calls(tmp_path):
    tool = {"type": "function", "function": {"name": "lookup", "parameters": {"type": "object"}}}
    call = {"id": "c1", "type": "function", "function": {"name": "lookup", "arguments": '{"q": "x"}'}}
    messages = [
        {"role": "developer", "content": "Be kind."},
        USER,
        REPLY | {"weight": 0},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
        {"role": "tool", "content": "found", "tool_call_id": "c1"},
        REPLY | {"weight": 1},
    ]
    (row,) = read(tmp_path, {"messages": messages, "tools": [tool], "max_tokens": 3, "expected": "e"})
    assert [message["role"] for message in row.messages] == [
        "system",
        "user",
        "assistant",
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    assert row.messages[2]["weight"] == 0 and row.messages[6]["weight"] == 1
    assert row.messages[3]["content"] == "a\nb"
    assert row.messages[4]["tool_calls"][0]["function"]["arguments"] == {"q": "x"}
    assert row.messages[4].keys() == {"role", "tool_calls"}
    assert (row.tools, row.max_tokens, row.expected) == ([tool], 3, "e")
    assert row.conversation == row.messages


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("hi", "messages must be a list of messages, not a string"),
        ([], "messages is empty"),
        (["hi"], "messages[0] must be an object, not a string"),
        ([USER, {"content": "a"}], "messages[1].role is missing"),
        ([{"role": "bot", "content": "a"}], "messages[0].role is 'bot'"),
        ([{"role": ["user"], "content": "a"}], "messages[0].role must be a string, not an array"),
        ([{"role": "user"}], "messages[0].content is missing"),
        ([{"role": "assistant", "content": None}], "messages[0].content is missing"),
        (
            [{"role": "user", "content": 5}],
            "messages[0].content must be a string or a list of text parts, not a number",
        ),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            "messages[0].content[0] has the type 'image_url': only text is supported",
        ),
        (
            [{"role": "user", "content": [{"type": "text"}]}],
            "messages[0].content[0].text must be a string, not null",
        ),
        ([{"role": "user", "content": ["a"]}], "messages[0].content[0] must be an object with a type"),
        ([USER | {"weight": 1}], "messages[0].weight is only for assistant messages"),
        ([USER, REPLY | {"weight": 0.5}], "messages[1].weight must be 0 or 1"),
        ([USER, REPLY | {"weight": True}], "messages[1].weight must be 0 or 1"),
        ([USER, REPLY | {"wieght": 0}], "unknown key 'wieght' in messages[1]"),
        ([USER | {"tool_calls": []}], "messages[0].tool_calls is only for assistant messages"),
        ([USER, REPLY | {"tool_calls": []}], "messages[1].tool_calls is empty"),
        (
            [USER, REPLY | {"tool_calls": [{}]}],
            "messages[1].tool_calls[0] must be an object with a function",
        ),
        (
            [USER, REPLY | {"tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            "messages[1].tool_calls[0].function.arguments is not a JSON object:"
            " the JSON ends before it is complete",
        ),
    ],
)
def test_mistakes_in_messages(tmp_path, messages, message):
    assert refused(tmp_path, {"messages": [USER]}, "", {"messages": messages})[:2] == (3, message)


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ({"a": 1}, "tools must be a list of tools, not an object"),
        ([{"type": "function"}], "tools[0] must be an object with function.name"),
    ],
)
def test_mistakes_in_tools(tmp_path, tools, message):
    assert refused(tmp_path, {"messages": [USER], "tools": tools})[:2] == (1, message)


# Batch and distill rows


def test_a_batch_row_brings_its_decoding(tmp_path):
    body = {
        "model": "any",
        "max_completion_tokens": 7,
        "temperature": 1,
        "top_p": 0.9,
        "seed": -4,
        "stop": "END",
        "logprobs": True,
        "top_logprobs": 5,
        "n": 1,
        "stream": False,
        "user": None,
    }
    (row,) = read(tmp_path, batch(**body))
    assert (row.id, row.messages, row.max_tokens) == ("a", [USER], 7)
    assert row.options == Options(temperature=1.0, top_p=0.9, seed=-4, stop=("END",), logprobs=5)


def test_a_batch_row_that_says_nothing_decides_nothing(tmp_path):
    (row,) = read(tmp_path, {"body": {"messages": [USER], "logprobs": False, "stop": []}})
    assert (row.id, row.options, row.max_tokens) == ("row-000001", Options(), None)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"n": 2}, "body.n is not supported"),
        ({"stream": True}, "body.stream is not supported"),
        ({"frequency_penalty": 0.1}, "body.frequency_penalty is not supported"),
        ({"response_format": {"type": "json_object"}}, "body.response_format is not supported"),
        ({"tool_choice": "required"}, "body.tool_choice is not supported"),
        ({"temprature": 1}, "unknown key 'body.temprature' in the body"),
        ({"temperature": -1}, "body.temperature must be from 0 to 100"),
        ({"temperature": 10**400}, "body.temperature must be from 0 to 100"),
        ({"temperature": "hot"}, "body.temperature must be a number, not a string"),
        ({"top_p": 1.5}, "body.top_p must be from 0 to 1"),
        ({"top_p": 0}, "body.top_p must not be 0"),
        ({"min_p": 1.0}, "body.min_p must not be 1"),
        ({"seed": 2**63}, "body.seed must be from -9223372036854775808 to 9223372036854775807"),
        ({"stop": [""]}, "body.stop must be a string or a list of strings, none of them empty"),
        ({"logprobs": 3}, "body.logprobs must be true or false, not a number"),
        ({"logprobs": True, "top_logprobs": 65}, "body.top_logprobs must be from 0 to 64"),
        ({"top_logprobs": 3}, "body.top_logprobs needs body.logprobs to be true"),
        (
            {"max_tokens": 1, "max_completion_tokens": 2},
            "body.max_tokens and body.max_completion_tokens differ",
        ),
        ({"max_tokens": -1}, "body.max_tokens must be from 1 to 2147483647"),
        ({"messages": [{"role": "user"}]}, "body.messages[0].content is missing"),
        ({"messages": None}, "body.messages must be a list of messages, not null"),
    ],
)
def test_mistakes_in_a_batch_body(tmp_path, body, message):
    assert refused(tmp_path, batch(), "", batch(**body))[:2] == (3, message)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (batch() | {"method": "GET"}, "method must be 'POST', not 'GET'"),
        (batch() | {"url": "/v1/embeddings"}, "url must be '/v1/chat/completions', not '/v1/embeddings'"),
        (batch() | {"body": "x"}, "body must be an object"),
        ({"url": "/v1/chat/completions"}, "body must be an object"),
        ({"body": {}}, "body.messages is missing"),
        (batch() | {"prompt": "x"}, "unknown key 'prompt' in a batch row"),
    ],
)
def test_mistakes_in_a_batch_row(tmp_path, row, message):
    assert refused(tmp_path, row)[:2] == (1, message)


def test_a_distill_row_is_trained_on_with_its_completion(tmp_path):
    row = {
        "custom_id": "d",
        "messages": [USER],
        "completion": "hello",
        "completion_token_ids": [1, 2],
        "finish_reason": "stop",
        "teacher": {"model": "big"},
        "logprobs": [],
    }
    (found,) = read(tmp_path, row, purpose="train")
    assert found.shape == "distill"
    assert (found.messages, found.conversation) == ([USER], [USER, REPLY])
    assert refused(tmp_path, row | {"completion": None})[:2] == (1, "completion must be a string, not null")


# Files


def test_ids_are_generated_from_the_row_and_not_the_line(tmp_path):
    rows = read(tmp_path, {"prompt": "a"}, "", {"prompt": "b", "custom_id": "mine"}, "", {"prompt": "c"})
    assert [(row.index, row.line, row.id) for row in rows] == [
        (0, 1, "row-000001"),
        (1, 3, "mine"),
        (2, 5, "row-000003"),
    ]


@pytest.mark.parametrize(
    ("other", "shape"),
    [({"messages": [USER]}, "chat"), (batch(), "batch"), ({"messages": [], "completion": ""}, "distill")],
)
def test_the_first_row_of_another_shape_is_named(tmp_path, other, shape):
    found = refused(tmp_path, {"prompt": "a"}, {"prompt": "b", "expected": "c"}, "", other)
    assert found == (4, f"a {shape} row in a file of plain rows", "keep one shape of row a file")


@pytest.mark.parametrize("data", [b"", b"\n\n", b"\xef\xbb\xbf", b"\xef\xbb\xbf\r\n "])
def test_a_file_without_rows(tmp_path, data):
    assert refused(tmp_path, data)[:2] == (1, "the file has no rows")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"prompt": NaN}', "NaN at byte 12 is not a JSON number"),
        (b'{"prompt": Infinity}', "Infinity at byte 12 is not a JSON number"),
        (b'{"prompt": "a", "prompt": "b"}', "the key 'prompt' appears twice in one object"),
        (rb'{"prompt": "\ud83d"}', r"byte 13 of the line is a lone surrogate (\ud83d)"),
        (b'{"prompt": "a\0"}', "byte 14 of the line is a NUL byte"),
        (b'{"prompt": "\xff"}', "byte 13 of the line (0xff) is not valid UTF-8"),
        (b'{"prompt": "a\rb"}', "a bare carriage return in a string at byte 14"),
        (b'{"prompt": ' + b"[" * 100_000, "the JSON is nested more than 64 levels deep"),
        (b"42", "a row must be a JSON object, not a number"),
        (b'{"prompt": "a"', "the JSON ends before it is complete"),
        (b'"prompt"', "a row must be a JSON object, not a string"),
    ],
)
def test_hostile_lines_are_named_in_whatever_surroundings(tmp_path, line, message):
    good = b'\xef\xbb\xbf{"prompt": "fine"}\r\n\r\n{"prompt": "fine"}\r'
    assert refused(tmp_path, good, line, b'{"prompt": "after"}')[:2] == (4, message)


def test_harmless_oddities_are_read(tmp_path):
    odd = rb'{"prompt": "\ud83d\ude00 \u0000 \u2028"}' + b"\r"
    big = b'{"prompt": "a", "expected": 123456789012345678901234567890}'
    rows = read(tmp_path, b"\xef\xbb\xbf" + odd, b" \t", big, b"", b"\r\n")
    assert rows[0].messages[0]["content"] == "😀 \0 \u2028"
    assert rows[1].expected == 123456789012345678901234567890


def test_a_line_of_50_megabytes(tmp_path):
    rows = read(tmp_path, {"prompt": "x" * 50_000_000}, {"prompt": "b"})
    assert [len(row.messages[0]["content"]) for row in rows] == [50_000_000, 1]


def test_reading_starts_anywhere(tmp_path):
    path = write(tmp_path, *(part for i in range(20) for part in ({"prompt": str(i)}, "")))
    everything = list(read_rows(path))
    for start in range(21):
        assert list(read_rows(path, start=start)) == everything[start:]


def test_reading_from_the_middle_still_knows_the_shape_of_the_file(tmp_path):
    path = write(tmp_path, {"prompt": "a"}, {"messages": [USER]})
    with pytest.raises(InputError, match=":2: a chat row in a file of plain rows"):
        list(read_rows(path, start=1))


def test_a_file_that_changed_since_the_check_is_not_read(tmp_path):
    path = write(tmp_path, {"prompt": "a"})
    stamp = check_file(path).stamp
    assert len(list(read_rows(path, stamp=stamp))) == 1
    write(tmp_path, {"prompt": "a!"})
    with pytest.raises(InputError, match="has changed since it was checked"):
        list(read_rows(path, stamp=stamp))


# What a row is for


@pytest.mark.parametrize(
    ("purpose", "row", "message"),
    [
        (
            "prompt",
            {"messages": [USER, REPLY]},
            "the last message is not the user's: there is nothing to answer",
        ),
        ("eval", {"messages": [USER]}, "there is nothing to compare the answer with"),
        ("eval", {"prompt": "a", "expected": None}, "there is nothing to compare the answer with"),
        ("train", {"prompt": "a"}, "there is no reply to learn"),
        ("train", {"prompt": "a", "expected": ["b"]}, "'expected' must be a string to train on it"),
        ("train", {"messages": [USER]}, "there is no reply to learn"),
        (
            "train",
            {"messages": [REPLY]},
            "the first message after the system's is the assistant's, not the user's",
        ),
        (
            "train",
            {"messages": [USER, REPLY | {"weight": 0}]},
            "every assistant message has weight 0: there is nothing to learn",
        ),
        ("train", {"messages": [{"role": "system", "content": "a"}]}, "there is no reply to learn"),
    ],
)
def test_rows_that_do_not_serve_the_purpose(tmp_path, purpose, row, message):
    assert refused(tmp_path, "", row, purpose=purpose)[:2] == (2, message)
    assert purpose not in check_file(write(tmp_path, row)).fits


# Anything at all

LINES = st.lists(
    st.one_of(
        st.binary(max_size=30),
        st.sampled_from(
            [
                b'{"prompt": "a"}',
                b'{"messages": [{"role": "user", "content": "a"}]}',
                b'{"body": {"messages": []}}',
                b"\xef\xbb\xbf",
                b"\xff\xfe",
                b"",
                b"\r",
            ]
        ),
        st.dictionaries(
            st.sampled_from(
                ["prompt", "messages", "body", "custom_id", "tools", "expected", "completion", "x"]
            ),
            st.recursive(
                st.none() | st.booleans() | st.integers() | st.text(st.characters(exclude_categories=["Cs"])),
                lambda inner: (
                    st.lists(inner, max_size=3)
                    | st.dictionaries(
                        st.sampled_from(
                            ["role", "content", "weight", "tool_calls", "function", "messages", "n"]
                        ),
                        inner | st.sampled_from(["user", "assistant", "tool"]),
                    )
                ),
                max_leaves=8,
            ),
        ).map(lambda row: json.dumps(row).encode()),
    ),
    max_size=6,
)


@given(LINES, st.sampled_from([None, "prompt", "train", "eval"]))
def test_any_file_is_read_or_refused_in_one_line(tmp_path_factory, lines, purpose):
    path = write(tmp_path_factory.getbasetemp(), *lines)
    try:
        summary = check_file(path, purpose)
    except InputError as error:
        assert str(error).startswith(f"{path}:") and "\n" not in str(error)
    else:
        assert summary.rows == len(list(read_rows(path, purpose)))


def test_real_rows(tmp_path):
    lines = shared("gsm8k", "test.jsonl").read_text().splitlines()
    path = shared("gsm8k", "test.jsonl")
    with pytest.raises(InputError) as caught:
        list(read_rows(path))
    assert caught.value.hint == "rename 'question' to 'prompt'"
    renamed = [{"prompt": row["question"], "answer": row["answer"]} for row in map(json.loads, lines)]
    rows = read(tmp_path, *renamed, purpose="train")
    assert [row.conversation[-1]["content"] for row in rows] == [row["answer"] for row in renamed]


def test_a_row_says_how_it_is_scored(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": "a", "metric": "f1"}, {"prompt": "b", "schema": {"type": "object"}}, {"prompt": "c"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = [(row.metric, row.schema) for row in read_rows(path)]
    assert found == [("f1", None), (None, {"type": "object"}), (None, None)]
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "a"}], "metric": "f1"}) + "\n")
    assert [row.metric for row in read_rows(path, "eval")] == ["f1"]  # it needs nothing to compare with


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "a", "metric": 3}, "1: metric must be a string"),
        ({"prompt": "a", "schema": []}, "1: schema must be an object, not an array"),
    ],
)
def test_a_row_that_says_it_wrongly_is_refused(tmp_path, row, words):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(InputError, match=words):
        list(read_rows(path))
