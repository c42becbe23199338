"""The power goes at every moment of a run, and what was not synced survives in every odd way.

`RecordingDisk` does the real work and keeps a log of it. A crash is a cut of that log: bytes are certain
only after a sync of their file, names only after a sync of their folder; everything else since then may
or may not have reached the platter, in any order and page by page. Each such world is built as a folder and
inspected.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spillover.store.disk import Disk

PAGE = 4096
Log = list[tuple[Any, ...]]


class RecordingDisk(Disk):
    """The real disk, with a log of ``(operation, *details)``."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.log: Log = []
        self._files: dict[int, int] = {}
        self._names: dict[Path, int] = {}
        self._sizes: dict[int, int] = {}
        self._count = itertools.count(1)  # several threads write files at once

    def open(self, path: Path) -> int:
        file = super().open(path)
        number = next(self._count)
        self._sizes[number] = 0
        self._files[os.fstat(file).st_ino] = self._names[path] = number
        self.log.append(("name", path, number))
        return file

    def write(self, file: int, data: bytes | memoryview) -> None:
        super().write(file, data)
        number = self._number(file)
        self.log.append(("write", number, self._sizes[number], bytes(data)))
        self._sizes[number] += len(data)

    def write_at(self, file: int, parts: Sequence[bytes | memoryview], offset: int) -> None:
        super().write_at(file, parts, offset)
        self.log.append(("write", self._number(file), offset, b"".join(parts)))

    def truncate(self, file: int, size: int) -> None:
        super().truncate(file, size)
        self.log.append(("truncate", self._number(file), size))

    def sync(self, file: int) -> None:
        self.log.append(("sync", self._number(file)))

    def sync_data(self, file: int) -> None:
        self.sync(file)

    def rename(self, old: Path, new: Path) -> None:
        super().rename(old, new)
        self._names[new] = self._names.pop(old)
        self.log.append(("rename", old, new, self._names[new]))

    def link(self, old: Path, new: Path) -> None:
        super().link(old, new)
        self._names[new] = self._names[old]
        self.log.append(("name", new, self._names[old]))

    def unlink(self, path: Path) -> None:
        super().unlink(path)
        self.log.append(("unlink", path))

    def mkdir(self, path: Path) -> None:
        super().mkdir(path)
        self.log.append(("mkdir", path))

    def rmdir(self, path: Path) -> None:
        super().rmdir(path)
        self.log.append(("unlink", path))

    def sync_folder(self, path: Path) -> None:
        self.log.append(("sync_folder", path))

    def committed(self, path: Path, data: bytes) -> None:
        """Note that a database looks so from here on: its own commits are atomic and durable."""
        self.log.append(("database", path, data))

    def _number(self, file: int) -> int:
        """Descriptors are used again, and a file may be synced through one that only reads: go by inode."""
        return self._files[os.fstat(file).st_ino]


@dataclass
class World:
    """What is on the platter after a crash."""

    names: dict[Path, int] = field(default_factory=dict)
    folders: set[Path] = field(default_factory=set)
    data: dict[int, bytearray] = field(default_factory=dict)
    databases: dict[Path, bytes] = field(default_factory=dict)

    def build(self, root: Path, target: Path) -> None:
        target.mkdir(parents=True)
        for path in sorted(self.folders - {root}):
            if all(parent in self.folders for parent in path.parents if parent.is_relative_to(root)):
                (target / path.relative_to(root)).mkdir(exist_ok=True)
        for path, number in self.names.items():
            self._put(root, target, path, self.data.get(number, b""))
        for path, data in self.databases.items():
            self._put(root, target, path, data)

    def _put(self, root: Path, target: Path, path: Path, data: bytes | bytearray) -> None:
        copy = target / path.relative_to(root)
        if copy.parent.is_dir():
            copy.write_bytes(data)

    def write(self, number: int, offset: int, data: bytes, luck: random.Random, chance: float) -> None:
        """Let each page of a write survive with probability ``chance``, and perhaps only the file's size."""
        file = self.data.setdefault(number, bytearray())
        at, end = offset, offset + len(data)
        while at < end:
            stop = min(end, (at // PAGE + 1) * PAGE)
            if luck.random() < chance:
                file.extend(bytes(max(0, stop - len(file))))
                file[at:stop] = data[at - offset : stop - offset]
            at = stop
        if 0 < chance < 1 and luck.random() < chance / 2:
            file.extend(bytes(max(0, end - len(file))))

    def truncate(self, number: int, size: int) -> None:
        file = self.data.setdefault(number, bytearray())
        del file[size:]
        file.extend(bytes(size - len(file)))

    def rename(self, operation: str, details: list[Any]) -> None:
        if operation == "name":
            self.names[details[0]] = details[1]
        elif operation == "rename":
            self.names.pop(details[0], None)
            self.names[details[1]] = details[2]
        elif operation == "mkdir":
            self.folders.add(details[0])
        else:
            self.names.pop(details[0], None)
            self.folders.discard(details[0])


def crash(log: Log, synced: list[int], cut: int, root: Path, luck: random.Random, chance: float) -> World:
    """The world after ``log[:cut]``, where each unsynced operation survives with probability ``chance``."""
    world = World(folders={root})
    for at, (operation, *details) in enumerate(log[:cut]):
        certain = synced[at] < cut
        if operation == "write":
            world.write(*details, luck, 1.0 if certain else chance)
        elif operation == "database":
            world.databases[details[0]] = details[1]
        elif operation == "truncate":
            if certain or luck.random() < chance:
                world.truncate(*details)
        elif operation in ("name", "rename", "unlink", "mkdir") and (certain or luck.random() < chance):
            world.rename(operation, details)
    return world


def worlds(
    log: Log, root: Path, chances: Sequence[float] = (0.0, 1.0, 0.5, 0.5, 0.8)
) -> Iterator[tuple[int, World]]:
    """Every cut of the log, each with nothing, everything and some random part of the rest surviving."""
    luck = random.Random(7)
    synced = _synced(log)
    for cut in range(len(log) + 1):
        for chance in chances:
            yield cut, crash(log, synced, cut, root, luck, chance)


def _synced(log: Log) -> list[int]:
    """For each operation, the place in the log from which on it is certain."""
    files: dict[int, int] = {}
    folders: dict[Path, int] = {}
    found = [len(log) + 1] * len(log)
    for at in range(len(log) - 1, -1, -1):
        operation, *details = log[at]
        if operation == "sync":
            files[details[0]] = at
        elif operation == "sync_folder":
            folders[details[0]] = at
        elif operation in ("write", "truncate"):
            found[at] = files.get(details[0], len(log) + 1)
        elif operation in ("name", "rename", "unlink", "mkdir"):
            found[at] = folders.get(details[0].parent, len(log) + 1)
    return found
