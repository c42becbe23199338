"""What goes wrong while a ring reads is one line at its consumer; nothing hangs, nothing is left behind."""

from __future__ import annotations

import gc
import os
import re
import shutil
import threading
import warnings
from pathlib import Path

import pytest

from engine.stored import LAYERS, PAGE, SMALL, store
from engine.test_ring import descriptor, ring, same
from spillover.engine.ring import Drive, Layout, Ring, forward
from spillover.engine.ring.memory import allocate
from spillover.engine.ring.shards import Shard
from spillover.errors import EngineError, ModelError

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def llama(tmp_path):
    return store(tmp_path / "llama")


@pytest.fixture
def mixtral(tmp_path):
    return store(tmp_path / "mixtral", "mixtral", shards=2)


@pytest.fixture(autouse=True)
def nothing_left():
    """No reader thread and no open weight file survives a test."""
    yield
    gc.collect()
    for thread in readers():
        thread.join(5)
    assert readers() == []
    open_files = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if is_open(fd)]
    assert [name for name in open_files if ".safetensors" in name] == []


def readers():
    return [thread for thread in threading.enumerate() if thread.name.startswith("ring")]


def is_open(fd):
    return os.path.lexists(f"/proc/self/fd/{fd}")


def truncate(file):
    os.truncate(file, file.stat().st_size // 2)


def truncate_a_little(file):
    os.truncate(file, file.stat().st_size - 1)


def empty(file):
    os.truncate(file, 0)


def replace(file):
    shutil.copy2(file, file.with_suffix(".new"))
    file.with_suffix(".new").replace(file)


def overwrite(file):
    with file.open("r+b") as opened:
        opened.seek(-100, os.SEEK_END)
        opened.write(b"x" * 100)


def make_folder(file):
    file.unlink()
    file.mkdir()


DAMAGE = {
    truncate: "is truncated at layer",
    truncate_a_little: "is truncated at layer",
    empty: "is truncated at layer",
    os.unlink: "is gone",
    replace: "was changed or replaced",
    overwrite: "was changed or replaced",
    make_folder: "was changed or replaced",
}


def consume(streamed, limit=20 * LAYERS):
    """The error that ends the consumption, and the layers before it."""
    done = []
    with pytest.raises(ModelError) as caught:
        for _ in range(limit):
            with streamed.layer() as layer:
                done.append(layer.number)
    return caught.value, done


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda one: one.__name__)
@pytest.mark.parametrize("passes", [0, 2])
def test_a_damaged_file_is_one_line_that_names_file_and_layer(llama, damage, passes):
    file = llama.file_of(4)
    with ring(llama, forward(LAYERS), slots=2) as streamed:
        for _ in range(passes * LAYERS + 1):
            streamed.layer().release()
        damage(file)
        error, done = consume(streamed)
        message = str(error)
        assert message.startswith(str(file)) and DAMAGE[damage] in message and "\n" not in message
        assert f"layer {(done[-1] + 1) % LAYERS}" in message
        # what was complete by then may be used, layer after layer; no other layer is skipped
        assert done == [(1 + number) % LAYERS for number in range(len(done))] and len(done) < LAYERS
        assert error.__cause__ is None and error.__suppress_context__
        with pytest.raises(ModelError, match="layer") as again:
            streamed.layer()
        assert str(again.value) == message


def test_layers_before_the_damage_are_delivered(llama):
    with ring(llama, range(LAYERS), slots=5) as streamed:
        file = llama.file_of(LAYERS - 1)
        truncate(file)
        error, done = consume(streamed)
        assert done == [
            part.layer for part in llama.layers.layers if file not in {e.file for e in part.extents}
        ]
        assert f"layer {len(done)}" in str(error)


@pytest.mark.parametrize("damage", [truncate, os.unlink, replace], ids=lambda one: one.__name__)
def test_a_damaged_file_shows_at_its_experts(mixtral, damage):
    with ring(mixtral, [1], expert_slots=2) as streamed, streamed.layer() as layer:
        flow = iter(layer.experts(range(5)))
        assert next(flow)[0] == 0
        damage(mixtral.file_of(1))
        with pytest.raises(ModelError, match=r"\.safetensors.* layer 1, expert [1-4]"):
            list(flow)


