"""What was measured of this machine, kept in ``SPILL_HOME/speeds.json``.

The file is an object of entries, each with a key that names what it holds for: processor, threads, the
version of torch. An entry that cannot be read, because another version wrote it, counts as missing and is
kept as it is. A home that cannot be written only means measuring again.
"""

from __future__ import annotations

import contextlib
import platform
import tempfile
from pathlib import Path
from typing import TypeVar

import msgspec

from spillover.engine.estimate import Costs
from spillover.engine.ring.drive import Drive
from spillover.models import home

T = TypeVar("T", bound=msgspec.Struct)


class Speeds(msgspec.Struct, frozen=True):
    """Quickly measured of one dtype: large products in GFLOP/s, and whether packed weights are faster."""

    gflops: float
    packed: bool


class Memory(msgspec.Struct, frozen=True):
    """All threads reading a buffer larger than the caches, in 10^9 bytes a second."""

    gbs: float


class Rates(msgspec.Struct, frozen=True):
    """What was measured in one dtype: torch's large products and whole passes of a small model in GFLOP/s.

    ``alone_gbs`` is at how many 10^9 bytes a second a pass of one token gets through the weights. ``code``
    names what computed the passes; other code has other costs.
    """

    gflops: float
    passes_gflops: float
    alone_gbs: float
    code: str
    generation: Costs
    training: Costs


class Machine(msgspec.Struct, frozen=True):
    """What ``spill doctor --measure`` found; ``time`` in Unix seconds, `rates` by numerics.

    ``drive`` is None where it could not be measured, and ``without_drive`` says why.
    """

    processor: str
    threads: int
    torch: str
    version: str
    time: float
    seconds: float
    memory: Memory
    drive: Drive | None
    without_drive: str
    rates: dict[str, Rates]


def machine_key(threads: int, torch: str) -> str:
    """The key of a `Machine`."""
    return f"{processor()}, {threads} threads, torch {torch}, measured"


def recall(key: str, kind: type[T]) -> T | None:
    """The entry of `key`, None when there is none of this kind."""
    raw = _entries().get(key)
    if raw is not None:
        with contextlib.suppress(msgspec.ValidationError):
            return msgspec.json.decode(raw, type=kind)
    return None


def machines() -> list[Machine]:
    """All that was measured on this processor, the newest first."""
    keys = [key for key in _entries() if key.startswith(f"{processor()}, ") and key.endswith(", measured")]
    found = [one for key in keys if (one := recall(key, Machine)) is not None]
    return sorted(found, key=lambda one: one.time, reverse=True)


def keep(key: str, value: msgspec.Struct) -> bool:
    """Put an entry beside the others; False when the home cannot be written."""
    entries = _entries() | {key: msgspec.Raw(msgspec.json.encode(value))}
    try:
        _file().parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=_file().parent) as folder:
            written = Path(folder) / _file().name
            written.write_bytes(msgspec.json.encode(entries))
            written.replace(_file())
    except OSError:
        return False
    return True


def processor() -> str:
    """The processor's name, as the system tells it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _file() -> Path:
    return home() / "speeds.json"


def _entries() -> dict[str, msgspec.Raw]:
    with contextlib.suppress(OSError, msgspec.DecodeError):
        return msgspec.json.decode(_file().read_bytes(), type=dict[str, msgspec.Raw])
    return {}
