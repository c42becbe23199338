"""Payloads: complete or invisible, verified when read, deleted only when nothing needs them."""

from __future__ import annotations

from pathlib import Path

import pytest

from spillover.errors import Corrupt, StoreError, Superseded
from spillover.state import Owned, Reference, State
from spillover.store import Fault, FaultyStore, LocalStore, MemoryStore

IDENTITY = {"work": "payloads"}


def save(owned: Owned, step: int, names: tuple[Reference, ...] = ()) -> Reference:
    writer = owned.payload("ckpt", f"step-{step:09d}")
    writer.add("params", b"p" * 1000 * step)
    writer.add("state.json", b'{"step": %d}' % step)
    reference = writer.commit(step=step, cursor={"next": step}, names=names)
    owned.publish("ckpt", reference, {"step": step})
    return reference


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "state")


def test_a_payload_reads_back_with_its_manifest(store: LocalStore, tmp_path: Path) -> None:
    with State(store).acquire(IDENTITY) as owned:
        reference = save(owned, 2)
        payload = owned.open(reference)
        assert payload.manifest.cursor == {"next": 2}
        assert payload.read("params") == b"p" * 2000
        payload.fetch("params", tmp_path / "copy")
        assert (tmp_path / "copy").read_bytes() == b"p" * 2000
        assert reference.bytes == 2000 + len(b'{"step": 2}')
        assert reference.folder.startswith("ckpt/step-000000002-g000001-")


@pytest.mark.parametrize("damage", ["flip", "truncate", "grow", "remove"])
@pytest.mark.parametrize("name", ["params", "state.json", "COMMIT"])
def test_damage_is_found_and_named(store: LocalStore, tmp_path: Path, name: str, damage: str) -> None:
    with State(store).acquire(IDENTITY) as owned:
        reference = save(owned, 2)
        path = store.root / reference.folder / name
        data = path.read_bytes()
        if damage == "flip":
            path.write_bytes(data[:5] + bytes([data[5] ^ 1]) + data[6:])
        elif damage == "truncate":
            path.write_bytes(data[:-1])
        elif damage == "grow":
            path.write_bytes(data + b"x")
        else:
            path.unlink()
        with pytest.raises(Corrupt, match=f"{reference.folder}/{name}") as failure:
            owned.open(reference).verify()
        assert "--from-previous" in (failure.value.hint or "")
        if name == "params":
            with pytest.raises(Corrupt):
                owned.open(reference).fetch(name, tmp_path / "copy")
            assert not (tmp_path / "copy").exists()


def test_a_store_that_stores_something_else_is_caught_before_publishing() -> None:
    class Scratched(MemoryStore):
        def write(self, key, source):
            super().write(key, b"other" if key.endswith("params") else source)

    with State(Scratched()).acquire(IDENTITY) as owned, pytest.raises(Corrupt, match="does not read back"):
        save(owned, 1)
    document = State(owned.store).read()
    assert document is not None
    assert document.current == {}


def test_a_failed_upload_publishes_nothing() -> None:
    store = FaultyStore(MemoryStore())
    with State(store).acquire(IDENTITY) as owned:
        save(owned, 1)
        store.fault = Fault(len(store.calls) + 2, "before")
        with pytest.raises(StoreError, match="injected"):
            save(owned, 2)
        assert owned.document.current["ckpt"].step == 1


def test_two_checkpoints_are_kept_and_older_ones_dropped(store: LocalStore) -> None:
    with State(store).acquire(IDENTITY) as owned:
        for step in range(1, 6):
            save(owned, step)
            assert folders(store) == {max(1, step - 1), step} if step > 1 else {1}


def test_leftovers_of_dead_writers_are_swept_but_not_a_later_owners_work(store: LocalStore) -> None:
    state = State(store)
    first = state.acquire(IDENTITY)
    kept = save(first, 1)
    first.payload("ckpt", "step-000000007").add("params", b"half")
    orphan = first.payload("ckpt", "step-000000008")
    orphan.add("params", b"whole")
    orphan.commit(step=8)
    second = state.acquire(IDENTITY, takeover=True)
    assert folders(store) == {1}
    unpublished = second.payload("ckpt", "step-000000009")
    unpublished.add("params", b"in progress")
    reference = unpublished.commit(step=9)
    # The first owner wakes up in the middle of its own sweep, with a list that names everything.
    from spillover.state.retention import sweep_orphans

    assert sweep_orphans(store, first.document, first.generation) == []
    with pytest.raises(Superseded):
        save(first, 2)
    second.publish("ckpt", reference, {})
    second.open(reference).verify()
    assert kept.folder not in {reference.folder}
    second.release()


def test_nothing_is_deleted_when_a_manifest_is_damaged(store: LocalStore) -> None:
    state = State(store)
    with state.acquire(IDENTITY) as owned:
        save(owned, 1)
        second = save(owned, 2)
    (store.root / second.folder / "COMMIT").write_bytes(b"{}")
    with state.acquire(IDENTITY) as owned, pytest.raises(Corrupt):
        owned.open(owned.document.current["ckpt"])
    assert folders(store) == {1, 2}


def folders(store: LocalStore) -> set[int]:
    return {int(path.name.split("-")[1]) for path in (store.root / "ckpt").iterdir()}
