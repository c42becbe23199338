"""Reading: every byte checked, nothing else read, and what somebody reads stays."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from spillover.errors import Collected, Corrupt, InputError
from spillover.pool import Link, Owners, Pool, Reader, Record, Ref, Tensor
from spillover.pool import reader as sessions
from spillover.pool.layout import CHUNK

ROWS, COLUMNS = 1000, 300  # of float32: 1,200 bytes a row, 19 chunks, and chunks end inside of rows


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    with Pool.open(tmp_path / "pool", create=True) as found:
        yield found


@pytest.fixture(scope="module")
def array() -> np.ndarray[Any, Any]:
    return np.random.default_rng(1).standard_normal((ROWS, COLUMNS)).astype(np.float32)


@pytest.fixture
def preads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of all positioned reads."""
    sizes: list[int] = []
    preadv, pread = os.preadv, os.pread

    def counted_preadv(file: int, buffers: Any, offset: int) -> int:
        sizes.append(preadv(file, buffers, offset))
        return sizes[-1]

    def counted_pread(file: int, size: int, offset: int) -> bytes:
        data = pread(file, size, offset)
        sizes.append(len(data))
        return data

    monkeypatch.setattr(os, "preadv", counted_preadv)
    monkeypatch.setattr(os, "pread", counted_pread)
    return sizes


def damage(pool: Pool, ref: Ref, place: int) -> None:
    """Flip a bit at ``place`` of the payload of the only record of a publication."""
    with pool.folder.path_of(ref.pack).open("rb+") as file:
        file.seek(ref.offset + 64 + place)
        byte = file.read(1)[0]
        file.seek(ref.offset + 64 + place)
        file.write(bytes([byte ^ 4]))


@pytest.mark.parametrize(
    ("start", "stop"),
    [(0, 1), (0, 0), (999, 1000), (54, 55), (54, 56), (100, 400), (0, 1000), (1000, 1000), (1, 999)],
)
def test_rows(pool: Pool, array: np.ndarray[Any, Any], start: int, stop: int) -> None:
    tensor = pool.tensor(pool.publish([Record("t", array)]).at(0))
    np.testing.assert_array_equal(tensor.rows(start, stop), array[start:stop])
    np.testing.assert_array_equal(tensor[start:stop], array[start:stop])
    assert torch.equal(tensor.torch_rows(start, stop), torch.from_numpy(array)[start:stop])
    out = np.full((stop - start, COLUMNS), np.nan, np.float32)
    assert np.shares_memory(tensor.rows(start, stop, out), out) or start == stop
    np.testing.assert_array_equal(out, array[start:stop])


def test_slices_mean_what_they_mean_elsewhere(pool: Pool) -> None:
    array = np.arange(30).reshape(10, 3)
    tensor = pool.tensor(pool.publish([Record("t", array)]).at(0))
    assert len(tensor) == 10
    for part in (slice(None), slice(-3, None), slice(5, 2), slice(3, 100), slice(-100, 4), slice(2, 7, 1)):
        np.testing.assert_array_equal(tensor[part], array[part])
    for wrong in (slice(0, 5, 2), slice(None, None, -1)):
        with pytest.raises(InputError, match="step 1"):
            tensor[wrong]
    with pytest.raises(InputError):
        tensor[3]  # type: ignore[index]
    for start, stop in ((-1, 3), (5, 4), (0, 11)):
        with pytest.raises(InputError, match="10 rows"):
            tensor.rows(start, stop)


def test_rows_read_their_chunks_and_no_more(
    pool: Pool, array: np.ndarray[Any, Any], preads: list[int]
) -> None:
    ref = pool.publish([Record("t", array)]).at(0)
    tensor = pool.tensor(ref)
    for start, stop in ((0, 1), (54, 55), (500, 501), (100, 400)):
        preads.clear()
        tensor.rows(start, stop)
        touched = (stop * COLUMNS * 4 - 1) // CHUNK - start * COLUMNS * 4 // CHUNK + 1
        assert sum(preads) <= touched * CHUNK


def test_rows_are_checked_and_the_rest_is_not(pool: Pool, array: np.ndarray[Any, Any]) -> None:
    ref = pool.publish([Record("t", array)]).at(0)
    tensor = pool.tensor(ref)
    broken = 5  # a chunk
    damage(pool, ref, broken * CHUNK + 77)
    for row in range(0, ROWS, 3):
        first, last = row * COLUMNS * 4 // CHUNK, ((row + 1) * COLUMNS * 4 - 1) // CHUNK
        if first <= broken <= last:
            with pytest.raises(Corrupt, match=rf"record 't' .* chunk {broken}, bytes") as refused:
                tensor.rows(row, row + 1)
            assert str(pool.folder.path_of(ref.pack)) in str(refused.value)
        else:
            np.testing.assert_array_equal(tensor.rows(row, row + 1), array[row : row + 1])
    for act in (tensor.numpy, tensor.torch, lambda: pool.record(ref).payload.numpy()):
        with pytest.raises(Corrupt, match="chunk 5"):
            act()
    pool.seal()
    assert len(pool.verify().damaged) == 1


