"""A store in this process's memory, for tests and dry runs: same promises, nothing survives."""

from __future__ import annotations

import threading
from collections.abc import Iterator

from spillover.errors import Lost, NotFound
from spillover.store.base import Blob, Entry, Source, Store, chunked, valid_key

__all__ = ["MemoryStore"]


class MemoryStore(Store):
    """Values in a dictionary. Stores of one process with the same URI share their values."""

    _shared: dict[str, MemoryStore] = {}  # noqa: RUF012 - shared on purpose

    def __init__(self, uri: str = "memory://") -> None:
        self.uri = uri
        self._lock = threading.Lock()
        self._values: dict[str, tuple[bytes, int]] = {}
        self._writes = 0

    @classmethod
    def shared(cls, uri: str) -> MemoryStore:
        """Return this process's store at ``uri``."""
        return cls._shared.setdefault(uri, cls(uri))

    def read(self, key: str) -> Blob:
        with self._lock:
            data, version = self._value(key)
            return Blob(data, str(version))

    def read_range(self, key: str, start: int, stop: int) -> bytes:
        with self._lock:
            return self._value(key)[0][start:stop]

    def head(self, key: str) -> Entry:
        with self._lock:
            return Entry(key, len(self._value(key)[0]))

    def write(self, key: str, source: Source) -> None:
        data = b"".join(chunked(source))
        with self._lock:
            self._put(key, data)

    def create(self, key: str, data: bytes) -> str:
        with self._lock:
            if valid_key(key) in self._values:
                raise Lost(f"{key} already exists in {self.uri}")
            return self._put(key, data)

    def replace(self, key: str, data: bytes, version: str) -> str:
        with self._lock:
            if key not in self._values or str(self._values[key][1]) != version:
                raise Lost(f"{key} has changed in {self.uri}")
            return self._put(key, data)

    def list(self, prefix: str = "") -> Iterator[Entry]:
        with self._lock:
            found = [Entry(key, len(data)) for key, (data, _) in self._values.items()]
        yield from sorted((entry for entry in found if entry.key.startswith(prefix)), key=lambda e: e.key)

    def delete(self, key: str) -> None:
        with self._lock:
            self._values.pop(valid_key(key), None)

    def _value(self, key: str) -> tuple[bytes, int]:
        try:
            return self._values[valid_key(key)]
        except KeyError:
            raise NotFound(f"{key} does not exist in {self.uri}") from None

    def _put(self, key: str, data: bytes) -> str:
        self._writes += 1
        self._values[valid_key(key)] = (data, self._writes)
        return str(self._writes)
