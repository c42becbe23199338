"""Many rows a statement do what one row a statement does."""

from __future__ import annotations

import sqlite3

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spillover.queue.rows import insert, numbered

keys = st.lists(st.integers(0, 150), max_size=140)


def table(known: list[int]) -> sqlite3.Cursor:
    cursor = sqlite3.connect(":memory:").cursor()
    cursor.execute("CREATE TABLE rows(id INTEGER PRIMARY KEY, key INTEGER UNIQUE, value BLOB)")
    cursor.executemany("INSERT INTO rows(key, value) VALUES(?, 'old')", [(key,) for key in {*known}])
    return cursor


@given(known=keys, new=keys)
def test_as_one_row_a_statement(known: list[int], new: list[int]) -> None:
    rows = [(key, b"%d" % at) for at, key in enumerate(new)]
    one, many = table(known), table(known)
    one.executemany("INSERT INTO rows(key, value) VALUES(?, ?) ON CONFLICT(key) DO NOTHING", rows)
    added = insert(many, "rows(key, value)", rows, "ON CONFLICT(key) DO NOTHING")
    assert added == (one.rowcount if rows else 0)
    query = "SELECT key, value FROM rows ORDER BY id"
    assert many.execute(query).fetchall() == one.execute(query).fetchall()


def test_a_row_that_may_not_be_there_is_an_error() -> None:
    with pytest.raises(sqlite3.IntegrityError):
        insert(table([7]), "rows(key, value)", [(key, None) for key in range(60)])


@given(st.lists(st.integers(0, (1 << 63) - 1)))
def test_numbers_reach_sqlite_as_they_are(numbers: list[int]) -> None:
    found = sqlite3.connect(":memory:").execute("SELECT key, value FROM json_each(?)", (numbered(numbers),))
    assert found.fetchall() == [*enumerate(numbers)]
