"""What the weight ring delivers: the bytes of the files, in the order asked for, in bounded memory."""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
import tempfile
import threading
import time
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from engine.stored import LAYERS, PAGE, SMALL, Stored, store
from spillover.engine.ring import Drive, Layout, Ring, forward, forward_backward
from spillover.engine.ring.shards import Shard
from spillover.errors import EngineError

ORDERS = {
    "forward": [*islice(forward(LAYERS), 40)],
    "forward and backward": [*islice(forward_backward(LAYERS), 40)],
    "backward": [*reversed(range(LAYERS))] * 6,
    "any": [3, 3, 3, 0, 5, 1, 5, 0, 2, 4, 4, 1, 0, 3, 5, 2, 1, 0, 5, 4, 3, 2],
}


@pytest.fixture(scope="module")
def disk():
    """A folder on a disk: /tmp may be memory."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def llama(disk) -> Stored:
    return store(disk / "llama")


@pytest.fixture(scope="module")
def mixtral(disk) -> Stored:
    return store(disk / "mixtral", "mixtral", shards=2)


def ring(stored: Stored, order, **layout) -> Ring:
    return Ring(stored.layers, Layout.of(stored.layers, SMALL, **layout), SMALL, order)


def same(stored: Stored, layer: int, tensors) -> bool:
    return all(one.data.tobytes() == stored.bytes_of(layer, name) for name, one in tensors.items())


# The index


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_parts_hold_each_tensor_of_the_layers_once(name, request):
    stored = request.getfixturevalue(name)
    found = [
        f"model.layers.{part.layer}.{tensor}"
        for layer, experts in zip(stored.layers.layers, stored.layers.experts, strict=True)
        for part in (layer, *experts)
        for tensor in part.tensors
    ]
    assert sorted(found) == sorted(name for name in stored.index.tensors if ".layers." in name)


def test_experts_are_apart(mixtral):
    layer = mixtral.layers.layers[2]
    assert "block_sparse_moe.gate.weight" in layer.tensors
    assert not [name for name in layer.tensors if ".experts." in name]
    assert {*mixtral.layers.experts[2][3].tensors} == {
        f"block_sparse_moe.experts.3.{one}.weight" for one in ("w1", "w2", "w3")
    }


def test_a_layer_is_one_read_where_it_lies_in_one_piece(llama):
    whole = [part for part in llama.layers.layers if len({e.file for e in part.extents}) == 1]
    parted = [part for part in llama.layers.layers if len({e.file for e in part.extents}) == 2]
    assert len(whole) + len(parted) == LAYERS and parted
    assert all(len(part.extents) == len({e.file for e in part.extents}) for part in llama.layers.layers)


@pytest.mark.parametrize(("gap", "reads"), [(1000, 1), (64 << 10, 1), (256 << 10, 9)])
def test_only_small_gaps_are_read(tmp_path, gap, reads):
    part = store(tmp_path, shards=1, gap=gap, layers=1).layers.layers[0]
    assert len(part.extents) == reads
    assert all(e.start % PAGE == e.stop % PAGE == e.offset % PAGE == 0 for e in part.extents)
    assert part.size == sum(e.stop - e.start for e in part.extents)


# What arrives


@pytest.mark.parametrize("slots", [2, 3, 5, 9])
@pytest.mark.parametrize("pinned", [(), (0, 1), (1, 4, 5), range(LAYERS)], ids=len)
@pytest.mark.parametrize("order", ORDERS)
def test_every_byte_is_that_of_the_file(llama, order, pinned, slots):
    numbers = ORDERS[order]
    with ring(llama, iter(numbers), pinned=pinned, slots=slots) as streamed:
        for number in numbers:
            with streamed.layer() as layer:
                assert layer.number == number
                assert {*layer.tensors} == {*llama.layers.layers[number].tensors}
                assert same(llama, number, layer.tensors)
        assert streamed.direct


def test_tensors_are_views_of_the_buffers(llama):
    memory = []

    def allocate(size):
        whole = np.frombuffer(mmap.mmap(-1, size), np.uint8)
        memory.append((whole.ctypes.data, whole.ctypes.data + size))
        return whole

    layout = Layout.of(llama.layers, SMALL, pinned=[1])
    with Ring(llama.layers, layout, SMALL, forward(LAYERS), allocate=allocate) as streamed:
        for number in range(2 * LAYERS):
            with streamed.layer() as layer:
                for name, one in layer.tensors.items():
                    begin, slice = one.data.ctypes.data, llama.index.tensors[
                        f"model.layers.{number % LAYERS}.{name}"
                    ]  # fmt: skip
                    assert any(low <= begin and begin + one.data.nbytes <= high for low, high in memory)
                    assert begin % PAGE == slice.start % PAGE
                    assert (one.dtype, one.shape) == (slice.dtype, slice.shape)
    assert sum(high - low for low, high in memory) == layout.bytes


def test_a_buffer_that_is_not_aligned_is_refused(llama):
    def allocate(size):
        return np.zeros(size + PAGE + 1, np.uint8)[1 : size + 1]

    with pytest.raises(ValueError, match="not at a multiple of 4096"):
        Ring(llama.layers, Layout.of(llama.layers, SMALL), SMALL, (), allocate=allocate)


def test_two_layers_may_be_held(llama):
    with ring(llama, forward(LAYERS), slots=3) as streamed:
        before = streamed.layer()
        for _ in range(3 * LAYERS):
            layer = streamed.layer()
            assert same(llama, before.number, before.tensors)
            assert same(llama, layer.number, layer.tensors)
            before.release()
            before.release()
            before = layer


# How much is read


def test_the_turn_of_a_backward_pass_reads_nothing_twice(llama):
    """With three buffers, the last three layers of one pass are the first of the next."""
    passes = 4
    numbers = [*islice(forward_backward(LAYERS), passes * LAYERS)]
    with ring(llama, numbers, slots=3) as streamed:
        for _ in numbers:
            streamed.layer().release()
        read = streamed.statistics().bytes_read
    sizes = [part.size for part in llama.layers.layers]
    once = sum(sizes)
    last, first = sum(sizes[-3:]), sum(sizes[:3])
    assert read <= once + (once - last) * 2 + (once - first)
    assert read > once + (once - last) * 2 + (once - first) - 4 * PAGE  # the ends of files


def test_pinned_layers_are_read_once(llama):
    numbers = [*range(LAYERS)] * 4
    with ring(llama, numbers, pinned=[0, 2, 3], slots=2) as streamed:
        for _ in numbers:
            streamed.layer().release()
        read = streamed.statistics().bytes_read
        layout = streamed.layout
    assert layout.pinned_bytes + 4 * layout.pass_bytes - 12 * PAGE < read
    assert read <= layout.pinned_bytes + 4 * layout.pass_bytes


def test_what_is_all_in_memory_is_not_read_again(llama):
    with ring(llama, forward(LAYERS), pinned=range(LAYERS)) as streamed:
        for _ in range(5 * LAYERS):
            with streamed.layer() as layer:
                assert same(llama, layer.number, layer.tensors)
        assert streamed.statistics().bytes_read <= streamed.layout.pinned_bytes == streamed.layout.bytes


def test_an_ended_order_reads_no_further(llama):
    with ring(llama, [4]) as streamed:
        streamed.layer().release()
        with pytest.raises(EngineError, match="order of layers has ended"):
            streamed.layer()
        assert streamed.statistics().bytes_read <= llama.layers.layers[4].size


def test_another_order_can_follow(llama):
    with ring(llama, forward(LAYERS)) as streamed:
        for turn in range(20):
            held = streamed.layer()
            numbers = [turn % LAYERS, held.number, 2, 5, 0]
            streamed.follow(numbers)
            for number in numbers:
                with streamed.layer() as layer:
                    assert layer.number == number
                    assert same(llama, number, layer.tensors)
            assert same(llama, held.number, held.tensors)
            held.release()
            streamed.follow(forward(LAYERS))


# Experts


@pytest.mark.parametrize("pinned", [(), (1, 3)])
def test_chosen_experts_are_read_on_demand(mixtral, pinned):
    chosen = [[4, 0, 2], [], [1], [3, 3, 1, 0, 2, 4]]
    with ring(mixtral, forward(LAYERS), pinned=pinned, expert_slots=2) as streamed:
        for number in range(3 * LAYERS):
            with streamed.layer() as layer:
                ids = chosen[number % len(chosen)]
                got = []
                for expert, tensors in layer.experts(ids):
                    got.append(expert)
                    assert same(mixtral, layer.number, tensors)
                    assert len(tensors) == 3
                assert got == [*dict.fromkeys(ids)]
                assert same(mixtral, layer.number, layer.tensors)


def test_nothing_but_the_chosen_experts_is_read(mixtral):
    with ring(mixtral, [0]) as streamed, streamed.layer() as layer:
        before = streamed.statistics().bytes_read
        for _ in layer.experts([1, 4]):
            pass
        read = streamed.statistics().bytes_read - before
        assert read <= sum(mixtral.layers.experts[0][one].size for one in (1, 4))


def test_experts_are_read_before_what_comes_later(mixtral, monkeypatch):
    real, go, read = Shard.read, threading.Event(), []

    def slow(shard, start, view, needed, what):
        read.append(what)
        assert not what.startswith("layer 1") or go.wait(20)
        return real(shard, start, view, needed, what)

    monkeypatch.setattr(Shard, "read", slow)
    drive = Drive(threads=1, read_bytes=PAGE)
    with Ring(mixtral.layers, Layout.of(mixtral.layers, drive), drive, forward(LAYERS)) as streamed:
        layer, got = streamed.layer(), []
        consumer = threading.Thread(target=lambda: got.extend(layer.experts([2])))
        consumer.start()
        while "layer 1" not in read or not streamed._readers._urgent:
            time.sleep(0.001)
        go.set()
        consumer.join(20)
        first, expert = read.index("layer 1"), mixtral.layers.experts[0][2].size // PAGE
        assert read[first + 1 :][:expert] == ["layer 0, expert 2"] * expert
        assert [number for number, _ in got] == [2]


def test_experts_of_a_pinned_layer_are_read_once(mixtral):
    with ring(mixtral, [0, 0, 0], pinned=[0]) as streamed:
        for turn in range(3):
            with streamed.layer() as layer:
                assert [expert for expert, _ in layer.experts([turn, turn + 1])] == [turn, turn + 1]
        parts = mixtral.layers.layers[0], *mixtral.layers.experts[0][:4]
        assert streamed.statistics().bytes_read <= sum(part.size for part in parts)


def test_kept_experts_stay_until_the_layer_is_released(mixtral):
    with ring(mixtral, forward(LAYERS), expert_slots=3) as streamed:
        for _ in range(2):
            with streamed.layer() as layer:
                kept = dict(layer.experts([4, 0, 3], keep=True))
                assert {*kept} == {0, 3, 4}
                assert all(same(mixtral, layer.number, tensors) for tensors in kept.values())
                with pytest.raises(EngineError, match="all 3 buffers are in use"):
                    next(iter(layer.experts([1])))


def test_an_abandoned_read_of_experts_leaves_its_buffers(mixtral):
    with ring(mixtral, forward(LAYERS), expert_slots=2) as streamed:
        for turn in range(4 * LAYERS):
            with streamed.layer() as layer:
                flow = iter(layer.experts(range(5)))
                for _ in range(turn % 4):
                    _, tensors = next(flow)
                    assert same(mixtral, layer.number, tensors)


def test_an_unknown_expert_is_one_line(mixtral, llama):
    unknown = pytest.raises(EngineError, match="layer 1 has 5 experts, none of number 5")
    with ring(mixtral, [1]) as streamed, streamed.layer() as layer, unknown:
        layer.experts([0, 5])
    dense = pytest.raises(EngineError, match="layer 1 has 0 experts")
    with ring(llama, [1]) as streamed, streamed.layer() as layer, dense:
        layer.experts([0])


# How it is read


def test_reads_pass_the_page_cache_by(disk):
    stored = store(disk / "cold", inner=4000)
    for file in stored.files:
        drop(file)
    with ring(stored, forward(LAYERS)) as streamed:
        for _ in range(LAYERS):
            with streamed.layer() as layer:
                assert same(stored, layer.number, layer.tensors)
        flags = [
            int(line.split()[1], 8)
            for file in stored.files
            for line in Path(f"/proc/self/fdinfo/{descriptor(file)}").read_text().splitlines()
            if line.startswith("flags")
        ]
    assert len(flags) == len(stored.files) and all(flag & os.O_DIRECT for flag in flags)
    # reading a header takes the first pages; of the rest nothing may be cached
    assert [cached(file, 64 << 10) for file in stored.files] == [0] * len(stored.files)


@pytest.mark.parametrize("place", ["/var/tmp", "/dev/shm"])
def test_other_ways_to_read_give_the_same(place):
    with tempfile.TemporaryDirectory(dir=place) as folder:
        stored = store(Path(folder))
        for direct in (True, False):
            layout = Layout.of(stored.layers, SMALL)
            with Ring(stored.layers, layout, SMALL, forward(LAYERS), direct=direct) as streamed:
                for _ in range(2 * LAYERS):
                    with streamed.layer() as layer:
                        assert same(stored, layer.number, layer.tensors)
                assert direct or not streamed.direct


def test_a_file_system_may_refuse_direct_reads():
    path = Path("/proc/version")  # one that does
    with pytest.raises(OSError, match="Invalid argument"):
        os.open(path, os.O_RDONLY | os.O_DIRECT)
    shard, content, buffer = Shard(path), path.read_bytes(), bytearray(PAGE)
    assert not shard.direct
    assert shard.read(0, memoryview(buffer), len(content), "a test") == len(content)
    assert buffer[: len(content)] == content
    shard.close()


def test_a_read_that_is_refused_goes_through_the_page_cache(llama):
    file = llama.files[0]
    raw = os.open(file, os.O_RDONLY | os.O_DIRECT)
    buffer, length = mmap.mmap(-1, 2 * PAGE), 1001
    with memoryview(buffer) as memory, memory[3 : 3 + length] as view:
        with pytest.raises(OSError, match="Invalid argument"):
            os.preadv(raw, [view], 77)
        os.close(raw)
        shard = Shard(file)
        assert shard.read(77, view, length, "a test") == length
        assert view == llama.content[file][77 : 77 + length]
        assert shard.direct and shard.cached_bytes == length
        shard.close()


def test_readers_sleep_when_there_is_nothing_to_read(llama):
    with ring(llama, forward(LAYERS)) as streamed:
        streamed.layer()
        readers = [thread for thread in threading.enumerate() if thread.name.startswith("ring-reader")]
        assert len(readers) == SMALL.threads
        while (
            sum(part.size for part in llama.layers.layers[:3]) - streamed.statistics().bytes_read > 8 * PAGE
        ):
            time.sleep(0.01)
        time.sleep(0.1)
        before = [switches(thread) for thread in readers]
        time.sleep(0.3)
        assert [switches(thread) for thread in readers] == before


MEASURE = """
import sys
from pathlib import Path
from spillover.engine.ring import Drive, LayerIndex, Layout, Ring, forward
from spillover.models import ModelConfig, WeightIndex

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

