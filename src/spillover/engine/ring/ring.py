"""The weight ring: layers read ahead of the engine, in the order in which it computes them.

A ring has a few buffers. Reader threads fill them with the layers that come next while the engine computes;
a buffer is filled anew as soon as its layer was released and comes last again. What is pinned stays in memory
from its first read, and a layer that still lies in a buffer when its turn comes is not read again (the last
layers of a forward pass are the first of the backward pass).

::

    layers = LayerIndex(model.index(), model.config)
    drive = known_drive(model.path)
    layout = Layout.within(layers, drive, budget)
    with Ring(layers, layout, drive, forward(len(layers.layers))) as ring:
        for _ in range(passes):
            for _ in layers.layers:
                with ring.layer() as layer:
                    compute(layer.number, layer.tensors)
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, cycle
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from spillover.engine.ring.drive import Drive
from spillover.engine.ring.layers import BLOCK, LayerIndex, Part, RawTensor
from spillover.engine.ring.layout import Layout
from spillover.engine.ring.memory import allocate
from spillover.engine.ring.readers import Job, Readers, failure
from spillover.engine.ring.shards import Shard
from spillover.errors import EngineError, ModelError
from spillover.models.index import read_header

Allocate: TypeAlias = Callable[[int], NDArray[np.uint8]]
Expert: TypeAlias = tuple[int, Mapping[str, RawTensor]]


def forward(layers: int) -> Iterator[int]:
    """The order of generation and scoring, without end: 0 to ``layers - 1``, again and again."""
    return cycle(range(layers))


def forward_backward(layers: int) -> Iterator[int]:
    """The order of training, without end: 0 to ``layers - 1`` and back, again and again."""
    return cycle(chain(range(layers), reversed(range(layers))))


@dataclass(frozen=True)
class Statistics:
    """What a ring did in its first `seconds`; the difference of two is what it did between them.

    `bytes_read` came from the drive, gaps and alignment included. During `reading` seconds a read was under
    way; for `waiting` seconds the consumer stood still for one.
    """

    seconds: float
    bytes_read: int
    reading: float
    waiting: float

    def __sub__(self, earlier: Statistics) -> Statistics:
        return Statistics(
            self.seconds - earlier.seconds,
            self.bytes_read - earlier.bytes_read,
            self.reading - earlier.reading,
            self.waiting - earlier.waiting,
        )

    @property
    def rate(self) -> float:
        """Bytes per second of wall time."""
        return self.bytes_read / self.seconds if self.seconds > 0 else 0.0

    def share(self, drive: Drive) -> float | None:
        """`rate` by what the drive sustains; None while that is not measured."""
        return self.rate / drive.rate if drive.rate else None


@dataclass(eq=False)
class _Slot:
    """A buffer, what is in it or on its way, and how many uses of that were promised and not yet ended."""

    buffer: NDArray[np.uint8]
    job: Job | None = None
    users: int = 0

    def holds(self, part: Part) -> bool:
        return self.job is not None and self.job.part is part and self.job.wanted

    @property
    def idle(self) -> bool:
        return not self.users and (self.job is None or self.job.ended)


class Ring:
    """Streams the layers of a model in `order`, which may be endless and is taken a few layers ahead.

    Reading begins at once. One thread consumes; `Layer.release` may be called by any. `allocate` makes the
    buffers (bytes -> writable uint8 array at a multiple of 4096; pinned memory for a GPU, say). `direct`
    False reads through the page cache.

    Raises `ModelError` for a weight file that cannot be opened or was replaced since it was indexed, and
    `EngineError` when there is no memory for the buffers. What goes wrong with a file later (truncated, gone,
    replaced, an I/O error) is a `ModelError` of one line, raised by `layer` or `Layer.experts` when that
    part's turn comes, not before, and by every later call until `follow`.
    """

    def __init__(
        self,
        layers: LayerIndex,
        layout: Layout,
        drive: Drive,
        order: Iterable[int],
        *,
        allocate: Allocate = allocate,
        direct: bool = True,
    ) -> None:
        self.layers = layers
        self.layout = layout
        self._allocate = allocate
        self._order, self._next = iter(order), -1
        self._queue: deque[_Slot] = deque()
        self._pinned: dict[int, list[_Slot]] = {}
        self._slots = [_Slot(self._buffer(layout.slot_size)) for _ in range(layout.slots)]
        self._expert_slots = [_Slot(self._buffer(layout.expert_size)) for _ in range(layout.expert_slots)]
        self._shards = _open(layers, direct)
        self._readers = Readers(self._shards, drive.threads, drive.read_bytes)
        self._begin, self._waiting = time.monotonic(), 0.0
        # a ring that is forgotten: not joined here, where the collector may have interrupted a reader
        stop = threading.Thread(target=self._readers.close, name="ring-end", daemon=True)
        self._forgotten = weakref.finalize(self, stop.start)
        self._forgotten.atexit = False
        try:
            with self._readers.lock:
                self._read_ahead()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Ring:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def direct(self) -> bool:
        """Whether every byte so far was read past the page cache."""
        return all(shard.direct and not shard.cached_bytes for shard in self._shards.values())

    def layer(self) -> Layer:
        """The next layer of the order, once it is complete; a context manager that releases it.

        `EngineError` when the order has ended or names a layer that the model has not, when the ring is
        closed or was inherited by a fork, and when the caller holds every buffer and would wait forever.
        """
        self._check_usable()
        with self._readers.lock:
            self._read_ahead()
            while not (self._queue and self._complete(self._queue[0])):
                if not self._queue:
                    self._check_order()
                    self._check_free(self._slots)
                self._wait()
                self._read_ahead()
            return Layer(self, self._queue.popleft())

    def follow(self, order: Iterable[int]) -> None:
        """Go on with another order; what was read ahead and is not in it is dropped.

        Layers that are held stay valid. After an error, what failed is read again.
        """
        self._check_usable()
        with self._readers.lock:
            dropped, self._queue = list(self._queue), deque()
            self._order, self._next = iter(order), -1
            self._read_ahead()  # with the buffers that happen to hold what comes first
            for slot in dropped:
                self._release(slot)
            self._read_ahead()

    def statistics(self) -> Statistics:
        """What was read and waited for since the ring was made."""
        with self._readers.lock:
            return Statistics(
                time.monotonic() - self._begin,
                self._readers.bytes_read,
                self._readers.reading,
                self._waiting,
            )

    def close(self) -> None:
        """Stop reading, within the time of the reads under way; idempotent.

        Tensors that are still referenced stay readable.
        """
        self._forgotten.detach()
        self._readers.close()

    # With the lock held: what comes next, and which buffer takes it.

    def _read_ahead(self) -> None:
        """Promise buffers to the layers that come next, while there are any."""
        while not self._readers.closed and len(self._queue) < len(self.layers.layers) + self.layout.slots:
            if self._next < 0:
                self._next = next(self._order, -1)
            if not 0 <= self._next < len(self.layers.layers):
                return
            slot = self._claim(self.layers.layers[self._next], self._slots)
            if slot is None:
                return
            self._queue.append(slot)
            self._next = -1

    def _claim(self, part: Part, slots: list[_Slot], *, urgent: bool = False) -> _Slot | None:
        """A buffer that holds `part` or is being filled with it; None while none is idle."""
        if part.layer in self.layout.pinned:
            slots = [self._keep(part.layer)[0 if part.expert is None else part.expert + 1]]
        slot = next((one for one in slots if one.holds(part)), None)
        if slot is None:
            slot = next((one for one in slots if one.idle), None)
            if slot is None:
                return None
            slot.job = Job(part, slot.buffer[: part.size])
            self._readers.submit(slot.job, urgent=urgent)
        slot.users += 1
        return slot

    def _keep(self, layer: int) -> list[_Slot]:
        """The buffers of a pinned layer: its own, then those of its experts."""
        if layer not in self._pinned:
            memory, begin, slots = self._buffer(self.layers.bytes(layer)), 0, []
            for part in (self.layers.layers[layer], *self.layers.experts[layer]):
                slots.append(_Slot(memory[begin : begin + part.size]))
                begin += part.size
            self._pinned[layer] = slots
        return self._pinned[layer]

    def _release(self, slot: _Slot) -> None:
        slot.users -= 1
        job = slot.job
        if job is not None and not slot.users and not job.ended:
            job.cancelled = job.part.layer not in self.layout.pinned  # nobody waits for it

    def _complete(self, slot: _Slot) -> bool:
        """Whether its content is there; raises why it will not be."""
        self._check_usable()
        assert slot.job is not None
        if slot.job.error is not None:
            raise failure(slot.job.error) from None
        return slot.job.ended

    def _wait(self) -> None:
        self._check_usable()
        begin = time.monotonic()
        try:
            self._readers.wait()
        finally:
            self._waiting += time.monotonic() - begin

    def _check_usable(self) -> None:
        if self._readers.forked:
            raise EngineError("a forked process cannot use its parent's weight ring", hint="open another")
        if self._readers.closed:
            raise EngineError("the weight ring is closed")

    def _check_order(self) -> None:
        if self._next < 0:
            raise EngineError("the order of layers has ended")
        if self._next >= len(self.layers.layers):
            raise EngineError(f"the model has {len(self.layers.layers)} layers, none of number {self._next}")

    def _check_free(self, slots: list[_Slot]) -> None:
        if all(slot.users for slot in slots):
            raise EngineError(f"all {len(slots)} buffers are in use", hint="release one first")

    def _buffer(self, size: int) -> NDArray[np.uint8]:
        buffer = self._allocate(size)
        if buffer.ctypes.data % BLOCK:
            raise ValueError(f"a buffer begins at {buffer.ctypes.data:#x}, not at a multiple of {BLOCK}")
        return buffer

    # What a `Layer` calls.

    def _give_back(self, slots: Iterable[_Slot]) -> None:
        if self._readers.forked:
            return
        with self._readers.lock:
            for slot in slots:
                self._release(slot)
            self._read_ahead()

    def _stream(self, parts: Iterable[Part], held: list[_Slot], keep: bool) -> Generator[Expert, None, None]:
        """Read `parts` before everything else, as far ahead as there are buffers."""
        waiting, started = deque(parts), deque[tuple[Part, _Slot]]()
        try:
            while waiting or started:
                with self._readers.lock:
                    self._claim_experts(waiting, started)
                    while not (started and self._complete(started[0][1])):
                        if not started:
                            self._check_free(self._expert_slots)
                        self._wait()
                        self._claim_experts(waiting, started)
                    part, slot = started.popleft()
                    held.append(slot)
                assert part.expert is not None
                yield part.expert, part.views(slot.buffer)
                if not keep:
                    held.remove(slot)
                    self._give_back([slot])
        finally:
            self._give_back(slot for _, slot in started)

    def _claim_experts(self, waiting: deque[Part], started: deque[tuple[Part, _Slot]]) -> None:
        self._check_usable()
        while waiting and (slot := self._claim(waiting[0], self._expert_slots, urgent=True)) is not None:
            started.append((waiting.popleft(), slot))


class Layer:
    """A layer in memory, until `release` or the end of ``with``: then its buffer is filled with another.

    ``tensors`` are what every token goes through, by their names below ``<prefix>layers.<number>.``.
    """

    def __init__(self, ring: Ring, slot: _Slot) -> None:
        assert slot.job is not None
        self.number = slot.job.part.layer
        self.tensors: Mapping[str, RawTensor] = slot.job.part.views(slot.buffer)
        self._ring = ring
        self._held = [slot]
        self._flows: list[Generator[Expert, None, None]] = []

    def experts(self, ids: Iterable[int], *, keep: bool = False) -> Iterator[Expert]:
        """Read chosen experts on demand: ``(id, tensors)`` in the order of `ids`, as soon as it is there.

        While one is computed the next are read, before all that is read ahead. An expert's tensors are valid
        until the next one is asked for; with `keep` until the layer is released, which takes as many buffers
        (`Layout.expert_slots`) as there are ids. Raises what `Ring.layer` raises.
        """
        there = self._ring.layers.experts[self.number]
        chosen = list(dict.fromkeys(ids))
        wrong = next((one for one in chosen if not 0 <= one < len(there)), None)
        if wrong is not None:
            raise EngineError(f"layer {self.number} has {len(there)} experts, none of number {wrong}")
        flow = self._ring._stream([there[one] for one in chosen], self._held, keep)
        self._flows.append(flow)
        return flow

    def release(self) -> None:
        """Give the buffers back; idempotent."""
        for flow in self._flows:
            flow.close()
        held, self._held[:] = list(self._held), []
        self._ring._give_back(held)

    def __enter__(self) -> Layer:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _open(layers: LayerIndex, direct: bool) -> dict[Path, Shard]:
    """The weight files, open, and the same as when they were indexed."""
    shards: dict[Path, Shard] = {}
    try:
        for file in layers.files:
            shards[file] = Shard(file, direct=direct)
            indexed = {name: one for name, one in layers.tensors.items() if one.file == file}
            if read_header(file) != indexed:
                raise ModelError(f"{file} was replaced while the model was loaded", hint="start again")
            shards[file].check("the model")
    except BaseException:
        for shard in shards.values():
            shard.close()
        raise
    return shards
