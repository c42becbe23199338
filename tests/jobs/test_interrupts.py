"""Signals: the quantum that may finish, the one that is abandoned, and what is never torn."""

from __future__ import annotations

import os
import signal
import time

import pytest

from spillover.jobs.interrupts import Abandoned, Ending, Interrupts


def busy(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def test_a_quantum_that_ends_in_time_is_kept() -> None:
    with Interrupts(headless=True, grace=5) as interrupts:
        with interrupts.quantum():
            os.kill(os.getpid(), signal.SIGTERM)
            busy(0.05)
        assert interrupts.signal == "SIGTERM"
        assert interrupts.ending is Ending.PREEMPTED


def test_a_quantum_that_takes_too_long_is_abandoned() -> None:
    before = time.monotonic()
    with Interrupts(headless=True, grace=0.2) as interrupts:
        with pytest.raises(Abandoned), interrupts.quantum():
            os.kill(os.getpid(), signal.SIGTERM)
            busy(60)
        assert time.monotonic() - before < 30
        with pytest.raises(Abandoned), interrupts.quantum():  # no new one begins either
            pass


def test_the_last_act_is_never_abandoned() -> None:
    done = []
    with Interrupts(headless=True, grace=0.1) as interrupts, interrupts.quantum():
        os.kill(os.getpid(), signal.SIGTERM)
        with interrupts.finishing():
            busy(0.4)
            done.append("update")
        busy(0.1)
        done.append("report")
    assert done == ["update", "report"]


def test_while_preparing_the_first_signal_ends_it_at_once() -> None:
    with Interrupts(headless=True, grace=60) as interrupts:
        with pytest.raises(Abandoned), interrupts.preparation():
            os.kill(os.getpid(), signal.SIGTERM)
            busy(10)
        assert interrupts.ending is Ending.PREEMPTED


def test_outside_a_quantum_nothing_is_interrupted() -> None:
    with Interrupts(headless=True, grace=0.05) as interrupts:
        os.kill(os.getpid(), signal.SIGTERM)
        busy(0.3)
        assert interrupts.ending is Ending.PREEMPTED


def test_a_second_signal_abandons_at_once() -> None:
    with Interrupts(headless=True, grace=60) as interrupts, pytest.raises(Abandoned), interrupts.quantum():
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        busy(10)
    assert interrupts.give_up is False


def test_at_a_terminal_the_second_ctrl_c_gives_up_what_is_not_durable() -> None:
    with Interrupts(headless=False, grace=60) as interrupts, pytest.raises(Abandoned), interrupts.quantum():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        busy(10)
    assert interrupts.ending is Ending.INTERRUPTED
    assert interrupts.give_up is True


def test_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGALRM)
    with Interrupts(headless=True):
        os.kill(os.getpid(), signal.SIGTERM)
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGALRM)) == before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_exit_codes() -> None:
    assert [ending.code for ending in Ending] == [0, 0, 75, 130]
