"""Group commit on its own: every call is answered once, by a commit that contains it."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spillover.errors import StoreFull, Unknown
from spillover.pool.group import Group

DEADLINE = 30.0


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE
    while not true():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.0005)


def start(act: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    return thread


def join(threads: Sequence[threading.Thread]) -> None:
    for thread in threads:
        thread.join(DEADLINE)
        assert not thread.is_alive(), "a call was never answered"


class Log:
    """A commit that notes its groups, and can be held up or made to fail."""

    def __init__(self) -> None:
        self.groups: list[list[Any]] = []
        self.open = threading.Event()
        self.open.set()
        self.one = threading.Semaphore(0)  # each release lets one commit through, whenever it gets there
        self.error: BaseException | None = None
        self._busy = threading.Lock()

    def commit(self, items: Sequence[Any]) -> list[Any]:
        assert self._busy.acquire(blocking=False), "two commits at once"
        try:
            self.groups.append([*items])
            until(lambda: self.open.is_set() or self.one.acquire(blocking=False))
            if self.error is not None:
                raise self.error
            return [("done", item) for item in items]
        finally:
            self._busy.release()

    def group(
        self, limit: int = 100, weigh: Callable[[Any], int] = lambda item: 1, patience: float = 0.0
    ) -> Group[Any, Any]:
        return Group(self.commit, weigh, limit, patience)


def waiting(group: Group[Any, Any]) -> int:
    return len(group._waiting)


@pytest.mark.parametrize("limit", [1, 3, 1000])
def test_every_call_is_answered_with_its_own_result(limit: int) -> None:
    log = Log()
    group, answers = log.group(limit), []

    def work(name: int) -> None:
        for number in range(200):
            answers.append((group((name, number)), (name, number)))

    join([start(lambda name=name: work(name)) for name in range(8)])  # type: ignore[misc]
    assert all(answer == ("done", item) for answer, item in answers)
    committed = [item for items in log.groups for item in items]
    assert sorted(committed) == sorted(item for _, item in answers)
    assert len(committed) == 1600
    assert max(map(len, log.groups)) <= limit


@settings(max_examples=25, deadline=None)
@given(weights=st.lists(st.integers(0, 10), min_size=1, max_size=12), limit=st.integers(1, 20))
def test_groups_are_closed_at_their_limit(weights: list[int], limit: int) -> None:
    log = Log()
    group = log.group(limit, lambda item: item[1])
    log.open.clear()
    threads = [start(lambda: group((-1, limit)))]
    until(lambda: len(log.groups) == 1)
    for number, weight in enumerate(weights):
        threads.append(start(lambda item=(number, weight): group(item)))  # type: ignore[misc]
        until(lambda number=number: waiting(group) == number + 1)  # type: ignore[misc]
    log.open.set()
    join(threads)
    expected: list[list[Any]] = [[]]
    for item in enumerate(weights):
        if sum(weight for _, weight in expected[-1]) >= limit:
            expected.append([])
        expected[-1].append(item)
    assert log.groups[1:] == expected


def test_calls_that_arrive_during_a_commit_share_the_next() -> None:
    log = Log()
    group = log.group()
    log.open.clear()
    threads = [start(lambda: group("first"))]
    until(lambda: len(log.groups) == 1)
    threads += [start(lambda name=name: group(name)) for name in range(5)]  # type: ignore[misc]
    until(lambda: waiting(group) == 5)
    log.open.set()
    join(threads)
    assert [len(items) for items in log.groups] == [1, 5]


def test_callers_who_come_back_share_one_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is left behind by a group that leaves at once, so that two groups take turns."""
    monkeypatch.setattr("spillover.pool.group.SHORTEST", 0.0)
    monkeypatch.setattr("spillover.pool.group.LONGEST", DEADLINE)
    log = Log()
    group = log.group(patience=1e9)

    def work(calls: int) -> None:
        for number in range(calls):
            assert group(number) == ("done", number)

    log.open.clear()
    threads = [start(lambda: work(21))]
    until(lambda: len(log.groups) == 1)
    threads += [start(lambda: work(20)) for _ in range(5)]
    until(lambda: waiting(group) == 5)
    log.open.set()
    join(threads)
    assert [len(items) for items in log.groups] == [1] + [6] * 20


def test_callers_who_do_not_come_back_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spillover.pool.group.SHORTEST", 0.0)
    log = Log()
    group = log.group(patience=1e9)
    log.open.clear()
    threads = [start(lambda: group("first"))]
    until(lambda: len(log.groups) == 1)
    threads += [start(lambda name=name: group(name)) for name in range(5)]  # type: ignore[misc]
    until(lambda: waiting(group) == 5)
    log.open.set()
    join(threads)
    assert group("alone") == ("done", "alone")
    assert [len(items) for items in log.groups] == [1, 5, 1]


def test_one_result_may_be_an_exception() -> None:
    group: Group[int, int] = Group(
        lambda items: [StoreFull("odd") if item % 2 else item for item in items], lambda item: 1, 10
    )
    assert group(2) == 2
    with pytest.raises(StoreFull, match="odd"):
        group(3)
    assert group(4) == 4


def test_a_failed_commit_fails_its_group_and_no_other() -> None:
    log = Log()
    group, outcomes = log.group(), []

    def work() -> None:
        try:
            outcomes.append(group("x"))
        except StoreFull as error:
            outcomes.append(error)

    log.open.clear()
    log.error = StoreFull("full")
    threads = [start(work)]
    until(lambda: len(log.groups) == 1)
    threads += [start(work) for _ in range(3)]
    until(lambda: waiting(group) == 3)
    log.open.set()
    join(threads)
    assert [type(outcome) for outcome in outcomes] == [StoreFull] * 4
    log.error = None
    assert group("after") == ("done", "after")


