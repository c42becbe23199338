"""Strict JSON objects from lines of bytes.

msgspec decodes, and already refuses what RFC 8259 does: NaN and Infinity, unescaped control characters,
lone surrogates, invalid UTF-8. Two more things are refused here, because what follows would silently
differ from what was written: duplicate keys (a decoder keeps the last one) and nesting deeper than any
row needs.
"""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

import msgspec

DEPTH_LIMIT = 64

_decode = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode

_ESCAPE = re.compile(rb"\\(?:u([0-9a-fA-F]{4})|.)", re.DOTALL)
_PLACE = re.compile(r"^JSON is malformed: (.*) \(byte (\d+)\)$", re.DOTALL)
_NOT_JSON = (b"NaN", b"Infinity")


class Fault(Exception):
    """What is wrong with one row, not yet knowing the file and line; `spillover.jobs.data.rows` adds them."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


def parse_object(data: bytes) -> dict[str, Any]:
    """Decode one JSON object.

    Whole numbers have any size up to Python's limit of digits. Raises `Fault` for anything that is not
    exactly one JSON object without duplicate keys, nested at most `DEPTH_LIMIT` deep.
    """
    try:
        value = _decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise _explained(data, error) from None
    # Brackets bound the depth from above, and nearly every row has too few of them to need the walk.
    if data.count(b"{") + data.count(b"[") > DEPTH_LIMIT:
        _refuse_depth(value, DEPTH_LIMIT)
    if type(value) is not dict:
        raise Fault(f"a row must be a JSON object, not {kind(value)}", hint=_array_hint(data))
    if _may_repeat_keys(data, value):
        json.loads(data, object_pairs_hook=_refuse_repeats)
    return value


def kind(value: object) -> str:
    """The JSON type of a decoded value, with its article: ``a string``, ``null``."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return "a number"
    if isinstance(value, str):
        return "a string"
    return "an array" if isinstance(value, list) else "an object"


def quoted(text: str) -> str:
    """A key or value of the user's, short and printable enough to stand in a one-line message."""
    return repr(text if len(text) <= 60 else text[:57] + "...")


def _may_repeat_keys(data: bytes, value: dict[str, Any]) -> bool:
    """Whether a key may occur twice in one object: exact unless the line escapes a colon.

    Outside strings a colon follows each key, and encoding the decoded value keeps every colon inside a
    string. A dropped duplicate therefore shows as a colon fewer. Both counts run at memory speed; the exact
    pass takes ten times as long as decoding.
    """
    if b"\\u003a" in data or b"\\u003A" in data:
        return True
    return data.count(b":") != _encode(value).count(b":")


def _refuse_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise Fault(f"the key {quoted(key)} appears twice in one object", hint="remove one of them")
            seen.add(key)
    return found


def _refuse_depth(value: object, left: int) -> None:
    if not isinstance(value, dict | list):
        return
    if left == 0:
        _too_deep()
    for item in value.values() if isinstance(value, dict) else value:
        _refuse_depth(item, left - 1)


def _too_deep() -> NoReturn:
    raise Fault(f"the JSON is nested more than {DEPTH_LIMIT} levels deep", hint="flatten the row")


def _explained(data: bytes, error: Exception) -> Fault:
    """A `Fault` that says what is wrong in the user's terms; only runs for a line that is refused."""
    if isinstance(error, RecursionError):
        return Fault(f"the JSON is nested more than {DEPTH_LIMIT} levels deep", hint="flatten the row")
    return _encoding_fault(data) or _surrogate_fault(data) or _syntax_fault(data, str(error))


def _encoding_fault(data: bytes) -> Fault | None:
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return Fault(
            f"byte {error.start + 1} of the line (0x{data[error.start]:02x}) is not valid UTF-8",
            hint="iconv -f WINDOWS-1252 -t UTF-8 FILE > utf8.jsonl, if that is its encoding",
        )
    if (nul := data.find(0)) >= 0:
        return Fault(
            f"byte {nul + 1} of the line is a NUL byte",
            hint=r"write it as \u0000 inside a string, or remove it: tr -d '\000' < FILE > clean.jsonl",
        )
    if data.startswith(b"\xef\xbb\xbf"):
        return Fault("a byte order mark in the middle of the file", hint="remove it; were two files joined?")
    return None


def _surrogate_fault(data: bytes) -> Fault | None:
    """The first escaped half of a surrogate pair (RFC 8259, section 7) that lacks its other half."""
    high_end = -1
    lone: int | None = None
    for escape in _ESCAPE.finditer(data):
        code = int(escape[1], 16) if escape[1] else 0
        if 0xDC00 <= code < 0xE000 and escape.start() == high_end:
            lone, high_end = None, -1
            continue
        if lone is not None:
            break
        if 0xD800 <= code < 0xE000:
            lone = escape.start()
            if code >= 0xDC00:
                break
            high_end = escape.end()
    if lone is None:
        return None
    return Fault(
        f"byte {lone + 1} of the line is a lone surrogate ({data[lone : lone + 6].decode()})",
        hint="write the whole pair or the character itself",
    )


def _syntax_fault(data: bytes, message: str) -> Fault:
    place = _PLACE.match(message)
    if place is None:
        if "truncated" in message:
            return Fault("the JSON ends before it is complete", hint=_array_hint(data) or "one object a line")
        return Fault(f"not valid JSON: {message.split(' - at')[0].lower()}")
    what, at = place[1], int(place[2])
    for name in _NOT_JSON:
        if data.startswith(name, at):
            return Fault(
                f"{name.decode()} at byte {at + 1} is not a JSON number", hint="use null or a string"
            )
    if data[at : at + 1] == b"\r":
        return Fault(f"a bare carriage return in a string at byte {at + 1}", hint=r"write it as \r")
    if what == "trailing characters":
        return _trailing_fault(data, at - 1)  # msgspec has already passed the byte
    return Fault(f"not valid JSON: {what} at byte {at + 1}", hint=_array_hint(data))


def _trailing_fault(data: bytes, at: int) -> Fault:
    if b"\r" in data[:at]:  # the classic Mac line end, which no JSONL reader splits at
        return Fault(
            f"more than one JSON value, parted by carriage returns, at byte {at + 1}",
            hint=r"tr '\r' '\n' < FILE > lines.jsonl",
        )
    return Fault(f"text after the JSON value at byte {at + 1}", hint="one JSON object a line")


def _array_hint(data: bytes) -> str | None:
    return "jq -c '.[]' FILE > rows.jsonl, if it is a JSON array" if data.lstrip().startswith(b"[") else None