folder = Path(sys.argv[1])
layers = LayerIndex(WeightIndex(folder), ModelConfig.read(folder))
drive = Drive(4, 1 << 20)
layout = Layout.of(layers, drive, pinned=[0])
before, peak = resident(), 0
with Ring(layers, layout, drive, forward(len(layers.layers))) as ring:
    for _ in range(4 * len(layers.layers)):
        with ring.layer() as layer:
            sum(int(one.data[::4096].sum()) for one in layer.tensors.values())
            peak = max(peak, resident() - before)
print(layout.bytes, peak, sum(part.size for part in layers.layers))
"""


def test_memory_is_that_of_the_layout(disk):
    stored = store(disk / "larger", shards=4, layers=16, inner=14000)
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, stored.folder], capture_output=True, text=True, check=True
    )
    planned, peak, model = map(int, done.stdout.split())
    margin = 16 << 20  # threads' stacks and arenas, huge pages at the ends of buffers
    assert model > 2 * planned
    assert planned * 0.9 < peak < planned + margin < model


def descriptor(file: Path) -> str:
    """The number of this process's only open descriptor of `file`."""
    (found,) = [fd for fd in os.listdir("/proc/self/fd") if links(fd) == str(file)]
    return found


def links(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except FileNotFoundError:  # that of listing
        return ""


def drop(file: Path) -> None:
    fd = os.open(file, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def cached(file: Path, start: int) -> int:
    """How many pages of `file` from `start` on are in the page cache."""
    length = file.stat().st_size - start
    with file.open("rb") as opened, mmap.mmap(
        opened.fileno(), length, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE, offset=start
    ) as memory:  # fmt: skip
        states = ctypes.create_string_buffer(-(-length // PAGE))
        view = ctypes.c_char.from_buffer(memory)
        library = ctypes.CDLL(None, use_errno=True)
        assert library.mincore(ctypes.c_void_p(ctypes.addressof(view)), ctypes.c_size_t(length), states) == 0
        del view
        return sum(byte & 1 for byte in states.raw)


def switches(thread: threading.Thread) -> str:
    lines = Path(f"/proc/self/task/{thread.native_id}/status").read_text().splitlines()
    return next(line for line in lines if line.startswith("voluntary_ctxt_switches"))