def test_an_input_output_error_is_the_systems_own_words(llama):
    with ring(llama, forward(LAYERS)) as streamed:
        for _ in range(LAYERS):
            streamed.layer().release()
        file = llama.file_of(3)
        number = int(descriptor(file))
        kept = os.dup(number)
        unmapped = os.open("/proc/self/mem", os.O_RDONLY)  # its first bytes give EIO
        os.dup2(unmapped, number)
        os.close(unmapped)
        error, _ = consume(streamed)
        assert f"{file} cannot be read for layer" in str(error) and "Input/output error" in str(error)
        os.dup2(kept, number)
        os.close(kept)
        streamed.follow(forward(LAYERS))  # the drive is back
        for number in range(2 * LAYERS):
            with streamed.layer() as layer:
                assert layer.number == number % LAYERS
                assert same(llama, layer.number, layer.tensors)


def test_a_bug_in_a_reader_reaches_the_consumer(llama, monkeypatch):
    def broken(*_):
        raise ZeroDivisionError("broken on purpose")

    monkeypatch.setattr(Shard, "check", lambda *_: None)
    monkeypatch.setattr(Shard, "read", broken)
    with ring(llama, forward(LAYERS)) as streamed, pytest.raises(ZeroDivisionError, match="on purpose"):
        streamed.layer()


@pytest.mark.parametrize("damage", [truncate, empty, os.unlink, make_folder], ids=lambda one: one.__name__)
def test_a_file_that_changed_since_it_was_indexed_is_refused(llama, damage):
    damage(llama.file_of(2))
    with pytest.raises(ModelError, match=r"\.safetensors"):
        ring(llama, forward(LAYERS))


def test_another_models_file_is_refused(llama, tmp_path):
    other = store(tmp_path / "other", inner=300)
    shutil.copy(other.files[1], llama.files[1])
    with pytest.raises(ModelError, match="was replaced while the model was loaded"):
        ring(llama, forward(LAYERS))


def test_an_order_with_a_layer_that_is_not_there(llama):
    with ring(llama, [0, LAYERS]) as streamed:
        streamed.layer().release()
        with pytest.raises(EngineError, match=f"the model has {LAYERS} layers, none of number {LAYERS}"):
            streamed.layer()


def test_holding_every_buffer_is_refused_instead_of_waiting_forever(llama):
    with ring(llama, forward(LAYERS), slots=2) as streamed:
        held = [streamed.layer(), streamed.layer()]
        with pytest.raises(EngineError, match="all 2 buffers are in use"):
            streamed.layer()
        held[0].release()
        assert streamed.layer().number == 2


def test_memory_that_is_not_there_is_one_line():
    with pytest.raises(EngineError, match="no memory for a buffer"):
        allocate(1 << 62)


def test_buffers_are_of_huge_pages_and_not_inherited():
    """What open(2) asks of memory that direct reads go to while a process may fork."""
    buffer = allocate(8 << 20)
    at, found = buffer.ctypes.data, []
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            low, high = (int(end, 16) for end in line.split()[0].split("-"))
        elif line.startswith("VmFlags") and low <= at < high:
            found = line.split()
    assert at % (2 << 20) == 0 and {"dc", "hg"} <= {*found}


# Ends


class Held:
    """Keeps the reads of a ring from ending until it is told to let go."""

    def __init__(self, monkeypatch):
        self.go, self.reading = threading.Event(), threading.Semaphore(0)
        real = Shard.read

        def read(*arguments):
            self.reading.release()
            assert self.go.wait(30)
            return real(*arguments)

        monkeypatch.setattr(Shard, "read", read)


def test_close_waits_for_the_reads_under_way_and_begins_no_other(llama, monkeypatch):
    held = Held(monkeypatch)
    streamed = ring(llama, forward(LAYERS))
    for _ in range(SMALL.threads):
        assert held.reading.acquire(timeout=10)
    closing = threading.Thread(target=streamed.close, name="closing")
    closing.start()
    closing.join(0.2)
    assert closing.is_alive() and streamed._readers.closed  # the files stay open as long as they are read
    held.go.set()
    closing.join(10)
    assert not closing.is_alive() and readers() == []
    assert not held.reading.acquire(blocking=False)
    assert streamed.statistics().bytes_read <= SMALL.threads * SMALL.read_bytes
    streamed.close()
    with pytest.raises(EngineError, match="the weight ring is closed"):
        streamed.layer()
    with pytest.raises(EngineError, match="closed"):
        streamed.follow([1])