@pytest.mark.parametrize("kind", [b"x" * 70_000, {"json": "y" * 70_000}], ids=["bytes", "json"])
def test_damaged_records_are_not_returned(pool: Pool, kind: Any) -> None:
    ref = pool.publish([Record("r", kind)]).at(0)
    damage(pool, ref, 69_999)
    with pytest.raises(Corrupt, match=r"record 'r' .* chunk 1"):
        pool.record(ref)
    with pytest.raises(Corrupt, match="chunk 1"):
        pool.reader().read_into(ref, bytearray(80_000))


BUFFERS: dict[str, Callable[[int], Any]] = {
    "bytearray": bytearray,
    "memoryview": lambda size: memoryview(bytearray(size)),
    "numpy": lambda size: np.zeros(size, np.uint8),
    "numpy-2d": lambda size: np.zeros((size // 8, 2), np.float32),
    "torch": lambda size: torch.zeros(size, dtype=torch.uint8),
    "torch-float": lambda size: torch.zeros(size // 4),
    "torch-bfloat16": lambda size: torch.zeros(size // 2, dtype=torch.bfloat16),
}


@pytest.mark.parametrize("kind", BUFFERS)
@pytest.mark.parametrize("extra", [0, 64])
def test_reading_into_memory_of_the_caller(pool: Pool, kind: str, extra: int) -> None:
    array = np.random.default_rng(2).integers(0, 256, 200_000).astype(np.uint8)
    ref = pool.publish([Record("t", array), Record("b", array.tobytes())])
    for read in (
        lambda buffer: pool.tensor(ref.at(0)).read_into(buffer),
        lambda buffer: pool.reader().read_into(ref.at(0), buffer),
        lambda buffer: pool.reader().read_into(ref.at(1), buffer),
    ):
        buffer = BUFFERS[kind](array.nbytes + extra)
        assert read(buffer) == array.nbytes
        data = memory(buffer)
        assert data[: array.nbytes] == array.tobytes()
        assert data[array.nbytes :] == bytes(extra), "something behind the payload was written"


def memory(buffer: Any) -> bytes:
    found = buffer.view(torch.uint8).numpy() if isinstance(buffer, torch.Tensor) else buffer
    return memoryview(found).tobytes()


@pytest.mark.parametrize(
    "wrong",
    [
        bytearray(799),
        b"x" * 800,
        np.zeros(1600, np.uint8)[::2],
        np.zeros(800, np.uint8)[::-1],
        np.broadcast_to(np.zeros(1, np.uint8), 800),
        torch.zeros(1600, dtype=torch.uint8)[::2],
        torch.zeros(800, dtype=torch.uint8, device="meta"),
        torch.zeros(99, dtype=torch.float64),
        "x" * 800,
        800,
        None,
    ],
    ids=range(11),
)
def test_memory_that_does_not_fit_is_refused_and_not_written(pool: Pool, wrong: Any) -> None:
    ref = pool.publish([Record("t", np.ones(800, np.uint8))]).at(0)
    before = bytes(wrong) if isinstance(wrong, (bytes, bytearray)) else None
    with pytest.raises(InputError) as refused:
        pool.reader().read_into(ref, wrong)
    assert "\n" not in str(refused.value)
    if wrong is not None:
        with pytest.raises(InputError):
            pool.tensor(ref).read_into(wrong)
        with pytest.raises(InputError):
            pool.tensor(ref).rows(0, 800, wrong)
    if before is not None:
        assert bytes(wrong) == before


def test_a_tensor_is_read_in_place_and_the_memory_is_the_callers(pool: Pool) -> None:
    array = np.arange(1000, dtype=np.float32).reshape(100, 10)
    tensor = pool.tensor(pool.publish([Record("t", array)]).at(0))
    memory = np.zeros(5000, np.uint8)
    found = tensor.numpy(memory)
    assert np.shares_memory(found, memory)
    np.testing.assert_array_equal(found, array)
    target = torch.zeros(100, 10)
    assert tensor.torch(target).data_ptr() == target.data_ptr()
    assert torch.equal(target, torch.from_numpy(array))


def test_what_is_no_tensor_says_so(pool: Pool) -> None:
    ref = pool.publish([Record("j", 1)])
    with pytest.raises(InputError, match="'j' is no tensor"):
        pool.tensor(ref.at(0))
    with pytest.raises(InputError, match="no bytes"):
        pool.reader().read_bytes(ref.at(0), 0, memoryview(bytearray(9)))


def unowned(pool: Pool, value: Any) -> Ref:
    """A publication that nobody owns, in a sealed pack of its own, whose index has been read before."""
    ref = pool.publish([Record("r", value)])
    assert pool.read(ref)["r"].id == "r"
    pool.close()
    return ref


def collected(pool: Pool) -> int:
    gc.collect()
    with pool.owners() as owners:
        return owners.collect().deleted


def held(pool: Pool, ref: Ref, kind: str) -> Any:
    """Something that keeps a publication from collection."""
    if kind == "set":
        return pool.read(ref)
    if kind == "tensor":
        return pool.tensor(ref.at(0))
    if kind == "record":
        return pool.record(ref.at(0))
    if kind == "pin":
        return pool.pin([ref])
    session = pool.reader()
    session.record(ref.at(0))
    return session


@pytest.mark.parametrize("kind", ["set", "tensor", "record", "pin", "session"])
def test_what_somebody_reads_stays(pool: Pool, kind: str) -> None:
    array = np.arange(1000)
    ref = unowned(pool, array)
    hold = held(pool, ref, kind)
    assert collected(pool) == 0
    if isinstance(hold, Tensor):
        np.testing.assert_array_equal(hold[10:20], array[10:20])
    np.testing.assert_array_equal(pool.record(ref.at(0)).payload.numpy(), array)
    if isinstance(hold, Reader) or kind == "pin":
        hold.close()
    else:
        del hold
    assert collected(pool) == 1
    with pytest.raises(Collected, match="nobody owned"):
        pool.read(ref)
    with pytest.raises(Collected):
        pool.pin([ref])


def test_sessions_and_pins_end_with_their_block(pool: Pool) -> None:
    ref = unowned(pool, 1)
    with pool.reader() as session, pool.pin([ref]):
        assert session.record(ref.at(0)).payload == 1
        assert collected(pool) == 0
    assert collected(pool) == 1


def test_a_pin_keeps_what_its_publications_need(pool: Pool) -> None:
    refs = [pool.publish([Record("r", 0)])]
    for number in range(1, 4):
        pool.seal()
        refs.append(pool.publish([Record("r", number), Link("before", refs[-1].at(0))]))
    pool.close()
    other = unowned(pool, "other")
    assert other.pack != refs[-1].pack
    with pool.pin([refs[-1]]):
        assert collected(pool) == 1
        assert [pool.record(ref.at(0)).payload for ref in refs] == [0, 1, 2, 3]
    assert collected(pool) == 4


def test_a_session_keeps_few_packs_and_few_indexes(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "OPEN_PACKS", 5)
    monkeypatch.setattr(sessions, "INDEX_BYTES", 20_000)
    refs = []
    for number in range(30):
        refs.append(pool.publish([Record("r", number, {"x": "y" * 500})]))
        pool.seal()
    before = len(os.listdir("/proc/self/fd"))
    with pool.reader() as session:
        for _ in range(3):
            for number, ref in enumerate(refs):
                assert session.record(ref.at(0)).payload == number
        assert len(os.listdir("/proc/self/fd")) - before <= 5
        assert len(session._packs) == 5
        assert 0 < session._indexes._bytes <= 20_000
        assert len(session._indexes._found) < 20
    assert len(os.listdir("/proc/self/fd")) == before


def test_many_lazy_tensors_take_one_descriptor_a_pack(pool: Pool) -> None:
    refs = [*pool.publish_tensors({str(number): np.full(3, number) for number in range(300)}).values()]
    before = len(os.listdir("/proc/self/fd"))
    tensors = [pool.tensor(ref) for ref in refs]
    sets = [pool.read(ref) for ref in refs]
    assert len(os.listdir("/proc/self/fd")) - before <= 1
    pool.close()
    child = os.fork()
    if child == 0:
        os._exit(0 if [int(tensor[1:2][0]) for tensor in tensors[::50]] == [*range(0, 300, 50)] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert collected(pool) == 0
    assert [int(tensor[0:1][0]) for tensor in tensors] == [*range(300)]
    del tensors, sets
    assert collected(pool) == 1


def test_one_session_serves_many_threads(pool: Pool, array: np.ndarray[Any, Any]) -> None:
    refs = []
    for number in range(12):
        refs.append(pool.publish([Record("n", number), Record("t", array[number : number + 50])]))
        pool.seal()
    wrong: list[BaseException] = []

    def work(session: Reader, seed: int) -> None:
        luck = np.random.default_rng(seed)
        try:
            for _ in range(150):
                number = int(luck.integers(12))
                assert session.record(refs[number].at(0)).payload == number
                row = int(luck.integers(50))
                np.testing.assert_array_equal(
                    session.tensor(refs[number].at(1)).rows(row, row + 1),
                    array[number + row : number + row + 1],
                )
        except BaseException as error:
            wrong.append(error)

    with pool.reader() as session:
        threads = [threading.Thread(target=work, args=(session, seed)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert not wrong


def test_a_session_is_used_in_a_forked_child(pool: Pool) -> None:
    refs = [pool.publish([Record("r", number)]) for number in range(3)]
    session = pool.reader()
    assert session.record(refs[0].at(0)).payload == 0
    child = os.fork()
    if child == 0:
        fine = [session.record(ref.at(0)).payload for ref in refs] == [0, 1, 2]
        session.close()
        os._exit(0 if fine else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    pool.close()
    assert collected(pool) == 0, "the child's end let go of what its parent reads"
    session.close()
    assert collected(pool) == 1


def rewritten(pool: Pool, owners: Owners) -> None:
    """Compact every pack of which anything is owned."""
    pool.seal()
    found = owners.compact(min_owned=1.1)
    assert found.damaged == []
    assert found.rewritten > 0


def test_references_survive_compaction_again_and_again(pool: Pool) -> None:
    array = np.arange(40_000)
    with pool.owners() as owners:
        data = pool.publish([Record("t", array)])
        refs = [pool.publish([Record("n", n), Link("t", data.at(0))]) for n in range(10)]
        owners.retain("me", refs[::2])
        pool.settle([data, *refs])
        packs = set()
        for turn in range(3):
            rewritten(pool, owners)
            packs.add(pool.reader().place(refs[0])[0])
            with pool.reader() as session:
                for number in range(0, 10, 2):
                    assert session.record(refs[number].at(0)).payload == number
                    np.testing.assert_array_equal(session.tensor(refs[number].at(1))[7:9], array[7:9])
            if turn == 1:  # what is published now refers to what moved
                refs.append(pool.publish([Record("n", 10), Link("t", refs[4].at(1))]))
                owners.retain("me", [refs[10]])
        assert len(packs) == 3
        for number in range(1, 10, 2):
            with pytest.raises(Collected):
                pool.read(refs[number])
        np.testing.assert_array_equal(pool.tensor(refs[10].at(1)).numpy(), array)
        assert owners.owned("me") == sorted({*refs[:10:2], refs[10]}, key=Ref.pack_bytes)


def test_a_reader_follows_while_packs_are_replaced(pool: Pool) -> None:
    """Reading goes on, without a gap, while the pack is rewritten over and over."""
    with pool.owners() as owners:
        refs = [pool.publish([Record("n", number)]) for number in range(20)]
        owners.retain("me", refs[::2])
        stop, wrong, rounds = threading.Event(), [], []

        def read() -> None:
            while not stop.is_set():
                for number in range(0, 20, 2):
                    try:
                        assert pool.record(refs[number].at(0)).payload == number
                    except BaseException as error:
                        wrong.append(error)
                        return
                rounds.append(1)

        threads = [threading.Thread(target=read) for _ in range(3)]
        for thread in threads:
            thread.start()
        for _ in range(25):
            owners.compact(min_owned=1.1)
            owners.collect()
            pool.seal()
        stop.set()
        for thread in threads:
            thread.join(60)
        assert not wrong
        assert len(rounds) > 3


def test_retaining_while_collecting_does_not_stand_still(pool: Pool) -> None:
    """A thread that retains opens packs, and a thread that collects locks them."""
    refs = []
    for number in range(300):
        refs.append(pool.publish([Record("n", number)]))
        pool.seal()
    pool.close()  # nobody's: all of it may be collected or retained
    outcomes: list[str] = []
    with pool.owners() as owners:

        def retain() -> None:
            for number, ref in enumerate(refs):
                try:
                    owners.retain(f"owner {number}", [ref])
                    outcomes.append("retained")
                except Collected:
                    outcomes.append("collected")

        thread = threading.Thread(target=retain, daemon=True)
        thread.start()
        for _ in range(30):
            owners.collect()
        thread.join(60)
        assert not thread.is_alive(), "the two wait for each other"
        for name in owners.names():
            assert pool.record(owners.owned(name)[0].at(0)).id == "n"
        assert len(owners.names()) == outcomes.count("retained")


def test_more_packs_than_descriptors(pool: Pool) -> None:
    """A collection of thousands of packs does not run out of descriptors."""
    import resource

    for number in range(700):
        pool.publish([Record("n", number)])
        pool.seal()
    pool.close()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (500, hard))
    try:
        assert collected(pool) == 700
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
