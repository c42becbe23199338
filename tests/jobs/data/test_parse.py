"""Strict JSON: what is refused, and that nothing else differs from Python's own reader."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spillover.jobs.data.parse import DEPTH_LIMIT, Fault, parse_object

TEXT = st.text(st.characters(exclude_categories=["Cs"]))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=20,
)


def fault(data: bytes) -> str:
    with pytest.raises(Fault) as caught:
        parse_object(data)
    return caught.value.message


@given(st.dictionaries(TEXT, VALUES), st.booleans())
def test_any_json_object_comes_back(value, escaped):
    assert parse_object(json.dumps(value, ensure_ascii=escaped).encode()) == value


@given(st.binary(max_size=60))
def test_random_bytes_are_an_object_or_a_fault(data):
    try:
        value = parse_object(data)
    except Fault:
        return
    assert value == json.loads(data)


JSON_BYTES = st.lists(
    st.sampled_from(
        [b"{", b"}", b"[", b"]", b":", b",", b'"a"', b'"b"', b'"\\u003a"', b"1", b" ", b"\r", b'":"']
    ),
    max_size=14,
).map(b"".join)


def _strict(pairs):
    if len(dict(pairs)) < len(pairs):
        raise ValueError("duplicate key")
    return dict(pairs)


@given(JSON_BYTES)
def test_acceptance_is_that_of_an_exact_reader(data):
    try:
        expected = json.loads(data, object_pairs_hook=_strict)
    except ValueError:
        expected = None
    if isinstance(expected, dict):
        assert parse_object(data) == expected
    else:
        with pytest.raises(Fault):
            parse_object(data)


@pytest.mark.parametrize(
    ("data", "key"),
    [
        (rb'{"a": 1, "a": 1}', "'a'"),
        (rb'{"x": [{"a": {"k": 1, "k": 2}}]}', "'k'"),
        (rb'{"a": "::", "b": 1, "a": "::::"}', "'a'"),
        (rb'{"a:": 1, "a\u003a": 2}', "'a:'"),
        (rb'{"a": "\u003A\u003a", "b": 1, "b": 2}', "'b'"),
        (rb'{"a": 1, "a": "\u003a"}', "'a'"),
        (rb'{"a": 1, "a": "\u003A"}', "'a'"),
        (rb'{"": 1, "": 2}', "''"),
        (rb'{"caf\u00e9": 1, "caf' + "é".encode() + b'": 2}', "'café'"),
    ],
)
def test_a_duplicate_key_is_named(data, key):
    assert fault(data) == f"the key {key} appears twice in one object"


def test_the_same_key_in_different_objects_is_fine():
    assert parse_object(b'{"a": {"a": [{"a": ":"}, {"a": "\\u003a"}]}}')["a"]["a"][1] == {"a": ":"}


@pytest.mark.parametrize(("name", "at"), [("NaN", 7), ("Infinity", 7), ("-Infinity", 8)])
def test_numbers_that_json_lacks(name, at):
    message = f"{name.removeprefix('-')} at byte {at} is not a JSON number"
    assert fault(f'{{"a": {name}}}'.encode()) == message


def test_a_number_too_large_for_a_float():
    assert fault(b'{"a": 1e999}') == "not valid JSON: number out of range"


def test_whole_numbers_keep_every_digit():
    assert parse_object(b'{"a": 123456789012345678901234567890}') == {"a": 123456789012345678901234567890}
    assert fault(b'{"a": ' + b"1" * 5000 + b"}") == "not valid JSON: integer value out of range"


@pytest.mark.parametrize(
    ("text", "at", "escape"),
    [
        (r"\ud800", 8, r"\ud800"),
        (r"\udc00", 8, r"\udc00"),
        (r"x\uD83D", 9, r"\uD83D"),
        (r"\ud83d\ud83d\ude00", 8, r"\ud83d"),
        (r"\ud83d\ude00\ude00", 20, r"\ude00"),
        (r"\ud83d \ude00", 8, r"\ud83d"),
        (r"\\\ud800", 10, r"\ud800"),
    ],
)
def test_a_lone_surrogate_is_placed(text, at, escape):
    assert fault(f'{{"a": "{text}"}}'.encode()) == f"byte {at} of the line is a lone surrogate ({escape})"


def test_emoji_and_pairs_are_text():
    assert parse_object(rb'{"a": "\ud83d\ude00"}') == parse_object('{"a": "😀"}'.encode()) == {"a": "😀"}
    assert parse_object(rb'{"a": "\\ud800"}') == {"a": r"\ud800"}


@pytest.mark.parametrize(
    ("data", "at", "byte"),
    [(b'{"a": "caf\xe9"}', 11, "e9"), (b'{"a": "\xed\xa0\x80"}', 8, "ed"), (b'{"\xff": 1}', 3, "ff")],
)
def test_bytes_that_are_not_utf8_are_placed(data, at, byte):
    assert fault(data) == f"byte {at} of the line (0x{byte}) is not valid UTF-8"


def test_nul():
    assert fault(b'{"a": "\0"}') == "byte 8 of the line is a NUL byte"
    assert fault(b'{"a": 1}\0') == "byte 9 of the line is a NUL byte"
    assert parse_object(rb'{"a": "\u0000"}') == {"a": "\0"}


def test_carriage_returns():
    assert parse_object(b'{"a":\r1}\r\n') == {"a": 1}
    assert fault(b'{"a": "x\ry"}') == "a bare carriage return in a string at byte 9"
    assert fault(b'{"a": 1}\r{"a": 2}') == "more than one JSON value, parted by carriage returns, at byte 10"


@pytest.mark.parametrize("opening", [b"[", b'{"a":'])
@pytest.mark.parametrize("depth", [DEPTH_LIMIT + 1, 1000, 1_000_000])
def test_deep_nesting_is_refused_at_any_depth(opening, depth):
    closing = {b"[": b"]"}.get(opening, b"}")
    data = opening * depth + b"1" + closing * depth
    assert fault(data) == "the JSON is nested more than 64 levels deep"
    assert fault(opening * depth) in (
        "the JSON is nested more than 64 levels deep",
        "the JSON ends before it is complete",
    )


def test_nesting_up_to_the_limit_and_any_width():
    assert parse_object(b'{"a":' * DEPTH_LIMIT + b"1" + b"}" * DEPTH_LIMIT)
    assert len(parse_object(b'{"a":[' + b",".join([b"{}"] * 1000) + b"]}")["a"]) == 1000


@pytest.mark.parametrize(
    ("data", "what"),
    [(b"3", "a number"), (b'"a"', "a string"), (b"null", "null"), (b"true", "true"), (b"[]", "an array")],
)
def test_a_row_is_an_object(data, what):
    assert fault(data) == f"a row must be a JSON object, not {what}"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'{"a": 1', "the JSON ends before it is complete"),
        (b'{"a": 1} {"b": 2}', "text after the JSON value at byte 10"),
        (b'{"a": 1,}', "not valid JSON: trailing comma in object at byte 9"),
        (b"{'a': 1}", "not valid JSON: object keys must be strings at byte 2"),
        (b'{"a": "\t"}', "not valid JSON: invalid character at byte 8"),
        (b'{"a": 1}x', "text after the JSON value at byte 9"),
        (b'\xef\xbb\xbf{"a": 1}', "a byte order mark in the middle of the file"),
    ],
)
def test_other_mistakes_say_where(data, message):
    assert fault(data) == message