@pytest.fixture
def press() -> Iterator[Any]:
    """A function that presses Ctrl-C as soon as something is true; the main thread then raises."""
    assert threading.current_thread() is threading.main_thread()

    def when(true: Callable[[], bool], then: Callable[[], None] = lambda: None) -> threading.Thread:
        def watch() -> None:
            until(true)
            time.sleep(0.02)  # the main thread is on its way to sleep
            os.kill(os.getpid(), signal.SIGINT)
            then()

        return start(watch)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    yield when
    signal.signal(signal.SIGINT, before)


def test_an_interrupted_leader_leaves_its_group_in_doubt_and_nobody_waiting(press: Any) -> None:
    log = Log()
    group, outcomes = log.group(), []

    def follow() -> None:
        try:
            outcomes.append(group("follower"))
        except Unknown as error:
            outcomes.append(error)

    log.open.clear()
    threads = [start(lambda: group("first"))]
    until(lambda: len(log.groups) == 1)
    held = threading.Event()

    def others() -> None:  # the main thread is first in the line, and will lead
        until(lambda: waiting(group) == 1)
        threads.extend(start(follow) for _ in range(3))
        until(lambda: waiting(group) == 4)
        held.set()
        log.one.release()

    watcher = start(others)
    pressed = press(lambda: len(log.groups) == 2)
    with pytest.raises(KeyboardInterrupt):
        group("main")
    log.open.set()
    join([*threads, watcher, pressed])
    assert held.is_set()
    assert log.groups[1] == ["main", "follower", "follower", "follower"]
    assert [type(outcome) for outcome in outcomes] == [Unknown] * 3
    assert group("after") == ("done", "after")


@pytest.mark.parametrize("place", [0, 1, 2, 3])
def test_an_interrupted_follower_does_not_keep_the_others_from_waking(press: Any, place: int) -> None:
    """The main thread is in the middle of a group whose commit is under way."""
    log = Log()
    group, answers = log.group(), []
    log.open.clear()
    threads = [start(lambda: answers.append(group("first")))]
    until(lambda: len(log.groups) == 1)
    for number in range(place + 1):
        threads.append(start(lambda number=number: answers.append(group(number))))  # type: ignore[misc]
        until(lambda number=number: waiting(group) == number + 1)  # type: ignore[misc]

    def others() -> None:
        until(lambda: waiting(group) == place + 2)
        for number in range(place + 1, 4):
            threads.append(start(lambda number=number: answers.append(group(number))))  # type: ignore[misc]
            until(lambda number=number: waiting(group) == number + 2)  # type: ignore[misc]
        log.one.release()

    watcher = start(others)
    pressed = press(lambda: len(log.groups) == 2)
    with pytest.raises(KeyboardInterrupt):
        group("main")
    log.open.set()
    join([watcher, pressed, *threads])
    assert sorted(answers, key=str) == sorted([("done", "first"), *(("done", n) for n in range(4))], key=str)
    assert group("after") == ("done", "after")


def test_an_interrupted_caller_in_the_line_is_not_committed(press: Any) -> None:
    log = Log()
    group = log.group()
    log.open.clear()
    threads = [start(lambda: group("first"))]
    until(lambda: len(log.groups) == 1)
    pressed = press(lambda: waiting(group) == 1)
    with pytest.raises(KeyboardInterrupt):
        group("main")
    assert waiting(group) == 0
    log.open.set()
    join([*threads, pressed])
    assert group("after") == ("done", "after")
    assert log.groups == [["first"], ["after"]]


class Interruption(BaseException):
    """Raised in a thread at whatever instruction it is."""


def interrupt(thread: threading.Thread) -> None:
    ident = ctypes.c_ulong(thread.ident or 0)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(Interruption))


@pytest.mark.parametrize("patience", [0.0, 1.0])
def test_interruptions_at_any_instruction_lose_no_call_of_others(patience: float) -> None:
    """Half of the threads are interrupted again and again; the rest must be answered, each call once."""
    log, luck = Log(), random.Random(5)

    def commit(items: Sequence[Any]) -> list[Any]:
        time.sleep(0.0002)
        return log.commit(items)

    group: Group[Any, Any] = Group(commit, lambda item: 1, 5, patience)
    stop, answered, odd = threading.Event(), [], []

    def victim(name: int) -> None:
        number = 0
        while True:
            try:
                if stop.is_set():
                    return
                number += 1
                try:
                    answer = group((name, number))
                    if answer != ("done", (name, number)):
                        odd.append(answer)
                except Unknown:
                    pass
            except Interruption:
                pass

    def steady(name: int) -> None:
        for number in range(400):
            try:
                answered.append((group((name, number)), (name, number)))
            except Unknown:
                answered.append((("done", (name, number)), (name, number)))

    victims = [start(lambda name=name: victim(name)) for name in range(3)]  # type: ignore[misc]
    steadies = [start(lambda name=name: steady(name)) for name in range(10, 13)]  # type: ignore[misc]
    end = time.monotonic() + DEADLINE
    while any(thread.is_alive() for thread in steadies):
        assert time.monotonic() < end, "a call was never answered"
        interrupt(luck.choice(victims))
        time.sleep(luck.random() * 0.001)
    stop.set()
    join(victims)
    assert not odd
    assert len(answered) == 1200
    assert all(answer == ("done", item) for answer, item in answered)
    committed = [item for items in log.groups for item in items if item[0] >= 10]
    assert len(committed) == len(set(committed)), "a call was committed twice"
    assert group("after") == ("done", "after")
