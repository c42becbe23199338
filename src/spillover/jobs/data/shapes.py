"""The shapes that a row may have, and what each of them becomes.

==========  ==========================================================================================
plain       ``{prompt}``, ``{prompt, expected}`` or ``{prompt, answer}``; ``system`` goes first
chat        ``{messages}`` as for OpenAI fine-tuning, with ``weight`` 0 or 1 on assistant messages
batch       ``{custom_id, method, url, body}``, a line of an OpenAI batch file
distill     ``{messages, completion}``, a line that ``spill distill`` wrote
==========  ==========================================================================================

All take ``custom_id``; plain and chat rows take ``max_tokens``, and for ``spill eval`` ``metric`` and
``schema``. A key that is not known is an error: a
misspelt key would otherwise be lost without a word.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from spillover.jobs.data.conversation import (
    Message,
    messages_of,
    require_known,
    resembling,
    string_of,
    tools_of,
)
from spillover.jobs.data.options import Options, max_tokens_of, options_of
from spillover.jobs.data.parse import Fault, kind, quoted
from spillover.jobs.data.teacher import Teacher, teacher_of

if TYPE_CHECKING:
    from collections.abc import Callable

Shape = Literal["plain", "chat", "batch", "distill"]

PLAIN_KEYS = ("prompt", "expected", "answer", "system", "custom_id", "max_tokens", "metric", "schema")
CHAT_KEYS = (
    "messages",
    "tools",
    "parallel_tool_calls",
    "expected",
    "custom_id",
    "max_tokens",
    "metric",
    "schema",
)
BATCH_KEYS = ("custom_id", "method", "url", "body")
DISTILL_KEYS = (
    "custom_id",
    "messages",
    "tools",
    "completion",
    "completion_token_ids",
    "finish_reason",
    "logprobs",
    "expected",
    "teacher",
    "spillover",
)
BATCH_URL = "/v1/chat/completions"

# What other people's files call the two columns; only used to say which key to rename.
ALIASES = {
    "question": "prompt",
    "input": "prompt",
    "text": "prompt",
    "instruction": "prompt",
    "output": "expected",
    "response": "expected",
    "label": "expected",
}


class Content(msgspec.Struct, frozen=True):
    """What one row says, whatever its shape; `spillover.jobs.data.rows.Row` describes the fields."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    max_tokens: int | None = None
    expected: Any = None
    reply: Any = None
    options: Options = Options()
    teacher: Teacher | None = None
    metric: str | None = None
    schema: dict[str, Any] | None = None


def shape_of(row: dict[str, Any]) -> Shape:
    """The shape that a row's keys announce; raises `Fault` if they announce none."""
    if "body" in row or "url" in row:
        return "batch"
    if "messages" in row:
        return "distill" if "completion" in row else "chat"
    if "prompt" in row:
        return "plain"
    hints = (_renaming(key) or resembling(key, ("prompt", "messages", "body")) for key in islice(row, 20))
    raise Fault("the row has none of 'prompt', 'messages' and 'body'", hint=next(filter(None, hints), None))


def content_of(row: dict[str, Any], shape: Shape) -> Content:
    """Check a row of the given shape; raises `Fault` naming the field that is wrong."""
    return _READERS[shape](row)


def custom_id_of(row: dict[str, Any]) -> str | None:
    value = row.get("custom_id")
    if value is None:
        return None
    if not string_of(value, "custom_id"):
        raise Fault("custom_id is empty", hint="leave it out to get row-000001, row-000002, ...")
    return str(value)


def _renaming(key: str) -> str | None:
    return f"rename {key!r} to {ALIASES[key]!r}" if key in ALIASES else None


def _plain(row: dict[str, Any]) -> Content:
    for key in row:
        if key not in PLAIN_KEYS and (hint := _renaming(key)):
            raise Fault(f"unknown key {key!r} in a plain row", hint=hint)
    require_known(row, PLAIN_KEYS, "a plain row")
    if not string_of(row["prompt"], "prompt").strip():
        raise Fault("prompt is empty")
    messages = [{"role": "user", "content": row["prompt"]}]
    if row.get("system") is not None:
        messages.insert(0, {"role": "system", "content": string_of(row["system"], "system")})
    answer, expected = row.get("answer"), row.get("expected")
    if answer is not None:
        if expected is not None:
            raise Fault("a row has either 'answer' or 'expected', not both")
        expected = string_of(answer, "answer")
    metric, schema = _scoring(row)
    return Content(messages, None, max_tokens_of(row), expected, reply=expected, metric=metric, schema=schema)


def _chat(row: dict[str, Any]) -> Content:
    require_known(row, CHAT_KEYS, "a chat row")
    messages, (metric, schema) = messages_of(row["messages"]), _scoring(row)
    return Content(
        messages, _tools(row), max_tokens_of(row), row.get("expected"), metric=metric, schema=schema
    )


def _batch(row: dict[str, Any]) -> Content:
    require_known(row, BATCH_KEYS, "a batch row")
    for key, only in (("method", "POST"), ("url", BATCH_URL)):
        if key in row and row[key] != only:
            raise Fault(f"{key} must be {only!r}, not {quoted(str(row[key]))}")
    body = row.get("body")
    if not isinstance(body, dict):
        raise Fault("body must be an object", hint='{"body": {"messages": [...]}}')
    options, max_tokens = options_of(body)
    if "messages" not in body:
        raise Fault("body.messages is missing")
    messages = messages_of(body["messages"], "body.messages")
    return Content(messages, _tools(body, "body."), max_tokens, options=options)


def _distill(row: dict[str, Any]) -> Content:
    require_known(row, DISTILL_KEYS, "a distill row")
    reply = string_of(row["completion"], "completion")
    messages, expected = messages_of(row["messages"]), row.get("expected")
    return Content(messages, _tools(row), expected=expected, reply=reply, teacher=teacher_of(row))


_READERS: dict[Shape, Callable[[dict[str, Any]], Content]] = {
    "plain": _plain,
    "chat": _chat,
    "batch": _batch,
    "distill": _distill,
}


def _scoring(row: dict[str, Any]) -> tuple[str | None, dict[str, Any] | None]:
    """How a row says that its answer is to be scored."""
    metric, schema = row.get("metric"), row.get("schema")
    if metric is not None:
        string_of(metric, "metric")
    if schema is not None and not isinstance(schema, dict):
        raise Fault(f"schema must be an object, not {kind(schema)}")
    return metric, schema


def _tools(row: dict[str, Any], prefix: str = "") -> list[dict[str, Any]] | None:
    tools = row.get("tools")
    return tools_of(tools, f"{prefix}tools") if tools else None
