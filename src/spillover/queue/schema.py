"""The tables of queues, beside those of ownership in the same database.

One database holds all queues of a pool: a checkpoint or a fork is another queue, and the payloads are
shared because ownership is counted in one place.
"""

from __future__ import annotations

import contextlib
import sqlite3

from spillover.errors import Mismatch

__all__ = ["SCHEMA", "STATUS", "Kind", "make_tables", "owner"]

PENDING, LEASED, COMPLETED, DEAD, CANCELLED = range(5)
STATUS = ("pending", "leased", "completed", "dead", "cancelled")

SCHEMA = """
CREATE TABLE IF NOT EXISTS queues(
    id INTEGER PRIMARY KEY,
    name TEXT NOT NULL,
    kind TEXT NOT NULL CHECK(kind IN ('live', 'checkpoint')),
    parent TEXT,
    sealed INTEGER NOT NULL DEFAULT 0,
    positions INTEGER NOT NULL DEFAULT 0,
    pending INTEGER NOT NULL DEFAULT 0,
    leased INTEGER NOT NULL DEFAULT 0,
    completed INTEGER NOT NULL DEFAULT 0,
    dead INTEGER NOT NULL DEFAULT 0,
    cancelled INTEGER NOT NULL DEFAULT 0,
    undelivered INTEGER NOT NULL DEFAULT 0,
    max_unfinished INTEGER,
    max_undelivered INTEGER,
    numbers INTEGER NOT NULL DEFAULT 0,
    UNIQUE(kind, name)
);
CREATE TABLE IF NOT EXISTS tasks(
    id INTEGER PRIMARY KEY,
    queue INTEGER NOT NULL,
    key TEXT NOT NULL,
    status INTEGER NOT NULL,
    lane TEXT NOT NULL,
    stage INTEGER NOT NULL,
    rank INTEGER NOT NULL,
    turn INTEGER NOT NULL,
    attempt INTEGER NOT NULL DEFAULT 0,
    failures INTEGER NOT NULL DEFAULT 0,
    max_attempts INTEGER NOT NULL,
    digest INTEGER NOT NULL,
    position INTEGER,
    input BLOB,
    metadata BLOB,
    worker TEXT,
    failure TEXT,
    UNIQUE(queue, key)
);
CREATE INDEX IF NOT EXISTS tasks_pending ON tasks(queue, lane, stage, rank, turn) WHERE status = 0;
CREATE INDEX IF NOT EXISTS tasks_leased ON tasks(queue) WHERE status = 1;
CREATE INDEX IF NOT EXISTS tasks_dead ON tasks(queue) WHERE status = 3;
CREATE TABLE IF NOT EXISTS accepted(
    queue INTEGER NOT NULL,
    position INTEGER NOT NULL,
    task INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    result BLOB,
    metadata BLOB,
    worker TEXT NOT NULL,
    held INTEGER NOT NULL,
    PRIMARY KEY(queue, position)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS answers(
    id INTEGER PRIMARY KEY,
    queue INTEGER NOT NULL,
    key TEXT NOT NULL,
    digest BLOB NOT NULL,
    answer BLOB NOT NULL,
    start INTEGER NOT NULL,
    UNIQUE(queue, key)
);
CREATE TABLE IF NOT EXISTS producers(
    queue INTEGER NOT NULL, name TEXT NOT NULL, cursor BLOB, PRIMARY KEY(queue, name)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS retired(
    queue INTEGER NOT NULL, worker TEXT NOT NULL, PRIMARY KEY(queue, worker)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS consumers(
    id INTEGER PRIMARY KEY,
    queue INTEGER NOT NULL,
    name TEXT NOT NULL,
    low INTEGER NOT NULL,
    state BLOB,
    state_ref BLOB,
    UNIQUE(queue, name)
);
CREATE TABLE IF NOT EXISTS acks(
    consumer INTEGER NOT NULL, position INTEGER NOT NULL, PRIMARY KEY(consumer, position)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS batches(
    id INTEGER PRIMARY KEY,
    queue INTEGER NOT NULL,
    name TEXT NOT NULL,
    consumer INTEGER NOT NULL,
    status TEXT NOT NULL CHECK(status IN ('planned', 'ready', 'finished')),
    positions BLOB NOT NULL,
    plan BLOB,
    ready BLOB,
    UNIQUE(queue, name)
);
"""


def make_tables(cursor: sqlite3.Cursor) -> None:
    """Make the tables that are not there yet, inside a transaction.

    Raises:
        Mismatch: those that are there are not as this version makes them.
    """
    for statement in SCHEMA.split(";"):
        cursor.execute(statement)
    query = "SELECT name, sql FROM sqlite_schema WHERE sql IS NOT NULL"
    with contextlib.closing(sqlite3.connect(":memory:")) as fresh:
        fresh.executescript(SCHEMA)
        missing = {*fresh.execute(query)} - {*cursor.execute(query)}
    if missing:
        names = ", ".join(sorted(name for name, _ in missing))
        raise Mismatch(
            f"the queues of this pool were made by another version of spillover: {names} differ",
            hint="use that version, or begin with a new pool",
        )


class Kind:
    """What a row of the queue owns; see `owner`."""

    INPUT = 0
    RESULT = 1
    STATE = 2
    PLAN = 3
    READY = 4


def owner(kind: int, number: int) -> int:
    """The number under which row ``number`` owns a publication; above all numbers of names."""
    return (1 << 48) + number * 8 + kind
