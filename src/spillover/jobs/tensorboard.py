"""TensorBoard event files: the curves of a tune, for whoever looks with TensorBoard.

Guarantee: a reader of a run folder sees each step once, with the value of the work that counts, wherever and
however often the work was killed and continued; and nothing that happens to these files ends the work.

- Each process writes a file of its own, whose name sorts after those that are there.
- It begins with a session start at the first step to come: readers drop all they have from there on, which
  is what an earlier process did and nobody kept.
- A record is one write at the end of the last whole one. What a full disk or a kill left of a record is cut
  off before the next, or ends its file.

Nothing is synced: what a power loss takes is taken from the curves, not from the work.

Format: TFRecord framing (https://www.tensorflow.org/tutorials/load_data/tfrecord) of the messages in
tensorflow/core/util/event.proto and tensorflow/core/framework/summary.proto, CRC-32C of RFC 3720, B.4.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import socket
import struct
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from spillover.jobs.events import Event

__all__ = ["EventFile"]

PREFIX = "events.out.tfevents."
TRAIN = ("loss", "lr", "grad_norm", "tokens_per_s")
"""Fields of a step that are drawn, each as ``train/<field>``; a validation is ``val/loss``."""


class EventFile:
    """One process's event file in ``folder``; the first step to come is ``first``."""

    def __init__(self, folder: Path, first: int) -> None:
        self._folder = folder
        self._file: int | None = None
        self._end = 0
        self._problem: str | None = None
        self._told = False
        now = time.time()
        head = _record(_event(now, 0, _bytes(3, b"brain.Event:2")))
        self._opening = head + _record(_event(now, first, _bytes(7, _varint(1, 1))))
        self._append(b"")

    def record(self, event: Event) -> None:
        """Write what an event has to draw: those of steps and of validations. Never raises."""
        if event["event"] == "step":
            self.scalars(event["step"], event["time"], {f"train/{name}": event.get(name) for name in TRAIN})
        elif event["event"] == "stage" and event.get("stage") == "validation":
            self.scalars(event["step"], event["time"], {"val/loss": event["loss"]})

    def scalars(self, step: int, moment: float, values: Mapping[str, float | None]) -> None:
        """Write values of a step, all or none of them; what is None is left out."""
        summary = b"".join(
            _bytes(1, _bytes(1, tag.encode()) + b"\x15" + _float(value))
            for tag, value in values.items()
            if isinstance(value, (int, float))
        )
        self._append(_record(_event(moment, step, _bytes(5, summary))))

    def complaint(self) -> str | None:
        """What went wrong, once."""
        if self._told or self._problem is None:
            return None
        self._told = True
        return f"TensorBoard will miss steps: {self._problem}; the work goes on"

    def close(self) -> None:
        """Write no more."""
        self._opening = b""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _append(self, data: bytes) -> None:
        try:
            if self._file is None:
                self._file = self._create()
            if self._opening:  # it could not be written before
                data = self._opening + data
            os.ftruncate(self._file, self._end)  # a part of a record, or nothing
            written = os.pwrite(self._file, data, self._end)
            if written < len(data):
                raise OSError(None, "no space left on the device")
            self._end += written
            self._opening = b""
        except OSError as error:
            self._problem = f"{self._folder}: {error.strerror}"

    def _create(self) -> int:
        """A new file that readers turn to after all others."""
        stamps = (
            path.name.removeprefix(PREFIX).partition(".")[0] for path in self._folder.glob(f"{PREFIX}*")
        )
        latest = max((int(stamp) for stamp in stamps if stamp.isdecimal()), default=0)
        host = re.sub(r"[^A-Za-z0-9_-]+", "-", socket.gethostname())
        name = f"{PREFIX}{max(int(time.time()), latest + 1):010d}.{host}.{os.getpid()}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        return os.open(self._folder / name, flags, 0o644)


def _event(moment: float, step: int, what: bytes) -> bytes:
    return b"\x09" + struct.pack("<d", moment) + _varint(2, step) + what


def _record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + _masked_crc(length) + data + _masked_crc(data)


def _bytes(field: int, data: bytes) -> bytes:
    return _number(field << 3 | 2) + _number(len(data)) + data


def _varint(field: int, value: int) -> bytes:
    return _number(field << 3) + _number(value)


def _number(value: int) -> bytes:
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)


def _float(value: float) -> bytes:
    with contextlib.suppress(OverflowError):
        return struct.pack("<f", value)
    return struct.pack("<f", math.copysign(math.inf, value))


def _table() -> Iterator[int]:
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
        yield value


_TABLE = [*_table()]


def _masked_crc(data: Iterable[int]) -> bytes:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _TABLE[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17 & 0xFFFFFFFF) + 0xA282EAD8) & 0xFFFFFFFF)
