"""What every store promises.

A store is bytes under string keys at one URI. Keys are relative, ``/``-separated, and never contain
``..``. Six plain calls and two conditional ones are enough for everything above:

===============  =========================================================================
call             guarantee
===============  =========================================================================
``read``         the bytes of one write, never a mixture, with an opaque version
``read_range``   part of the same
``head``         size, without the bytes
``write``        atomic and durable when it returns; readers see the old or the new bytes
``create``       as ``write``, but fails with `Lost` when the key exists
``replace``      as ``write``, but fails with `Lost` unless the key has exactly this version
``list``         every key below a prefix written before the call, sorted
``delete``       durable when it returns; deleting a missing key is not an error
===============  =========================================================================

A conditional write ends in one of four ways, and callers treat each differently: it returns (done),
`Lost` (somebody else won), `Retry` (read again and try again) or `Unknown` (it may have happened, or
may happen later). Conditional writes are never retried inside a store; the other calls may be.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias

from spillover.errors import InputError

__all__ = ["CHUNK", "Blob", "Buffer", "Digest", "Entry", "Hold", "Source", "Store", "chunked", "valid_key"]

CHUNK = 8 * 1024 * 1024
"""Bytes moved at a time when a payload streams."""

Buffer: TypeAlias = bytes | memoryview
Source: TypeAlias = Buffer | Path | Callable[[], Iterable[Buffer]]
"""What can be written: bytes, the file at a path, or a function that yields the bytes anew each call."""


@dataclass(frozen=True)
class Blob:
    """The bytes of a key and the version to name in `Store.replace`."""

    data: bytes
    version: str


@dataclass(frozen=True)
class Entry:
    """A key and its size in bytes."""

    key: str
    size: int


@dataclass(frozen=True)
class Digest:
    """Size in bytes and hexadecimal sha256 of some content."""

    size: int
    sha256: str


class Hold(Protocol):
    """A lock that the operating system releases when this process dies."""

    def release(self) -> None: ...


class Store(ABC):
    """Bytes at a URI; see the module's table for what each call promises.

    Every call may raise `StoreError`; calls on a missing key raise `NotFound`, writes without room
    raise `StoreFull`.
    """

    uri: str

    @abstractmethod
    def read(self, key: str) -> Blob:
        """Return the whole value of ``key`` and its version."""

    @abstractmethod
    def read_range(self, key: str, start: int, stop: int) -> bytes:
        """Return bytes ``start`` to ``stop`` (exclusive), fewer when the value ends before ``stop``."""

    @abstractmethod
    def head(self, key: str) -> Entry:
        """Return the size of ``key``."""

    @abstractmethod
    def write(self, key: str, source: Source) -> None:
        """Store ``source`` under ``key``, replacing what is there; large sources stream."""

    @abstractmethod
    def create(self, key: str, data: bytes) -> str:
        """Store ``data`` under a key that does not exist and return its version."""

    @abstractmethod
    def replace(self, key: str, data: bytes, version: str) -> str:
        """Store ``data`` under a key whose version is ``version`` and return the new version."""

    @abstractmethod
    def list(self, prefix: str = "") -> Iterator[Entry]:
        """Yield the entries whose key starts with ``prefix``, in key order."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Remove ``key``; a missing key is not an error."""

    def hold(self, key: str) -> Hold | None:
        """Take an exclusive lock named ``key`` that dies with this process.

        Returns None where the backend has no such lock (object stores).

        Raises:
            LockContended: another live process holds it.
        """
        return None

    def require_safe(self) -> None:  # noqa: B027 - most backends know nothing against themselves
        """Raise `StoreRefused` if this very place is known to break what owned state needs.

        Asked at every acquisition, for the same folder may be reached through another mount tomorrow.
        """

    def sweep(self) -> int:
        """Remove temporary data that dead writers left; return how many pieces. Safe at any time."""
        return 0

    def chunks(self, key: str, size: int = CHUNK) -> Iterator[bytes]:
        """Yield the value of ``key`` piece by piece, so that it need not fit in memory."""
        start, total = 0, self.head(key).size
        while start < total:
            piece = self.read_range(key, start, min(start + size, total))
            if not piece:
                return
            yield piece
            start += len(piece)

    def digest(self, key: str) -> Digest:
        """Read ``key`` back and return its size and sha256."""
        size, sha = 0, hashlib.sha256()
        for piece in self.chunks(key):
            size += len(piece)
            sha.update(piece)
        return Digest(size, sha.hexdigest())

    def fetch(self, key: str, path: Path) -> Digest:
        """Copy ``key`` into the file ``path`` and return the size and sha256 of what arrived."""
        size, sha = 0, hashlib.sha256()
        with path.open("wb") as file:
            for piece in self.chunks(key):
                file.write(piece)
                size += len(piece)
                sha.update(piece)
        return Digest(size, sha.hexdigest())


def chunked(source: Source) -> Iterator[Buffer]:
    """Yield the bytes of ``source`` in pieces of bounded size."""
    if isinstance(source, Path):
        with source.open("rb") as file:
            while piece := file.read(CHUNK):
                yield piece
    elif callable(source):
        yield from source()
    else:
        yield source


def valid_key(key: str) -> str:
    """Return ``key`` if it is a plain relative path, else raise `InputError`."""
    if not key or key.startswith("/") or any(part in ("", ".", "..") for part in key.split("/")):
        raise InputError(f"{key!r} is not a key: use relative names separated by single slashes")
    return key
