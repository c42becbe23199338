"""What every store promises, run against each backend."""

from __future__ import annotations

import hashlib
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spillover.errors import InputError, Lost, NotFound, Retry, StoreError
from spillover.store import MemoryStore, Store, open_store, probe
from spillover.store.cloud import PART


@pytest.fixture(params=["local", "memory", "s3", "faulty"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "local":
        return open_store(tmp_path / "store")
    if request.param == "memory":
        return MemoryStore()
    if request.param == "faulty":
        from spillover.store import FaultyStore

        return FaultyStore(open_store(tmp_path / "store"))
    return open_store(request.getfixturevalue("s3")())


def test_a_written_value_is_read_back(store: Store) -> None:
    store.write("a/b", b"first")
    store.write("a/b", b"second")
    assert store.read("a/b").data == b"second"
    assert store.head("a/b").size == 6
    assert store.read_range("a/b", 1, 4) == b"eco"
    assert store.read_range("a/b", 4, 100) == b"nd"
    assert store.read_range("a/b", 3, 3) == b""


@pytest.mark.parametrize("call", ["read", "head", "digest"])
def test_a_missing_key_is_not_found(store: Store, call: str) -> None:
    store.write("other", b"")
    with pytest.raises(NotFound, match="missing"):
        getattr(store, call)("missing")


def test_an_empty_value_is_a_value(store: Store) -> None:
    store.write("empty", b"")
    assert store.read("empty").data == b""
    assert store.digest("empty").sha256 == hashlib.sha256().hexdigest()


def test_create_happens_once(store: Store) -> None:
    version = store.create("key", b"mine")
    with pytest.raises(Lost):
        store.create("key", b"theirs")
    blob = store.read("key")
    assert (blob.data, blob.version) == (b"mine", version)


def test_replace_needs_the_current_version(store: Store) -> None:
    first = store.create("key", b"1")
    second = store.replace("key", b"2", first)
    with pytest.raises(Lost):
        store.replace("key", b"3", first)
    assert store.read("key").data == b"2"
    assert store.read("key").version == second != first


def test_replace_of_a_missing_or_deleted_key_loses(store: Store) -> None:
    version = store.create("key", b"1")
    store.delete("key")
    with pytest.raises(Lost):
        store.replace("key", b"2", version)
    with pytest.raises(NotFound):
        store.read("key")


def test_delete_twice_is_fine(store: Store) -> None:
    store.write("folder/key", b"1")
    store.delete("folder/key")
    store.delete("folder/key")
    assert [*store.list()] == []


def test_list_is_sorted_and_by_prefix_not_only_by_folder(store: Store) -> None:
    for key in ("rows/b", "rows/a/x", "row", "rows.txt", "z"):
        store.write(key, b"12")
    assert [entry.key for entry in store.list()] == ["row", "rows.txt", "rows/a/x", "rows/b", "z"]
    assert [entry.key for entry in store.list("rows/")] == ["rows/a/x", "rows/b"]
    assert [entry.key for entry in store.list("rows")] == ["rows.txt", "rows/a/x", "rows/b"]
    assert [entry.size for entry in store.list("z")] == [2]
    assert [*store.list("nothing/")] == []


@pytest.mark.parametrize("key", ["", "/etc/passwd", "../up", "a/../../b", "a//b", ".", "a/"])
def test_keys_cannot_leave_the_store(store: Store, key: str) -> None:
    with pytest.raises(InputError):
        store.write(key, b"")


def test_large_values_stream_in_and_out(store: Store, tmp_path: Path) -> None:
    block = os.urandom(1 << 20)
    count = 2 * PART // len(block) + 3

    def pieces():
        yield from (block for _ in range(count))

    store.write("large", pieces)
    wanted = hashlib.sha256(block * count).hexdigest()
    assert store.head("large").size == count * len(block)
    assert store.digest("large").sha256 == wanted
    copy = tmp_path / "copy"
    assert store.fetch("large", copy).sha256 == wanted
    store.write("again", copy)
    assert store.digest("again").sha256 == wanted


def test_one_of_many_creates_wins(store: Store) -> None:
    for race in range(5):
        assert _race(store, lambda n, key=f"race-{race}": store.create(key, b"%d" % n), 4) == 1


def test_one_of_many_replaces_wins(store: Store) -> None:
    version = store.create("key", b"0")
    assert _race(store, lambda n: store.replace("key", b"by %d" % n, version), 4) == 1


def test_readers_see_whole_values_only(store: Store) -> None:
    store.write("key", b"0" * 100_000)
    over = threading.Event()

    def write() -> None:
        for n in range(30):
            store.write("key", str(n % 10).encode() * 100_000)
        over.set()

    with ThreadPoolExecutor() as pool:
        writing = pool.submit(write)
        seen = []
        while not over.is_set():
            seen.append(set(store.read("key").data))
            if writing.done():
                break
        writing.result()
    assert all(len(values) == 1 for values in seen)


def test_the_probe_accepts_it_and_leaves_nothing(store: Store) -> None:
    probe(store)
    assert [*store.list()] == []


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["write", "create", "replace", "delete"]), st.sampled_from("ab"), st.binary()
        ),
        max_size=12,
    )
)
def test_any_sequence_of_calls_equals_a_dictionary(tmp_path_factory: pytest.TempPathFactory, steps) -> None:
    stores: list[Store] = [open_store(tmp_path_factory.mktemp("any")), MemoryStore()]
    for store in stores:
        model: dict[str, bytes] = {}
        for call, key, data in steps:
            if call == "write":
                store.write(key, data)
                model[key] = data
            elif call == "delete":
                store.delete(key)
                model.pop(key, None)
            elif call == "create" and key not in model:
                store.create(key, data)
                model[key] = data
            elif call == "replace" and key in model:
                store.replace(key, data, store.read(key).version)
                model[key] = data
        assert {entry.key: store.read(entry.key).data for entry in store.list()} == model


def _race(store: Store, act, racers: int) -> int:
    """Start ``act`` in many threads at once and return how many succeeded."""
    start = threading.Barrier(racers)

    def run(n: int) -> bool:
        start.wait()
        while True:
            try:
                act(n)
                return True
            except Lost:
                return False
            except Retry:
                continue
            except StoreError as error:  # a refusal that is not an answer would hide a lost race
                raise AssertionError(error) from error

    with ThreadPoolExecutor(racers) as pool:
        return sum(pool.map(run, range(racers)))
