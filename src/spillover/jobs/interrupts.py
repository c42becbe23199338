"""Stopping in time: signals, the quantum that may finish, and the one that is abandoned.

Guarantee: from the first signal, a job reaches its next boundary within ``grace`` seconds. A quantum that
ends sooner is kept; one that does not is abandoned by an exception at the next bytecode of the main
thread, unless it has reached its last act (`finishing`): from there on it ends normally, so that what it
did and what it reports never differ.

Without a terminal, SIGTERM and SIGINT mean preemption: save, exit 75, so that a scheduler retries. At a
terminal the first Ctrl-C finishes the quantum and saves, the second gives up what is not yet durable;
both exit 130.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from enum import Enum
from types import FrameType
from typing import Any

__all__ = ["Abandoned", "Ending", "Interrupts"]

GRACE_SECONDS = 15.0
NOTICE = b"\nfinishing what is under way and saving it; once more gives it up\n"
SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Abandoned(BaseException):
    """Raised in the middle of a quantum whose time is over. Not an error: nobody but the loop catches it."""


class Ending(Enum):
    """How a job ended."""

    DONE = "done"
    STOPPED = "stopped on purpose"
    PREEMPTED = "preempted"
    INTERRUPTED = "interrupted"

    @property
    def code(self) -> int:
        """The process's exit code."""
        return {Ending.PREEMPTED: 75, Ending.INTERRUPTED: 130}.get(self, 0)


class Interrupts:
    """Listens for signals while entered. Outside the main thread it never hears any.

    Attributes:
        signal: name of the first signal, None before.
        give_up: a second Ctrl-C at a terminal: do not save.
    """

    def __init__(self, *, headless: bool, grace: float = GRACE_SECONDS) -> None:
        self.headless = headless
        self.grace = grace
        self.signal: str | None = None
        self.give_up = False
        self._overdue = False
        self._abandonable = False
        self._worthless = False
        self._before: dict[signal.Signals, Any] = {}

    @property
    def ending(self) -> Ending | None:
        """How the job must end now; None while it may go on."""
        if self.signal is None:
            return None
        by_person = self.signal == "SIGINT" and not self.headless
        return Ending.INTERRUPTED if by_person else Ending.PREEMPTED

    def ask(self, name: str) -> None:
        """Ask for an end at the next boundary, as the signal ``name`` does, from any thread."""
        self.signal = self.signal or name

    @contextlib.contextmanager
    def quantum(self) -> Iterator[None]:
        """The body may be abandoned: it raises `Abandoned` once its time is over."""
        self._abandonable = True
        try:
            self._abandon_if_overdue()
            yield
        finally:
            self._abandonable = False

    @contextlib.contextmanager
    def preparation(self) -> Iterator[None]:
        """The body has nothing to lose: the first signal raises `Abandoned` in it."""
        self._worthless = True
        try:
            with self.quantum():
                yield
        finally:
            self._worthless = False

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """The body, milliseconds long, is done whole or not at all: what would abandon it waits for it."""
        before, self._abandonable = self._abandonable, False
        try:
            yield
        finally:
            self._abandonable = before
        self._abandon_if_overdue()

    @contextlib.contextmanager
    def finishing(self) -> Iterator[None]:
        """The quantum's last act, milliseconds long: from here it cannot be abandoned."""
        self._abandonable = False
        yield

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                self._before[number] = signal.signal(number, self._heard)
            self._before[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._late)
        return self

    def __exit__(self, *exc: object) -> None:
        if self._before:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _heard(self, number: int, frame: FrameType | None) -> None:
        if self.signal is None:
            self.signal = signal.Signals(number).name
            if self._worthless:
                self._late(number, frame)
                return
            signal.setitimer(signal.ITIMER_REAL, self.grace)
            if not self.headless:
                os.write(2, NOTICE)  # a plain system call: the handler may have interrupted a print
            return
        self.give_up = not self.headless
        self._late(number, frame)

    def _late(self, number: int, frame: FrameType | None) -> None:
        self._overdue = True
        self._abandon_if_overdue()

    def _abandon_if_overdue(self) -> None:
        if self._overdue and self._abandonable:
            raise Abandoned
