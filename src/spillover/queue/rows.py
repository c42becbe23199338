"""Statements about many rows at once.

Guarantee: the same effect as one statement a row, and the same errors.

To start and end a statement costs SQLite as much as the row itself. So values go in as several rows a
statement, in a few fixed numbers of rows whose statements stay prepared, and rows that exist are named by one
JSON array of their numbers.
"""

from __future__ import annotations

import functools
import sqlite3
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

__all__ = ["insert", "numbered"]

TOGETHER = (50, 10, 1)
"""Rows of a statement: 50 of twelve values are well below SQLite's limit on values, 999 in old versions."""
_encode = msgspec.json.Encoder().encode


def insert(cursor: sqlite3.Cursor, table: str, rows: Sequence[tuple[Any, ...]], conflict: str = "") -> int:
    """Insert rows; returns how many there are more now.

    Args:
        table: its name, with the names of its columns in parentheses if they are not all.
        rows: values, as many in each as there are columns.
        conflict: what follows the values, for example ``ON CONFLICT(key) DO NOTHING``.
    """
    added = start = 0
    for size in TOGETHER:
        while len(rows) - start >= size:
            part = rows[start : start + size]
            statement = _statement(table, len(part[0]), size, conflict)
            cursor.execute(statement, [value for row in part for value in row])
            added += cursor.rowcount
            start += size
    return added


def numbered(numbers: Iterable[int]) -> str:
    """Numbers as an argument of ``json_each``, which makes a row of each: ``key`` counts from 0."""
    return _encode([*numbers]).decode()


@functools.cache
def _statement(table: str, width: int, size: int, conflict: str) -> str:
    row = f"({', '.join('?' * width)})"
    return f"INSERT INTO {table} VALUES {', '.join([row] * size)} {conflict}"
