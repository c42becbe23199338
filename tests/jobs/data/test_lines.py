"""Reading lines: encodings, line ends, limits, and files that are not what they seem."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import lzma
import os

import pytest

from spillover.errors import InputError
from spillover.jobs.data.lines import READ_SIZE, JsonLines

ROW = b'{"prompt": "hi"}'


def write(folder, data: bytes, name: str = "rows.jsonl"):
    path = folder / name
    path.write_bytes(data)
    return path


def read(path, **options):
    with JsonLines(path, **options) as lines:
        return list(lines)


def refused(path, **options) -> InputError:
    with pytest.raises(InputError) as caught:
        read(path, **options)
    assert "\n" not in str(caught.value)
    return caught.value


def test_lines_are_numbered_and_blank_ones_left_out(tmp_path):
    path = write(tmp_path, b"a\n\n  \t\nb\r\n\r\nc")
    assert read(path) == [(1, b"a\n"), (4, b"b\r\n"), (6, b"c")]


@pytest.mark.parametrize("data", [ROW, ROW + b"\n", ROW + b"\n" * 1000, ROW * 100_000])
def test_size_and_digest_describe_the_whole_file(tmp_path, data):
    with JsonLines(write(tmp_path, data)) as lines:
        list(lines)
        assert lines.size == len(data)
        assert lines.sha256 == hashlib.sha256(data).hexdigest()


def test_a_byte_order_mark_is_passed_over(tmp_path):
    assert read(write(tmp_path, b"\xef\xbb\xbf" + ROW)) == [(1, ROW)]


@pytest.mark.parametrize("character", ["\u2028", "\u2029", "\x0b", "\x0c", "\x85"])
def test_only_a_line_feed_ends_a_line(tmp_path, character):
    line = f'{{"prompt": "a{character}b"}}\n'.encode()
    assert read(write(tmp_path, line)) == [(1, line)]


@pytest.mark.parametrize("encoding", ["UTF-16", "UTF-32", "UTF-16LE", "UTF-16BE"])
def test_other_encodings_are_named_with_the_way_out(tmp_path, encoding):
    path = write(tmp_path, ROW.decode().encode(encoding))
    error = refused(path)
    assert str(error) == f"{path}:1: the file is {encoding}, not UTF-8"
    assert error.hint == f"iconv -f {encoding} -t UTF-8 {path} > utf8.jsonl"


@pytest.mark.parametrize(
    ("pack", "name", "command"),
    [
        (gzip.compress, "a gzip file", "gzip -dc"),
        (lzma.compress, "an xz file", "xz -dc"),
        (bz2.compress, "a bzip2 file", "bzip2 -dc"),
    ],
)
def test_a_packed_file_is_named_with_the_way_out(tmp_path, pack, name, command):
    path = write(tmp_path, pack(ROW))
    error = refused(path)
    assert str(error) == f"{path}:1: the file is {name}, not JSONL"
    assert error.hint == f"{command} {path} > rows.jsonl"


def test_a_missing_file(tmp_path):
    path = tmp_path / "absent.jsonl"
    assert str(refused(path)) == f"{path}: no such file"


def test_a_directory(tmp_path):
    assert str(refused(tmp_path)) == f"{tmp_path}: is a directory, not a JSONL file"


def test_a_pipe_is_refused_without_waiting_for_a_writer(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    assert str(refused(path)) == f"{path}: is not a regular file"


def test_a_path_that_cannot_exist():
    assert "cannot be opened" in str(refused("a\0b"))


def test_a_line_at_the_limit_is_read_and_one_above_it_is_not(tmp_path):
    path = write(tmp_path, b"x" * 100 + b"\n" + b"y" * 100)
    assert [len(data) for _, data in read(path, limit=100)] == [101, 100]
    path = write(tmp_path, ROW + b"\n" + b"y" * 101 + b"\n")
    error = refused(path, limit=100)
    assert str(error) == f"{path}:2: the line is longer than 100 bytes"


def test_a_line_above_the_limit_is_not_read_whole(tmp_path):
    path = write(tmp_path, ROW + b"\n")
    with path.open("r+b") as file:
        file.truncate(1 << 40)  # sparse: a terabyte of NUL bytes
    with JsonLines(path) as lines:
        with pytest.raises(InputError, match=r":2: the line is longer than 67,108,864 bytes"):
            list(lines)
        assert lines.size <= lines.limit + 2 * READ_SIZE


def test_a_file_that_grows_while_it_is_read(tmp_path):
    path = write(tmp_path, (ROW + b"\n") * 3)
    with JsonLines(path) as lines:
        rows = iter(lines)
        next(rows)
        with path.open("ab") as file:
            file.write(ROW)
        with pytest.raises(InputError) as caught:
            list(rows)
    assert str(caught.value) == f"{path}: the file has changed since it was opened"


def test_a_file_that_is_replaced_while_it_is_read(tmp_path):
    path = write(tmp_path, ROW + b"\n" + ROW)
    with JsonLines(path) as lines:
        rows = iter(lines)
        next(rows)
        os.replace(write(tmp_path, ROW + b"\n" + ROW, "other.jsonl"), path)
        with pytest.raises(InputError, match="has changed since it was opened"):
            list(rows)


def test_a_file_that_is_removed_while_it_is_read(tmp_path):
    path = write(tmp_path, ROW)
    with JsonLines(path) as lines:
        path.unlink()
        with pytest.raises(InputError, match="has changed since it was opened"):
            list(lines)


def test_a_file_that_changed_since_an_earlier_read(tmp_path):
    path = write(tmp_path, ROW)
    with JsonLines(path) as lines:
        stamp = lines.stamp
    assert read(path, stamp=stamp) == [(1, ROW)]
    write(tmp_path, ROW + b"\n")
    assert str(refused(path, stamp=stamp)) == f"{path}: the file has changed since it was checked"
