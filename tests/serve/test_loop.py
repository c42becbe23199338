"""The loop by itself: who goes first, what is given up, and what a failed pass leaves behind."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from engine.tiny import SIZES, answers, build, loaded, prompt, request
from spillover.engine import Completion, Sampling
from spillover.errors import EngineError
from spillover.serve.lane import Lane
from spillover.serve.loop import EngineLoop

HOT = Sampling(temperature=1.0, seed=3)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory):
    assert SIZES["vocab_size"] == 256
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPILL_HOME", str(tmp_path_factory.mktemp("home")))
        yield build(tmp_path_factory.mktemp("llama"), "llama")[0]


@pytest.fixture
def loop(model) -> Iterator[EngineLoop]:
    made = EngineLoop(loaded(model, batch=2), stream=lambda: None, flush=lambda: None)
    made.start()
    yield made
    assert made.close(20)


class Heard:
    """What became of one row; `when` is called at its tokens."""

    def __init__(self, when=lambda tokens: None) -> None:
        self.tokens: list[int] = []
        self.completion: Completion | None = None
        self.error: Exception | None = None
        self.over = threading.Event()
        self._when = when

    def token(self, token, logprob) -> None:
        self.tokens.append(token)
        self._when(self.tokens)

    def done(self, completion) -> None:
        self.completion = completion
        self.over.set()

    def failed(self, error) -> None:
        self.error = error
        self.over.set()

    def wait(self) -> Heard:
        assert self.over.wait(30)
        return self


def test_rows_of_batches_step_back_and_say_what_they_would_have_said(model, loop):
    rows = [request(f"r{i}", prompt(5, i), 60, sampling=HOT) for i in range(2)]
    whole = answers(loaded(model, batch=2), rows)
    urgent, order = Heard(), []

    def at(tokens: list[int]) -> None:
        if len(tokens) == 10:
            loop.submit(request("now", prompt(6), 5), urgent)

    patient = [Heard(at), Heard()]
    for row, heard in zip(rows, patient, strict=True):
        heard.done = lambda done, heard=heard: (order.append("patient"), Heard.done(heard, done))
        loop.submit(row, heard, urgent=False)
    urgent.done = lambda done: (order.append("urgent"), Heard.done(urgent, done))
    for heard in (urgent, *patient):
        heard.wait()
    assert order == ["urgent", "patient", "patient"]
    assert [heard.completion.tokens for heard in patient] == [whole[row.id].tokens for row in rows]
    assert loop.running == 0


def test_what_is_cancelled_is_gone_with_the_next_pass(loop):
    first, second, last = Heard(), Heard(), Heard()
    numbers = [
        loop.submit(request(str(n), prompt(5, n), 200), heard) for n, heard in enumerate((first, second))
    ]
    waiting = loop.submit(request("waits", prompt(5, 7), 200), Heard())
    loop.cancel({*numbers, waiting})
    loop.submit(request("last", prompt(5), 3), last)
    assert last.wait().completion.finish == "length"
    assert not first.over.is_set() and not second.over.is_set()
    assert (loop.running, loop.waiting) == (0, 0)


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (EngineError("the drive is gone"), "the drive is gone"),
        (torch.OutOfMemoryError("CUDA out of memory.\nA page"), "the engine failed: CUDA out of memory."),
        (MemoryError(), "the engine failed: MemoryError"),
    ],
)
@pytest.mark.parametrize("method", ["decode", "admit"])
def test_a_pass_that_fails_fails_its_rows_and_no_others(loop, monkeypatch, error, says, method):
    def broken(*given):
        raise error

    if method == "admit":  # the first of an idle server's life
        monkeypatch.setattr(loop._scheduler._session, "admit", broken)

    def at(tokens: list[int]) -> None:
        if len(tokens) == 5 and method == "decode":
            monkeypatch.setattr(loop._scheduler._session, "decode", broken)

    rows = [Heard(at), Heard()]
    with loop._changed:  # both come before the first pass
        for number, heard in enumerate(rows):
            loop.submit(request(str(number), prompt(5, number), 100), heard)
    for heard in rows:
        assert str(heard.wait().error) == says
    after = Heard()
    loop.submit(request("after", prompt(5), 3), after)
    assert after.wait().completion is not None
    assert loop.error is None


def test_an_engine_that_fails_twice_ends_the_loop(model, monkeypatch):
    served = loaded(model, batch=2)
    loop = EngineLoop(served, stream=lambda: None, flush=lambda: None)
    loop.start()
    first, rows = served.session, [Heard(), Heard()]

    def session():
        made = first()
        monkeypatch.setattr(made, "admit", lambda *given: (_ for _ in ()).throw(EngineError("no more")))
        return made

    monkeypatch.setattr(served, "session", session)
    monkeypatch.setattr(loop._scheduler._session, "admit", session().admit)
    for row in rows:
        loop.submit(request("a", prompt(5), 3), row)
        assert str(row.wait().error) == "no more"
    loop._thread.join(20)
    assert str(loop.error) == "no more"
    with pytest.raises(EngineError, match="ending"):
        loop.submit(request("b", prompt(5), 3), Heard())


def test_a_lane_is_a_scheduler(model, loop):
    """It yields what a scheduler yields, and after a stop its partials continue to the same."""
    rows = [request(f"r{i}", prompt(4 + i, i), 30, sampling=HOT) for i in range(7)]
    whole = {name: done.tokens for name, done in answers(loaded(model, batch=2), rows).items()}
    assert {one.id: one.tokens for one in Lane(loop, -1, lambda: False).run(rows)} == whole
    stop = threading.Event()
    lane = Lane(loop, -1, stop.is_set)
    running, done = lane.run(rows), {}
    for _ in range(3):
        one = next(running)
        done[one.id] = one.tokens
    stop.set()
    done |= {one.id: one.tokens for one in running}
    partials = lane.partials()
    assert partials.keys() | done.keys() <= whole.keys() and not partials.keys() & done.keys()
    left = [
        request(row.id, row.tokens, 30, sampling=HOT, generated=tuple(partials.get(row.id, ())))
        for row in rows
        if row.id not in done
    ]
    assert done | {one.id: one.tokens for one in Lane(loop, -1, lambda: False).run(left)} == whole


def test_closing_fails_who_is_left(model):
    loop = EngineLoop(loaded(model, batch=1), stream=lambda: None, flush=lambda: None)
    loop.start()
    rows = [Heard(), Heard()]
    for number, heard in enumerate(rows):
        loop.submit(request(str(number), prompt(5), 250), heard, urgent=number == 0)
    assert loop.close(20)
    assert all("ending" in str(heard.wait().error) for heard in rows)
