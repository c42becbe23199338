"""Stores that answer badly, lie, fill up or are interrupted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from spillover.errors import InputError, Lost, NotFound, Retry, StoreError, StoreRefused, Unknown
from spillover.store import Fault, FaultyStore, LocalStore, MemoryStore, Store, open_store, probe
from spillover.store.cloud import CloudStore
from spillover.store.filesystem import filesystem, require_local
from store.proxy import AFTER, BEFORE, CONFLICT, FORWARD, SILENT, FaultProxy, conditional_puts

Proxied = Callable[[list[str]], tuple[CloudStore, FaultProxy]]


@pytest.fixture
def proxied(s3: Callable[[], str], s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxied]:
    """A function: fates of conditional writes -> an S3 store behind a proxy that deals them."""
    proxies = []

    def make(fates: list[str]) -> tuple[CloudStore, FaultProxy]:
        proxy = FaultProxy(s3_endpoint, conditional_puts(fates))
        proxies.append(proxy)
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        return CloudStore(s3(), timeout=2), proxy

    yield make
    for proxy in proxies:
        proxy.close()


@pytest.mark.parametrize("fate", [BEFORE, AFTER, SILENT])
def test_no_clear_answer_to_a_conditional_write_is_unknown_and_not_retried(
    proxied: Proxied, fate: str
) -> None:
    store, proxy = proxied([fate])
    with pytest.raises(Unknown):
        store.create("key", b"mine")
    assert [call for call in proxy.seen if call.startswith("PUT")] == [f"PUT {fate}"]
    if fate == BEFORE:
        with pytest.raises(NotFound):
            store.read("key")
    else:
        assert store.read("key").data == b"mine"


@pytest.mark.parametrize("fate", [BEFORE, AFTER])
def test_an_unknown_replace_may_or_may_not_have_happened(proxied: Proxied, fate: str) -> None:
    store, _ = proxied([FORWARD, fate])
    version = store.create("key", b"old")
    with pytest.raises(Unknown):
        store.replace("key", b"new", version)
    assert store.read("key").data == (b"old" if fate == BEFORE else b"new")


def test_http_409_means_read_again(proxied: Proxied) -> None:
    store, _ = proxied([CONFLICT, FORWARD, CONFLICT])
    with pytest.raises(Retry):
        store.create("key", b"1")
    version = store.create("key", b"1")
    with pytest.raises(Retry):
        store.replace("key", b"2", version)
    assert store.read("key").data == b"1"


def test_http_412_means_lost(proxied: Proxied) -> None:
    store, _ = proxied([])
    version = store.create("key", b"1")
    store.replace("key", b"2", version)
    with pytest.raises(Lost):
        store.replace("key", b"3", version)


def test_plain_calls_are_retried(
    s3: Callable[[], str], s3_endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = [BEFORE, BEFORE]
    proxy = FaultProxy(s3_endpoint, lambda *_: failures.pop() if failures else FORWARD)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
    store = CloudStore(s3())
    store.write("key", b"value")
    assert store.read("key").data == b"value"
    assert len(failures) == 0
    proxy.close()


def test_nobody_at_the_endpoint_is_one_line(s3: Callable[[], str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    store = CloudStore(s3(), timeout=1)
    with pytest.raises(Unknown) as failure:
        store.create("key", b"")
    assert "\n" not in str(failure.value)


class Lying(MemoryStore):
    """An S3 that accepts the preconditions and ignores some of them."""

    def __init__(self, lie: str) -> None:
        super().__init__()
        self.lie = lie

    def create(self, key: str, data: bytes) -> str:
        if self.lie == "create":
            self.write(key, data)
            return self.read(key).version
        return super().create(key, data)

    def replace(self, key: str, data: bytes, version: str) -> str:
        if self.lie == "stale" and key in self._values:
            self.write(key, data)
            return self.read(key).version
        if self.lie == "missing" and key not in self._values:
            return self.create(key, data)
        if self.lie == "overwrites":
            try:
                return super().replace(key, data, version)
            except Lost:
                if key in self._values:
                    self.write(key, data)
                raise
        return super().replace(key, data, version)


@pytest.mark.parametrize(
    ("lie", "named"),
    [
        ("create", "racing creates"),
        ("stale", "stale version"),
        ("missing", "missing key"),
        ("overwrites", "refused changed"),
    ],
)
def test_the_probe_names_the_broken_promise(lie: str, named: str) -> None:
    store = Lying(lie)
    with pytest.raises(StoreRefused, match=named):
        probe(store)
    assert [*store.list()] == []


def test_a_network_filesystem_is_refused_unless_declared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spillover.store.filesystem.filesystem", lambda _: "fuse.glusterfs")
    with pytest.raises(StoreRefused, match=r"fuse\.glusterfs"):
        probe(open_store(tmp_path / "state"))
    declaration = tmp_path / "declaration.json"
    facts = {"profile": "gluster", "locks": "seen", "durability_description": "replica 3"}
    monkeypatch.setenv("SPILL_STORAGE_DECLARATION", str(declaration))
    declaration.write_text(json.dumps(facts | {"path": str(tmp_path), "direct_mount": True}))
    probe(open_store(tmp_path / "state"))
    declaration.write_text(json.dumps(facts | {"path": "/elsewhere", "direct_mount": True}))
    with pytest.raises(StoreRefused):
        require_local(tmp_path)
    declaration.write_text("{}")
    with pytest.raises(InputError, match=str(declaration)):
        require_local(tmp_path)


def test_the_filesystem_of_a_path_that_does_not_exist_yet_is_its_parents(tmp_path: Path) -> None:
    assert filesystem(tmp_path / "not" / "yet") == filesystem(tmp_path) != ""
    assert filesystem(Path("/proc/self")) == "proc"


@pytest.mark.parametrize("kind", ["before", "after", "twice", "delay"])
def test_faulty_store_does_what_it_says(kind: str) -> None:
    inner = MemoryStore()
    store = FaultyStore(inner, Fault(2, kind, seconds=0.01))  # type: ignore[arg-type]
    store.write("other", b"")
    if kind in ("before", "after"):
        with pytest.raises(Unknown, match="create key"):
            store.create("key", b"1")
    else:
        store.create("key", b"1")
    assert ("key" in inner._values) == (kind != "before")
    assert store.calls == ["write other", "create key"]


def test_a_late_write_lands_before_the_next_call_and_is_refused_after_a_newer_one() -> None:
    inner = MemoryStore()
    version = inner.create("key", b"1")
    store = FaultyStore(inner, Fault(1, "late"))
    with pytest.raises(Unknown):
        store.replace("key", b"late", version)
    inner.replace("key", b"newer", version)
    assert store.read("key").data == b"newer"


def test_a_plain_call_that_fails_is_not_unknown() -> None:
    store = FaultyStore(MemoryStore(), Fault(1, "after"))
    with pytest.raises(StoreError) as failure:
        store.write("key", b"")
    assert not isinstance(failure.value, Unknown)


def test_unknown_schemes_and_missing_buckets_are_refused() -> None:
    with pytest.raises(InputError, match="unknown scheme 'ftp'"):
        open_store("ftp://host/x")
    with pytest.raises(InputError, match="names no bucket"):
        open_store("s3://")


def test_temporary_files_of_dead_writers_are_swept_and_live_ones_are_not(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    writing = subprocess.Popen([sys.executable, "-c", SLOW_WRITER, str(tmp_path)], stdout=subprocess.PIPE)
    assert writing.stdout is not None
    assert writing.stdout.readline() == b"writing\n"
    assert isinstance(store, LocalStore)
    assert store.sweep() == 0
    os.kill(writing.pid, signal.SIGKILL)
    writing.wait()
    writing.stdout.close()
    assert [path.name[:5] for path in tmp_path.iterdir()] == [".tmp-"]
    assert store.sweep() == 1
    assert [*tmp_path.iterdir()] == []


SLOW_WRITER = """
import sys, time
from pathlib import Path
from spillover.store import open_store

def pieces():
    yield b"half"
    print("writing", flush=True)
    time.sleep(60)

open_store(Path(sys.argv[1])).write("key", pieces)
"""


def test_a_lock_dies_with_its_process(tmp_path: Path) -> None:
    from spillover.errors import LockContended

    store: Store = open_store(tmp_path)
    code = (
        "import sys, time; from spillover.store import open_store;"
        "hold = open_store(sys.argv[1]).hold('owners/x'); print('held', flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"held\n"
    with pytest.raises(LockContended):
        store.hold("owners/x")
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    holder.stdout.close()
    hold = store.hold("owners/x")
    assert hold is not None
    hold.release()
    assert not (tmp_path / "owners" / "x").exists()
