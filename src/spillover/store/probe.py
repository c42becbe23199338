"""Does this store really keep its promises? Asked once, before state is first written there.

Fencing rests on two calls: `create` must let one of two writers win, and `replace` must refuse a
version that is not current. Some servers that speak S3 accept the headers and ignore them; on such a
store two machines could both believe that they own the state. The probe races throw-away keys and
refuses a store that gets one of the answers wrong.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from spillover.errors import Lost, NotFound, Retry, StoreRefused
from spillover.store.base import Store

__all__ = ["PROBE", "probe"]

PROBE = ".probe-"
RACERS = 2


def probe(store: Store) -> None:
    """Check the conditional writes of ``store``; leaves nothing behind.

    Raises:
        StoreRefused: the store broke a promise; the message names which.
        StoreError: the store cannot be reached or written at all.
    """
    store.require_safe()
    key = f"{PROBE}{secrets.token_hex(6)}"
    try:
        _probe_missing(store, key)
        version = _probe_create(store, key)
        _probe_replace(store, key, version)
    finally:
        store.delete(key)


def _probe_missing(store: Store, key: str) -> None:
    _must_lose(store, "replace of a missing key", lambda: store.replace(key, b"0", '"0"'))


def _probe_create(store: Store, key: str) -> str:
    """Race creates: exactly one may win, and its bytes are what is read."""
    with ThreadPoolExecutor(RACERS) as pool:
        wins = [*pool.map(lambda n: _won(lambda: store.create(key, b"%d" % n)), range(RACERS))]
    if sum(wins) != 1:
        _refuse(store, f"{sum(wins)} of {RACERS} racing creates of one key succeeded")
    blob = store.read(key)
    if blob.data != b"%d" % wins.index(True):
        _refuse(store, "a create that lost left its bytes")
    _must_lose(store, "create of an existing key", lambda: store.create(key, b"x"))
    return blob.version


def _probe_replace(store: Store, key: str, version: str) -> None:
    newer = store.replace(key, b"newer", version)
    _must_lose(store, "replace with a stale version", lambda: store.replace(key, b"stale", version))
    if store.read(key).data != b"newer":
        _refuse(store, "a replace that was refused changed the bytes")
    store.replace(key, b"newest", newer)
    if store.read(key).data != b"newest":
        _refuse(store, "a read did not see the write before it")


def _won(act: Callable[[], object]) -> bool:
    while True:
        try:
            act()
            return True
        except (Lost, NotFound):
            return False
        except Retry:
            continue


def _must_lose(store: Store, what: str, act: Callable[[], object]) -> None:
    if _won(act):
        _refuse(store, f"{what} succeeded")


def _refuse(store: Store, what: str) -> None:
    raise StoreRefused(
        f"{store.uri} cannot hold owned state: {what}",
        hint="use a local folder, or an object store with conditional writes (If-None-Match, If-Match)",
    )
