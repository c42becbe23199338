"""Where a streamed layer lies while torch computes with it: one place in memory, or two in turn on a GPU.

A GPU computes what was asked of it some time ago. So the copy of a layer runs on a stream of its own while
the layer before computes, and three things have to wait: the products for the copy, a copy for the products
that read its place before, and the ring's buffer for the copy out of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spillover.engine.ring import Layer as Held
from spillover.engine.torch.weights import LayerWeights, Room
from spillover.errors import EngineError

Copy: TypeAlias = Callable[[Held, Room, Callable[[], None]], LayerWeights]
"""Copies a layer into the room there is; the third waits for what was copied so far."""
_PAGE = 4096


class Event(Protocol):
    """A point in a stream's work; `torch.cuda.Event` is one."""

    def synchronize(self) -> None:
        """Return once the work before it is done."""
        ...


class Streams(Protocol):
    """The stream that computes, and one that copies beside it."""

    def copying(self) -> AbstractContextManager[object]:
        """What is asked for inside is done on the copying stream."""
        ...

    def record(self, *, copying: bool) -> Event:
        """The point that a stream's work has come to."""
        ...

    def wait(self, event: Event, *, copying: bool) -> None:
        """What is asked of a stream from now on begins after `event`."""
        ...

    def use(self, tensor: Tensor) -> None:
        """A tensor that the copying stream made is read by the other: its memory is not given away before."""
        ...


class Staging(Protocol):
    """Puts one layer after the other where it can be computed with, until the next one is put."""

    def put(self, held: Held, copy: Copy) -> LayerWeights:
        """The layer that a ring holds, which is released once nobody reads it there."""
        ...


class Host:
    """In the memory that the ring is in too."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._place = _Place(dtype, torch.device("cpu"))

    def put(self, held: Held, copy: Copy) -> LayerWeights:
        with held:
            return copy(held, self._place, lambda: None)


class Device:
    """On a GPU; two places, so that one is filled while the other is read."""

    def __init__(self, dtype: torch.dtype, device: torch.device, streams: Streams) -> None:
        self._streams = streams
        self._places = [_Place(dtype, device) for _ in range(2)]
        self._read: list[Event | None] = [None, None]  # after it nobody reads the place
        self._turn = 0
        self._copied: tuple[Held, Event] | None = None

    def put(self, held: Held, copy: Copy) -> LayerWeights:
        streams, turn = self._streams, self._turn
        # all that reads the place before this one has been asked for
        self._read[1 - turn] = streams.record(copying=False)
        if (free := self._read[turn]) is not None:
            streams.wait(free, copying=True)
        try:
            with streams.copying():
                weights = copy(held, self._places[turn], self._settle)
            copied = streams.record(copying=True)
        except BaseException:
            self._settle()  # some of it may be under way
            held.release()
            raise
        streams.wait(copied, copying=False)
        for tensor in weights.small():
            streams.use(tensor)
        self._turn = 1 - turn
        before, self._copied = self._copied, (held, copied)
        if before is not None:
            before[1].synchronize()
            before[0].release()
        return weights

    def _settle(self) -> None:
        self._streams.record(copying=True).synchronize()


class CudaStreams:
    """See `Streams`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def copying(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._side)

    def record(self, *, copying: bool) -> torch.cuda.Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream(copying))
        return event

    def wait(self, event: Event, *, copying: bool) -> None:
        assert isinstance(event, torch.cuda.Event)
        self._stream(copying).wait_event(event)

    def use(self, tensor: Tensor) -> None:
        tensor.record_stream(self._stream(copying=False))

    def _stream(self, copying: bool) -> torch.cuda.Stream:
        return self._side if copying else torch.cuda.current_stream(self._device)


def staging(dtype: torch.dtype, device: torch.device) -> Staging:
    """What suits `device`."""
    return Host(dtype) if device.type == "cpu" else Device(dtype, device, CudaStreams(device))


def pinned(size: int) -> NDArray[np.uint8]:
    """`size` bytes that a GPU copies from without the processor's help, from a page's beginning on."""
    try:
        memory = torch.empty(size + _PAGE, dtype=torch.uint8, pin_memory=True).numpy()
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise EngineError(f"a buffer of {size / 1e9:.2f} GB cannot be page-locked: {reason}") from None
    begin = -memory.ctypes.data % _PAGE
    return memory[begin : begin + size]


class _Place:
    """The matrices of one layer after the other, in the same memory as long as their shapes are the same."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device
        self._matrices: dict[str, Tensor] = {}

    def __call__(self, name: str, shape: Sequence[int]) -> Tensor:
        known = self._matrices.get(name)
        if known is None or known.shape != tuple(shape):
            known = torch.empty(*shape, dtype=self._dtype, device=self._device)
            self._matrices[name] = known
        return known
