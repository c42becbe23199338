"""Rows of a JSONL file, whatever its shape, one at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import msgspec

from spillover.jobs.data.conversation import Message
from spillover.jobs.data.lines import JsonLines, Stamp
from spillover.jobs.data.options import Options
from spillover.jobs.data.parse import Fault, parse_object
from spillover.jobs.data.shapes import Shape, content_of, custom_id_of, shape_of
from spillover.jobs.data.teacher import Teacher

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator

Purpose = Literal["prompt", "train", "eval"]


class Row(msgspec.Struct, frozen=True):
    """One checked row.

    Attributes:
        index: position among the rows, from 0; blank lines do not count.
        line: line in the file, from 1.
        shape: the shape of the file.
        id: the row's ``custom_id``, or `generated_id` of its index.
        messages: the conversation without the reply to produce or to learn: for plain rows the system and
            user messages.
        tools: for the chat template, as given.
        max_tokens: the most tokens to generate, or None where the row does not say.
        expected: any JSON value; ``answer`` counts as one. None where there is none.
        reply: what follows ``messages`` in training: a plain row's answer, a distill row's completion.
        options: decoding that the row asks for.
        teacher: what a distill row says of its completion's tokens.
        metric, schema: how its answer is to be scored, where it says so itself.
    """

    index: int
    line: int
    shape: Shape
    id: str
    messages: list[Message]
    tools: list[dict[str, Any]] | None
    max_tokens: int | None
    expected: Any
    reply: Any
    options: Options
    teacher: Teacher | None = None
    metric: str | None = None
    schema: dict[str, Any] | None = None

    @property
    def conversation(self) -> list[Message]:
        """The messages to train on: with the reply, where the shape keeps it apart."""
        if self.reply is None:
            return self.messages
        return [*self.messages, {"role": "assistant", "content": self.reply}]


def generated_id(index: int) -> str:
    """The id of a row without one: ``row-000001`` for index 0."""
    return f"row-{index + 1:06d}"


def read_rows(
    path: str | os.PathLike[str],
    purpose: Purpose | None = None,
    *,
    start: int = 0,
    stamp: Stamp | None = None,
) -> Iterator[Row]:
    """Yield the rows of a file from index ``start``, holding one at a time.

    The shape is the one of the first row, and every row must have it. Rows before ``start`` are passed over
    without being decoded. Duplicate ids are not noticed here: `check_file` does that, once.

    Args:
        purpose: also require of each row what this use of it needs.
        stamp: the ``stamp`` of a `FileSummary`: refuse a file that changed since it was checked.

    Raises:
        InputError: the first thing that is wrong, with the file and line.
    """
    with JsonLines(path, stamp=stamp) as lines:
        for row in rows_of(lines, start=start):
            if purpose is not None and (fault := unfit(row, purpose)):
                raise lines.error(row.line, fault.message, hint=fault.hint)
            yield row


def rows_of(lines: JsonLines, *, start: int = 0) -> Iterator[Row]:
    """The rows of an open file; raises `InputError` for a file without any."""
    shape: Shape | None = None
    index = -1
    for index, (number, data) in enumerate(lines):
        if 0 < index < start:
            continue
        try:
            row = parse_object(data)
            shape = _same_shape(row, shape)
            if index >= start:
                yield _row(row, shape, index, number)
        except Fault as fault:
            raise lines.error(number, fault.message, hint=fault.hint) from None
    if index < 0:
        raise lines.error(1, "the file has no rows", hint="spill example prompts")


def unfit(row: Row, purpose: Purpose) -> Fault | None:
    """Why a row cannot serve a purpose, or None.

    A prompt ends where the model should answer. A row to evaluate also has something to compare with, or says
    itself how it is scored.
    A conversation to train on starts with the user, after any system message, and ends with the assistant,
    and at least one of the assistant's messages counts.
    """
    if purpose == "train":
        return _unfit_to_train(row)
    if row.messages[-1]["role"] not in ("user", "tool"):
        return Fault(
            "the last message is not the user's: there is nothing to answer", hint="remove messages after it"
        )
    if purpose == "eval" and row.expected is None and row.metric is None:
        return Fault("there is nothing to compare the answer with", hint="add 'expected' to the row")
    return None


def _row(row: dict[str, Any], shape: Shape, index: int, line: int) -> Row:
    content = content_of(row, shape)
    return Row(
        index,
        line,
        shape,
        custom_id_of(row) or generated_id(index),
        content.messages,
        content.tools,
        content.max_tokens,
        content.expected,
        content.reply,
        content.options,
        content.teacher,
        content.metric,
        content.schema,
    )


def _same_shape(row: dict[str, Any], shape: Shape | None) -> Shape:
    found = shape_of(row)
    if shape is not None and found != shape:
        raise Fault(f"a {found} row in a file of {shape} rows", hint="keep one shape of row a file")
    return found


def _unfit_to_train(row: Row) -> Fault | None:
    if row.reply is not None and not isinstance(row.reply, str):
        return Fault("'expected' must be a string to train on it")
    messages = row.conversation
    if messages[-1]["role"] != "assistant":
        return Fault("there is no reply to learn", hint="add 'answer', or end with an assistant message")
    first = next(message["role"] for message in messages if message["role"] != "system")
    if first != "user":
        return Fault(f"the first message after the system's is the {first}'s, not the user's")
    if not any(m["role"] == "assistant" and m.get("weight", 1) for m in messages):
        return Fault("every assistant message has weight 0: there is nothing to learn")
    return None
