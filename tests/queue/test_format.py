"""The tables and messages of queues are those of ``docs/formats.md``, to the last column and field."""

from __future__ import annotations

import re
import sqlite3
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

import msgspec
import pytest

from pool.described import FORMATS, rows
from queued import Place
from spillover.http import serving
from spillover.pool import ledger
from spillover.queue import coordinator, messages, server, views
from spillover.queue.coordinator import HANDLERS, VIEWS
from spillover.queue.schema import STATUS, Kind, owner
from spillover.queue.transport import BODY_BYTES, Told

PLAIN = {int: "int", str: "string", bool: "bool", float: "number", Any: "any"} | dict.fromkeys(
    (None, type(None)), "null"
)
TABLES = ("queues", "tasks", "accepted", "answers", "producers", "retired", "consumers", "acks", "batches")


def shown(kind: Any) -> str:
    """A type as the documentation writes it."""
    if kind in PLAIN:
        return PLAIN[kind]
    parts = [*map(shown, get_args(kind))] if get_origin(kind) is not typing.Annotated else []
    match get_origin(kind):
        case typing.Annotated:
            return shown(get_args(kind)[0])
        case origin if origin is list:
            return f"list of {parts[0]}"
        case origin if origin is tuple:
            return f"[{', '.join(parts)}]"
        case types.UnionType | typing.Union:
            return " or ".join(parts)
    return kind.__name__


def structs(kind: Any) -> Iterator[type]:
    """The structs that a type is made of."""
    for part in get_args(kind):
        yield from structs(part)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        yield kind
        for field in msgspec.structs.fields(kind):
            yield from structs(field.type)


@pytest.fixture
def made(place: Place) -> Iterator[sqlite3.Cursor]:
    """The database as a coordinator makes it."""
    with place.coordinator.owners.catalogue.reading() as cursor:
        yield cursor


def test_there_are_exactly_the_documented_tables(made: sqlite3.Cursor) -> None:
    found = {name for (name,) in made.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")}
    documented = {*re.findall(r"<!-- sql: (\w+) -->", FORMATS)}
    assert documented == found
    assert documented == {*TABLES, *re.findall(r"CREATE TABLE (?:IF NOT EXISTS )?(\w+)", ledger.SCHEMA)}


@pytest.mark.parametrize("table", TABLES)
def test_a_table_has_exactly_the_documented_columns_and_types(made: sqlite3.Cursor, table: str) -> None:
    key = {name for _, name, *_, place in made.execute(f"PRAGMA table_info({table})").fetchall() if place}
    wanted = [
        (name, kind if required or name in key else f"{kind} or NULL")
        for _, name, kind, required, *_ in made.execute(f"PRAGMA table_info({table})").fetchall()
    ]
    assert [(name, kind) for name, kind, _ in rows(f"sql: {table}")] == wanted


def test_the_states_and_kinds_are_those_of_the_code() -> None:
    assert [(int(number), name) for number, name, _ in rows("states: tasks")] == [*enumerate(STATUS)]
    kinds = {name: value for name, value in vars(Kind).items() if name.isupper()}
    assert [int(kind) for kind, *_ in rows("kinds")] == sorted(kinds.values())
    assert [owner(kind, 7) for kind in sorted(kinds.values())] == [
        (1 << 48) + 8 * 7 + int(kind) for kind, *_ in rows("kinds")
    ]


def test_what_is_indexed_is_said(made: sqlite3.Cursor) -> None:
    indexes = {name for (name,) in made.execute("SELECT name FROM sqlite_schema WHERE type = 'index'")}
    assert {name for name in indexes if name.startswith("tasks_")} == {
        "tasks_pending",
        "tasks_leased",
        "tasks_dead",
    }


def test_the_calls_are_exactly_those_of_the_code() -> None:
    wanted = []
    for call, (_, answer) in (HANDLERS | VIEWS).items():
        fields = [field for field in msgspec.structs.fields(call) if field.name not in ("queue", "key")]
        told = "; ".join(f"`{field.encode_name}`: {shown(field.type)}" for field in fields)
        wanted.append([call.__name__, told.strip("`"), shown(answer)])
    assert rows("calls") == wanted


def test_every_struct_of_a_message_has_a_table_with_its_types() -> None:
    calls = [*HANDLERS, *VIEWS]
    answers = [answer for _, answer in (HANDLERS | VIEWS).values()]
    reached = {kind for root in (*calls, *answers, Told) for kind in structs(root)} - {*calls}
    assert len(reached) > 10
    for kind in reached:
        wanted = [(field.encode_name, shown(field.type)) for field in msgspec.structs.fields(kind)]
        label = f"struct: {kind.__module__}.{kind.__name__}"
        assert [(name, type_) for name, type_, _ in rows(label)] == wanted


def test_the_statuses_are_those_that_the_server_answers() -> None:
    """As its source says them, but for what the library below it refuses by itself."""
    said: set[int] = set()
    for module in (server, serving):  # its own, and what all servers here refuse
        source = Path(module.__file__).read_text(encoding="utf-8").partition('"""\n')[2]
        said |= {int(number) for number in re.findall(r"\b([45]\d\d)\b", source)}
    assert {int(status) for status, *_ in rows("statuses")} == said | {200, 404, 405}


def test_the_bounds_are_those_of_the_code() -> None:
    section = FORMATS.partition("### Queue over HTTP")[2].partition("### ")[0]
    assert f"at most {BODY_BYTES >> 20} MiB" in section
    assert f"a list in a call at most {messages.BATCH:,} items" in section
    assert f"a page at most {views.PAGE:,} rows" in " ".join(section.split())
    assert f"did not come within {server.BODY_SECONDS:g} s" in section
    kept = f"The newest {coordinator.REMEMBERED:,} rows are kept, but not more than "
    assert f"{kept}{coordinator.REMEMBERED_BYTES >> 20} MiB" in FORMATS