def test_what_another_order_drops_is_not_read(llama, monkeypatch):
    held = Held(monkeypatch)
    with ring(llama, forward(LAYERS)) as streamed:
        for _ in range(SMALL.threads):
            assert held.reading.acquire(timeout=10)
        streamed.follow([5])
        held.go.set()
        with streamed.layer() as layer:
            assert layer.number == 5 and same(llama, 5, layer.tensors)
        under_way = SMALL.threads * SMALL.read_bytes
        assert streamed.statistics().bytes_read <= under_way + llama.layers.layers[5].size


def test_closing_wakes_a_consumer_that_waits(llama, monkeypatch):
    held = Held(monkeypatch)
    streamed, ended = ring(llama, forward(LAYERS)), []

    def wait():
        try:
            streamed.layer()
        except EngineError as error:
            ended.append(str(error))

    consumer = threading.Thread(target=wait)
    consumer.start()
    assert held.reading.acquire(timeout=10)
    threading.Timer(0.05, held.go.set).start()
    with streamed._readers.lock:
        streamed._readers.closed = True  # as `close` begins, before any piece ends
    streamed.close()
    consumer.join(10)
    assert ended == ["the weight ring is closed"]


@pytest.mark.parametrize("pieces", [1, 7, 40])
def test_a_ring_may_be_closed_at_any_time(llama, pieces):
    for _ in range(10):
        with ring(llama, forward(LAYERS)) as streamed:
            for _ in range(pieces):
                streamed.layer().release()
            last = streamed.layer()
        assert same(llama, last.number, last.tensors)  # its memory outlives the ring
        last.release()


def test_a_consumer_that_raises_leaves_nothing(llama, mixtral):
    class Mine(Exception):
        pass

    with pytest.raises(Mine), ring(llama, forward(LAYERS)) as streamed, streamed.layer():
        raise Mine
    with pytest.raises(Mine), ring(mixtral, forward(LAYERS)) as streamed, streamed.layer() as layer:
        for _ in layer.experts(range(5)):
            raise Mine


def test_a_consumer_that_raises_may_go_on(llama):
    with ring(llama, forward(LAYERS), slots=2) as streamed:
        for number in range(3 * LAYERS):
            with pytest.raises(ZeroDivisionError), streamed.layer() as layer:
                assert layer.number == number % LAYERS and same(llama, layer.number, layer.tensors)
                raise ZeroDivisionError


def test_an_order_that_raises_ends_nothing_else(llama):
    def order():
        yield 0
        raise LookupError("no order")

    with pytest.raises(LookupError, match="no order"):
        ring(llama, order())


def test_a_forgotten_ring_ends_its_threads(llama):
    streamed = ring(llama, forward(LAYERS))
    streamed.layer()
    assert readers()
    del streamed  # the rest is asserted for every test


def test_a_forked_child_cannot_use_it_and_does_not_disturb_it(llama):
    with ring(llama, forward(LAYERS)) as streamed:
        streamed.layer().release()
        held = streamed.layer()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # threads and fork: the point
            child = os.fork()
        if not child:
            code = 1
            try:
                streamed.layer()
            except EngineError:
                held.release()
                streamed.close()
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        held.release()
        for number in range(2, 3 * LAYERS):
            with streamed.layer() as layer:
                assert layer.number == number % LAYERS and same(llama, layer.number, layer.tensors)


def test_many_threads_and_tiny_reads_deliver_the_same(llama):
    """More threads than pieces in flight, each piece a page: every race there is."""
    drive = Drive(threads=16, read_bytes=PAGE)
    layout = Layout.of(llama.layers, drive, pinned=[2], slots=2)
    with Ring(llama.layers, layout, drive, forward(LAYERS)) as streamed:
        for _ in range(10 * LAYERS):
            with streamed.layer() as layer:
                assert same(llama, layer.number, layer.tensors)
