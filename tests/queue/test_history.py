"""The checker itself: a real history has nothing wrong with it, and every lie that is put in is found."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from history import Event, Final, History, Recorder, RecordingClient, check, record_answers
from queued import Place
from spillover.errors import Collected, Stale
from spillover.pool import Ref
from spillover.queue import Task, Yielded
from spillover.queue import messages as m

TESTS = Path(__file__).resolve().parents[1]


class Real:
    """What a few workers did, with a coordinator that was replaced in between."""

    def __init__(self, folder: Path) -> None:
        with Place(folder / "pool") as place:
            recorder = Recorder(folder / "history", "test")
            for round_ in range(2):
                record_answers(place.coordinator, recorder)
                threads = [
                    threading.Thread(target=self._work, args=(place, recorder, f"{round_}.{n}"))
                    for n in range(3)
                ]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join(60)
                place.restart()
            recorder.close()
            self.final = Final.of(place.client, consumers=["trainer"], producers=["0.1", "1.2"])
        (path,) = (folder / "history").iterdir()
        lines = path.read_bytes().split(b"\n")[:-1]
        self.events = [msgspec.json.decode(line, type=Event) for line in lines]
        self.folder = folder / "history"

    def _work(self, place: Place, recorder: Recorder, name: str) -> None:
        with RecordingClient(place.coordinator, "work", recorder=recorder) as client:
            tasks = [Task(f"{name}.{n}", max_attempts=2) for n in range(12)]
            client.submit(tasks, producer=name, cursor=1)
            client.submit([Task(f"{name}.last", input=place.publish("input"))], producer=name, cursor=2)
            client.stats()
            client.open_consumer("trainer")
            for n, task in enumerate(tasks):
                lease = client.acquire(name, tasks=[task.id], key=f"{name}.{n}").leases[0]
                client.renew([lease])
                if n % 6 == 1:
                    client.yield_tasks([Yielded(lease.number, lease.attempt, place.publish("more"), n)])
                elif n % 6 == 2:
                    client.fail(lease, "broken")
                elif n % 6 == 3:
                    client.release([lease])
                elif n % 6 == 4:
                    client.cancel([task.id])
                    with pytest.raises(Stale):
                        client.complete(lease)
                    continue
                if n % 6 in (1, 2, 3):
                    lease = client.acquire(name, tasks=[task.id]).leases[0]
                receipt = client.complete(lease, place.publish(task.id), metadata=n)
                client.ack("trainer", [receipt.position])
            client.save("trainer", name)
            client.stats()

    def violations(self, events: list[Event], final: Final, read: Any = None) -> list[str]:
        return check(History.of(events, "work"), final, read)


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Real:
    return Real(tmp_path_factory.mktemp("real"))


def test_nothing_is_wrong_with_what_happened(real: Real) -> None:
    assert len(real.final.log) == 60
    assert len(real.events) > 500
    assert check(History.read(real.folder, "work"), real.final) == []
    assert History.of(real.events, "elsewhere").done == []


def test_a_call_without_an_end_may_have_happened_or_not(real: Real) -> None:
    """The processes were killed at their last calls; the queue knows of them, or does not."""
    ends = [event for event in real.events if event.event == "end"]
    cut = {(event.process, event.id) for event in ends[-5:]}
    events = [e for e in real.events if e.event != "end" or (e.process, e.id) not in cut]
    assert real.violations(events, real.final) == []


def replaced(final: Final, **fields: Any) -> Final:
    return Final(**{name: fields.get(name, getattr(final, name)) for name in Final.__dataclass_fields__})


def changed(items: list[Any], number: int, **fields: Any) -> list[Any]:
    new = msgspec.structs.replace(items[number], **fields)
    return [*items[:number], new, *items[number + 1 :]]


def first(final: Final, status: str) -> int:
    return next(n for n, task in enumerate(final.tasks) if task.status == status)


def _skip_position(final: Final) -> Final:
    return replaced(final, log=[r for r in final.log if r.position != 7])


def _accept_twice(final: Final) -> Final:
    again = msgspec.structs.replace(final.log[3], position=len(final.log))
    stats = msgspec.structs.replace(final.stats, positions=len(final.log) + 1)
    return replaced(final, log=[*final.log, again], stats=stats)


FINALS: dict[str, tuple[Callable[[Final], Final], str]] = {
    "a position is missing": (_skip_position, "positions are not gapless"),
    "a task is accepted twice": (_accept_twice, "was accepted 2 times"),
    "the count is wrong": (
        lambda f: replaced(f, stats=msgspec.structs.replace(f.stats, pending=f.stats.pending + 1)),
        "tasks are pending, the count says",
    ),
    "an accepted task is pending again": (
        lambda f: replaced(f, tasks=changed(f.tasks, first(f, "completed"), status="pending", position=None)),
        "is pending at None, in the log at",
    ),
    "a submitted task is lost": (
        lambda f: replaced(f, tasks=[t for t in f.tasks if t.id != "0.0.last"]),
        "task 0.0.last was submitted and is lost",
    ),
    "a task comes from nowhere": (
        lambda f: replaced(f, tasks=changed(f.tasks, first(f, "pending"), id="ghost")),
        "task ghost was never submitted",
    ),
    "a task died early": (
        lambda f: replaced(f, tasks=changed(f.tasks, first(f, "pending"), status="dead", failures=1)),
        "is dead after 1 failures, and nobody failed it",
    ),
    "a task is cancelled by itself": (
        lambda f: replaced(f, tasks=changed(f.tasks, first(f, "pending"), status="cancelled")),
        "is cancelled, and nobody did that",
    ),
    "a cancelled task is back": (
        lambda f: replaced(f, tasks=changed(f.tasks, first(f, "cancelled"), status="pending")),
        "was cancelled, and is pending",
    ),
    "a receipt is forgotten": (
        lambda f: replaced(f, log=changed(f.log, 9, metadata="other")),
        "at position 9 is not in the log",
    ),
    "a result comes from nowhere": (
        lambda f: replaced(f, log=changed(f.log, 9, result=None)),
        "position 9 has a result of task",
    ),
    "an acknowledgement is forgotten": (
        lambda f: replaced(f, consumers={"trainer": m.Consumer(30, [], f.consumers["trainer"].state)}),
        "consumer trainer acknowledged",
    ),
    "a cursor is set back": (
        lambda f: replaced(f, cursors={**f.cursors, "1.2": 1}),
        "the cursor of producer 1.2 is 1, which is not the last",
    ),
    "a cursor is forgotten": (
        lambda f: replaced(f, cursors={**f.cursors, "0.1": None}),
        "the cursor of producer 0.1 is None",
    ),
    "a saved state is set back": (
        lambda f: replaced(
            f, consumers={"trainer": msgspec.structs.replace(f.consumers["trainer"], state="0.0")}
        ),
        "the state of consumer trainer is not the last",
    ),
}


@pytest.mark.parametrize("lie", FINALS)
def test_a_queue_that_lies_is_found_out(real: Real, lie: str) -> None:
    doctor, words = FINALS[lie]
    found = real.violations(real.events, doctor(real.final))
    assert any(words in line for line in found), found


def calls(events: list[Event], kind: type[m.Call]) -> list[int]:
    """Where the ends of calls of a kind are."""
    begins = {(e.process, e.id): e.call for e in events if e.event == "begin"}
    return [n for n, e in enumerate(events) if e.event == "end" and isinstance(begins[e.process, e.id], kind)]


def begin_of(events: list[Event], end: int) -> int:
    key = (events[end].process, events[end].id)
    return next(n for n, e in enumerate(events) if e.event == "begin" and (e.process, e.id) == key)


def _refused_then_accepted(events: list[Event], final: Final) -> list[Event]:
    """A worker was told that its attempt is stale, and it was accepted all the same."""
    end = calls(events, m.Complete)[0]
    call = events[begin_of(events, end)].call
    refused = Event("end", "liar", events[0].time + 1e-6, 1, error="Stale", message="stale")
    return [Event("begin", "liar", events[0].time, 1, call=call), refused, *events]


def _ended_then_accepted(events: list[Event], final: Final) -> list[Event]:
    """A worker gave a task back, and its attempt was accepted all the same."""
    end = calls(events, m.Complete)[0]
    (done,) = events[begin_of(events, end)].call.results
    call = m.Release(queue="work", leases=[(done.number, done.attempt)])
    ended = Event("end", "liar", events[0].time + 1e-6, 1, answer=1)
    return [Event("begin", "liar", events[0].time, 1, call=call), ended, *events]


def _handed_out_twice(events: list[Event], final: Final) -> list[Event]:
    end = calls(events, m.Acquire)[0]
    begin = events[begin_of(events, end)]
    again = msgspec.structs.replace(begin, process="liar", id=1, call=m.Acquire(queue="work", worker="liar"))
    return [*events, again, msgspec.structs.replace(events[end], process="liar", id=1)]


def _two_receipts(events: list[Event], final: Final) -> list[Event]:
    end = calls(events, m.Complete)[4]
    answer = [{**events[end].answer[0], "position": 0}]
    return changed(events, end, answer=answer)


def _backwards(events: list[Event], final: Final) -> list[Event]:
    """The first position is given to a call that began last."""
    end = next(
        n for n in calls(events, m.Complete) if events[n].answer and events[n].answer[0]["position"] == 0
    )
    begin = begin_of(events, end)
    late = max(event.time for event in events) + 1
    events = changed(events, begin, time=late)
    return changed(events, end, time=late + 1)


def _next_attempt(events: list[Event], kind: type[m.Call]) -> int:
    """The end of the acquisition that followed the first call of a kind."""
    call = events[begin_of(events, calls(events, kind)[0])].call
    item = (getattr(call, "tasks", None) or getattr(call, "failures", None) or [None])[0]
    number, attempt = (item.number, item.attempt) if item is not None else call.leases[0]
    for end in calls(events, m.Acquire):
        lease = events[end].answer["leases"][0]
        if (lease["number"], lease["attempt"]) == (number, attempt + 1):
            return end
    raise AssertionError("nobody went on")


def _with_lease(events: list[Event], end: int, **fields: Any) -> list[Event]:
    lease = {**events[end].answer["leases"][0], **fields}
    return changed(events, end, answer={**events[end].answer, "leases": [lease]})


def _wrong_generation(events: list[Event], final: Final) -> list[Event]:
    second = [event for event in events if event.event == "opened"][1]
    late = next(e for e in events if e.event == "answered")
    return [*events, msgspec.structs.replace(late, time=second.time + 1)]


def _same_generation(events: list[Event], final: Final) -> list[Event]:
    at = [n for n, event in enumerate(events) if event.event == "opened"][1]
    return changed(events, at, generation=1)


def _old_stats(events: list[Event], final: Final) -> list[Event]:
    end = calls(events, m.ReadStats)[-1]
    return changed(events, end, answer={**events[end].answer, "generation": 1})


def _early(events: list[Event], final: Final) -> list[Event]:
    """A lease is given to another worker although nobody ended it."""
    gone = {(events[end].process, events[end].id) for end in calls(events, m.Release)}
    return [event for event in events if event.event == "answered" or (event.process, event.id) not in gone]


HISTORIES: dict[str, tuple[Callable[[list[Event], Final], list[Event]], str]] = {
    "refused and accepted": (_refused_then_accepted, "was refused, and accepted"),
    "given back and accepted": (_ended_then_accepted, "was released, and accepted"),
    "handed out twice": (_handed_out_twice, "was handed out twice"),
    "another receipt": (_two_receipts, "at position 0 is not in the log"),
    "positions against time": (_backwards, "position 0 was given to a call that began after"),
    "a failure is not counted": (
        lambda events, final: _with_lease(events, _next_attempt(events, m.Fail), failures=0),
        "began otherwise than the one before (failure)",
    ),
    "a release costs an attempt": (
        lambda events, final: _with_lease(events, _next_attempt(events, m.Release), failures=1),
        "began otherwise than the one before (released)",
    ),
    "a continuation is forgotten": (
        lambda events, final: _with_lease(events, _next_attempt(events, m.Yield), metadata="old"),
        "began otherwise than the one before (yielded)",
    ),
    "a lease ends early": (_early, "s early"),
    "a lease ends uncounted": (_early, "ran out and was not counted"),
    "an old coordinator answers": (_wrong_generation, "after a takeover"),
    "two coordinators of one generation": (_same_generation, "generation 1 was opened after 1"),
    "a reader meets an old coordinator": (_old_stats, "generation 1 answered after generation 2"),
}


@pytest.mark.parametrize("lie", HISTORIES)
def test_a_history_that_cannot_be_is_found_out(real: Real, lie: str) -> None:
    doctor, words = HISTORIES[lie]
    found = real.violations(doctor([*real.events], real.final), real.final)
    assert any(words in line for line in found), found


def test_a_seal_that_is_broken_is_found_out(real: Real) -> None:
    sealed = [
        Event("begin", "p", 1.0, 1, call=m.Seal(queue="work")),
        Event("end", "p", 2.0, 1),
    ]
    assert real.violations([*sealed, *real.events], real.final) == ["the queue was sealed, and is not"]


def test_a_payload_that_is_gone_is_found_out(real: Real) -> None:
    final = replaced(real.final, consumers={})
    assert real.violations(real.events, final, _reader(set())) == []
    missing = {receipt.result for receipt in final.log[:2]}
    found = real.violations(real.events, final, _reader(missing))
    assert [line.split(":")[0] for line in found] == [
        "the result at position 0 cannot be read",
        "the result at position 1 cannot be read",
    ]
    inputs = {task.input for task in final.tasks if task.input is not None}
    found = real.violations(real.events, final, _reader(inputs))
    assert len(found) == 6
    assert all(line.startswith("the input of task ") and "last cannot be read" in line for line in found)


def _reader(missing: set[Ref | None]) -> Callable[[Ref], object]:
    def read(ref: Ref) -> object:
        if ref in missing:
            raise Collected("gone")
        return ref

    return read


def test_what_every_consumer_acknowledged_need_not_be_there(real: Real) -> None:
    everything: set[Ref | None] = {receipt.result for receipt in real.final.log}
    assert real.violations(real.events, real.final, _reader(everything)) == []


def test_a_killed_process_leaves_whole_lines(tmp_path: Path) -> None:
    code = f"""
from pathlib import Path
from history import Recorder
from spillover.queue import messages as m
recorder = Recorder(Path({str(tmp_path)!r}), "child")
for n in range(1 << 20):
    recorder.write("begin", id=n, call=m.ReadStats(queue="work"))
"""
    environment = {**os.environ, "PYTHONPATH": str(TESTS)}
    child = subprocess.Popen([sys.executable, "-c", code], env=environment)
    deadline = time.monotonic() + 60
    while not (files := [*tmp_path.iterdir()]) or files[0].stat().st_size < 20_000:
        assert time.monotonic() < deadline
        time.sleep(0.002)
    child.kill()
    child.wait(60)
    assert len(History.read(tmp_path, "work").done) > 100
