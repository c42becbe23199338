"""Layers on their way to a GPU, with streams that are as late as CUDA allows; no device is needed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from engine.tiny import answers, prompt, request
from engine.torch.test_placement import batches, tight, trainer
from spillover.engine import engine
from spillover.engine.torch import decoder
from spillover.engine.torch.staging import Device


@dataclass(eq=False)
class Point:
    """What a stream had been asked for; `waits` are those of the stream that copies."""

    streams: Late
    work: list[Callable[[], None]]
    reached: bool = False  # by the host, which waited

    def synchronize(self) -> None:
        self.reached = True
        self.streams.done(self.work)


@dataclass
class Late:
    """Copies happen when somebody waits for them, not before: who does not wait computes with old bytes.

    Products happen at once. What a place was read by before it is filled anew is checked instead: the
    copying stream must have been told to wait for a point after it.
    """

    asked: list[Callable[[], None]] = field(default_factory=list)
    used: list[torch.Tensor] = field(default_factory=list)
    waited: list[Point] = field(default_factory=list)
    copied: list[Point] = field(default_factory=list)
    copies: int = 0

    @contextlib.contextmanager
    def copying(self) -> Iterator[None]:
        with _Deferred(self.asked):
            yield
        self.copies += 1

    def record(self, *, copying: bool) -> Point:
        point = Point(self, list(self.asked) if copying else [])
        if copying:
            self.copied.append(point)
        return point

    def wait(self, event: Point, *, copying: bool) -> None:
        if copying:
            self.waited.append(event)
        else:
            self.done(event.work)

    def use(self, tensor: torch.Tensor) -> None:
        self.used.append(tensor)

    def done(self, work: list[Callable[[], None]]) -> None:
        """Do what is left of `work`."""
        with _disable_current_modes():
            for one in work:
                if one in self.asked:
                    one()
                    self.asked.remove(one)


class _Deferred(TorchDispatchMode):
    """Writes to tensors wait; what makes one, makes it with wrong content."""

    def __init__(self, asked: list[Callable[[], None]]) -> None:
        super().__init__()
        self._asked = asked

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func.name()
        if name.startswith(("aten::_foreach_copy_", "aten::copy_")):
            self._asked.append(lambda: func(*args, **kwargs))
            return None if "foreach" in name else args[0]
        if name.startswith("aten::_to_copy"):
            made = torch.full(args[0].shape, 1e4, dtype=kwargs.get("dtype") or args[0].dtype)
            self._asked.append(lambda: made.copy_(args[0]))
            return made
        return func(*args, **kwargs)


@pytest.fixture
def streams(monkeypatch) -> list[Late]:
    """Those of every decoder whose layers are streamed from now on."""
    made: list[Late] = []

    def staging(dtype, device):
        made.append(Late())
        return Device(dtype, device, made[-1])

    monkeypatch.setattr(decoder, "staging", staging)
    return made


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3-moe", "qwen2"])
def test_answers_are_the_same_whatever_is_late(built, streams, name):
    model = built(name)[0]
    plan = replace(tight(model), kernels="torch")
    requests = [request(f"r{n}", prompt(n, n), 9) for n in (5, 40, 1, 33, 90)]
    found = answers(engine("torch").load(model, plan), requests)
    (late,) = streams
    assert late.copies > 9 * model.config.layers
    resident = replace(plan, placement="resident", layout=None)
    expected = answers(engine("torch").load(model, resident), requests)
    assert {key: one.tokens for key, one in found.items()} == {
        key: one.tokens for key, one in expected.items()
    }


def test_losses_are_the_same_whatever_is_late(llama, streams):
    streamed, resident = (trainer(llama[0], placement) for placement in ("streamed", "resident"))
    for step in range(4):
        assert streamed.step(batches(step), lr=1e-2) == resident.step(batches(step), lr=1e-2)
    assert streamed.evaluate(batches(9)) == resident.evaluate(batches(9))
    assert all(
        np.array_equal(streamed.state().params[key], value) for key, value in resident.state().params.items()
    )
    assert len(streams) == 1


def test_a_place_is_filled_again_after_what_read_it_and_a_buffer_given_back_after_the_copy(llama, streams):
    """The orders of `Device`, one by one."""
    plan = replace(tight(llama[0]), kernels="torch")
    session = engine("torch").load(llama[0], plan).session()
    released: list[int] = []
    session.admit([prompt(9, 1)])
    (late,) = streams
    layers, first = session._decoder._layers, len(late.copied)
    usual, taken = layers._ring.layer, 0

    def watched():
        nonlocal taken
        held, number = usual(), taken
        free, taken = held.release, taken + 1

        def release():
            assert late.copied[first + number].reached
            released.append(number)
            free()

        held.release = release
        return held

    layers._ring.layer = watched
    for step in range(4):
        before = len(late.waited)
        session.decode([step + 1])
        assert len(late.waited) - before == llama[0].config.layers  # each place, each time
    assert len(released) == 4 * llama[0].config.layers - 1  # the last is still on its way
    assert late.used  # norms, which the copying stream made


def test_a_copy_that_fails_gives_its_buffer_back(llama, streams, monkeypatch):
    streamed, expected = (trainer(llama[0], "streamed") for _ in range(2))
    streamed.evaluate(batches(0))
    for _ in range(4):  # a buffer that was kept would be missed soon
        with monkeypatch.context() as broken:
            broken.setattr(streamed._decoder._layers._weights, "_stack", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                streamed.step(batches(0), lr=1e-2)
    assert streamed.step(batches(0), lr=1e-2) == expected.step(batches(0), lr=1e-2)
