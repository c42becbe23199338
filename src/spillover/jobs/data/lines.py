"""The lines of a JSONL file, streamed.

A line ends at a line feed and nowhere else: a carriage return before it is JSON whitespace, and U+2028
inside a string is text. At most one line is in memory at a time, and no line above a limit is read
whole, so that a file without line feeds cannot fill the memory.
"""

from __future__ import annotations

import hashlib
import io
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from spillover.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    from _typeshed import WriteableBuffer

LINE_LIMIT = 64 * 1024 * 1024  # bytes
READ_SIZE = 1024 * 1024  # bytes

UTF8_MARK = b"\xef\xbb\xbf"
BLANK = b" \t\r\n"

# UTF-32 stands before UTF-16: its little-endian mark begins with the one of UTF-16.
UNICODE = {
    b"\xff\xfe\x00\x00": "UTF-32",
    b"\x00\x00\xfe\xff": "UTF-32",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
    b"{\x00": "UTF-16LE",
    b"\x00{": "UTF-16BE",
}
PACKED = {
    b"\x1f\x8b": ("a gzip file", "gzip -dc"),
    b"\x28\xb5\x2f\xfd": ("a zstd file", "zstd -dc"),
    b"\xfd7zXZ": ("an xz file", "xz -dc"),
    b"BZh": ("a bzip2 file", "bzip2 -dc"),
    b"PK\x03\x04": ("a zip file", "unzip -p"),
}


class Stamp(NamedTuple):
    """What changes when a file is written to or replaced: a cheap way to notice it between two reads."""

    device: int
    inode: int
    size: int  # bytes
    modified: int  # nanoseconds since the epoch

    @classmethod
    def of(cls, status: os.stat_result) -> Stamp:
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


class JsonLines:
    """One JSONL file, iterated once as ``(line number from 1, bytes)`` without its blank lines.

    Use it as a context manager. After the last line, ``size`` and ``sha256`` describe the whole file.
    Iterating raises `InputError`, with the file and the line, for a line above ``limit`` bytes, for an
    encoding other than UTF-8 and for a packed file; and for a file that changed while it was read.

    Args:
        path: a regular file; opening anything else raises `InputError`.
        limit: the longest line accepted, in bytes.
        stamp: what the file must still be: `Stamp` of an earlier read.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, limit: int = LINE_LIMIT, stamp: Stamp | None = None
    ) -> None:
        self.path = Path(path)
        self.limit = limit
        self._raw = _open(self.path)
        self._file = io.BufferedReader(self._raw, READ_SIZE)
        self.stamp = Stamp.of(os.fstat(self._raw.fileno()))
        if stamp is not None and stamp != self.stamp:
            self.close()
            raise _changed(self.path, "it was checked")

    @property
    def size(self) -> int:
        """Bytes read so far; the size of the file after the last line."""
        return self._raw.count

    @property
    def sha256(self) -> str:
        """Hex SHA-256 of the bytes read so far; of the file after the last line."""
        return self._raw.digest.hexdigest()

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        number = 0
        while data := self._line():
            number += 1
            if number == 1:
                data = self._start(data)
            # readline() stops one byte above the limit: only a line feed may be that byte.
            if len(data) > self.limit and data[-1] != 0x0A:
                raise self.error(
                    number,
                    f"the line is longer than {self.limit:,} bytes",
                    hint="one JSON object a line; put a line feed after each",
                )
            if data.strip(BLANK):
                yield number, data
        self.require_unchanged()
        if self.size != self.stamp.size:
            raise _changed(self.path, "it was opened")

    def error(self, number: int, message: str, *, hint: str | None = None) -> InputError:
        """The error for line ``number``; the error that the file changed when that explains more."""
        self.require_unchanged()
        return InputError(f"{self.path}:{number}: {message}", hint=hint)

    def require_unchanged(self) -> None:
        """Raise `InputError` if the file at the path is no longer the one that was opened."""
        try:
            now = Stamp.of(os.stat(self.path))
        except OSError:
            now = None
        if now != self.stamp:
            raise _changed(self.path, "it was opened")

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> JsonLines:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _line(self) -> bytes:
        try:
            return self._file.readline(self.limit + 1)
        except OSError as error:
            raise InputError(f"{self.path}: cannot be read: {error.strerror}") from None

    def _start(self, data: bytes) -> bytes:
        """The first line without its UTF-8 byte order mark; other encodings and packed files are refused."""
        for mark, name in UNICODE.items():
            if data.startswith(mark):
                raise self.error(
                    1,
                    f"the file is {name}, not UTF-8",
                    hint=f"iconv -f {name} -t UTF-8 {self.path} > utf8.jsonl",
                )
        for magic, (name, unpack) in PACKED.items():
            if data.startswith(magic):
                raise self.error(
                    1, f"the file is {name}, not JSONL", hint=f"{unpack} {self.path} > rows.jsonl"
                )
        return data.removeprefix(UTF8_MARK)


class _Counted(io.FileIO):
    """A file that counts and hashes what is read, a buffer at a time rather than a line at a time."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.count = 0
        self.digest = hashlib.sha256()

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        read = super().readinto(buffer) or 0
        self.digest.update(memoryview(buffer)[:read])
        self.count += read
        return read


def _open(path: Path) -> _Counted:
    try:
        mode = os.stat(path).st_mode
        if stat.S_ISDIR(mode):
            raise InputError(f"{path}: is a directory, not a JSONL file", hint=f"ls {path}")
        if not stat.S_ISREG(mode):  # a job reads its input again when it resumes
            raise InputError(f"{path}: is not a regular file", hint="write the rows to a file first")
        return _Counted(path)
    except FileNotFoundError:
        raise InputError(f"{path}: no such file", hint="spill example prompts") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the path
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise InputError(f"{str(path)!r}: cannot be opened: {reason}") from None


def _changed(path: Path, since: str) -> InputError:
    return InputError(f"{path}: the file has changed since {since}", hint="run the command again")
