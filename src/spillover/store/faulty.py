"""A store that fails on purpose, to show that nothing above it depends on luck.

`FaultyStore` counts the calls that reach it and injects one fault at a chosen call:

===========  ===========================================================================
``before``   raise without acting
``after``    act, then raise: the response was lost
``kill``     SIGKILL this process before acting
``killed``   act, then SIGKILL this process
``delay``    act, ``seconds`` later
``twice``    act twice, as a network that duplicates requests would
``late``     raise now and act at call ``at + 1``, before that call: a delayed write
===========  ===========================================================================

A conditional write that raises raises `Unknown`; any other call raises `StoreError`.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias, TypeVar

from spillover.errors import StoreError, Unknown
from spillover.store.base import Blob, Entry, Hold, Source, Store

__all__ = ["Fault", "FaultyStore"]

Kind: TypeAlias = Literal["before", "after", "kill", "killed", "delay", "twice", "late"]
T = TypeVar("T")


@dataclass(frozen=True)
class Fault:
    """The fault ``kind`` at call number ``at``, counted from 1."""

    at: int
    kind: Kind
    seconds: float = 0.0


class FaultyStore(Store):
    """``inner`` with one fault; without a fault it only counts and records.

    ``calls`` lists what was asked for, as ``"replace control.json"``.
    """

    def __init__(self, inner: Store, fault: Fault | None = None) -> None:
        self.inner = inner
        self.uri = inner.uri
        self.fault = fault
        self.calls: list[str] = []
        self._lock = threading.Lock()
        self._pending: Callable[[], object] | None = None

    def read(self, key: str) -> Blob:
        return self._call("read", key, lambda: self.inner.read(key))

    def read_range(self, key: str, start: int, stop: int) -> bytes:
        return self._call("read_range", key, lambda: self.inner.read_range(key, start, stop))

    def head(self, key: str) -> Entry:
        return self._call("head", key, lambda: self.inner.head(key))

    def write(self, key: str, source: Source) -> None:
        self._call("write", key, lambda: self.inner.write(key, source))

    def create(self, key: str, data: bytes) -> str:
        return self._call("create", key, lambda: self.inner.create(key, data), conditional=True)

    def replace(self, key: str, data: bytes, version: str) -> str:
        return self._call("replace", key, lambda: self.inner.replace(key, data, version), conditional=True)

    def list(self, prefix: str = "") -> Iterator[Entry]:
        return iter(self._call("list", prefix, lambda: [*self.inner.list(prefix)]))

    def delete(self, key: str) -> None:
        self._call("delete", key, lambda: self.inner.delete(key))

    def hold(self, key: str) -> Hold | None:
        return self.inner.hold(key)

    def require_safe(self) -> None:
        self.inner.require_safe()

    def sweep(self) -> int:
        return self.inner.sweep()

    def _call(self, name: str, key: str, act: Callable[[], T], *, conditional: bool = False) -> T:
        with self._lock:
            self.calls.append(f"{name} {key}")
            late, self._pending = self._pending, None
            due = self.fault is not None and len(self.calls) == self.fault.at
        if late is not None:
            _quietly(late)
        if not due or self.fault is None:
            return act()
        return self._fail(self.fault, f"{name} {key}", act, conditional)

    def _fail(self, fault: Fault, what: str, act: Callable[[], T], conditional: bool) -> T:
        if fault.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault.kind == "delay":
            time.sleep(fault.seconds)
            return act()
        if fault.kind == "late":
            self._pending = act
        if fault.kind == "twice":
            result = act()
            _quietly(act)
            return result
        if fault.kind in ("after", "killed"):
            _quietly(act)
        if fault.kind == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        error = Unknown if conditional else StoreError
        raise error(f"injected at call {fault.at}: {what}")


def _quietly(act: Callable[[], object]) -> None:
    """Run a request whose answer nobody hears."""
    try:
        act()
    except StoreError:
        return
