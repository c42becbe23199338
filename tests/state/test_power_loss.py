"""The power goes at every moment of a run, and what was not synced survives in every odd way.

`RecordingDisk` does the real work and keeps a log of it. A crash is a cut of that log: bytes are certain
only after a sync of their file, names only after a sync of their folder; everything else since then may
or may not have reached the platter, in any order. Each such world is built as a folder and inspected.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from spillover.state import State
from spillover.store import LocalStore
from spillover.store.disk import Disk
from state import counter


class RecordingDisk(Disk):
    """The real disk, with a log of ``(operation, *details)``."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.log: list[tuple[Any, ...]] = []
        self._files: dict[int, int] = {}
        self._names: dict[Path, int] = {}
        self._count = 0

    def open(self, path: Path) -> int:
        file = super().open(path)
        self._count += 1
        self._files[file] = self._names[path] = self._count
        self.log.append(("name", path, self._count))
        return file

    def write(self, file: int, data: bytes | memoryview) -> None:
        super().write(file, data)
        self.log.append(("write", self._files[file], bytes(data)))

    def sync(self, file: int) -> None:
        if file in self._files:
            self.log.append(("sync", self._files[file]))

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


@dataclass
class World:
    """What is on the platter after a crash."""

    names: dict[Path, int] = field(default_factory=dict)
    folders: set[Path] = field(default_factory=set)
    data: dict[int, bytes] = field(default_factory=dict)

    def build(self, root: Path, target: Path) -> None:
        target.mkdir(parents=True)
        for path, number in self.names.items():
            parents = [p for p in path.parents if p.is_relative_to(root) and p != root]
            if all(parent in self.folders for parent in parents):
                copy = target / path.relative_to(root)
                copy.parent.mkdir(parents=True, exist_ok=True)
                copy.write_bytes(self.data.get(number, b""))


def crash(log: list[tuple[Any, ...]], root: Path, luck: random.Random, chance: float) -> World:
    """The world after ``log``, where each unsynced operation survives with probability ``chance``."""
    world = World(folders={root})
    for at, (operation, *details) in enumerate(log):
        if operation == "write":
            number, data = details
            certain = any(entry == ("sync", number) for entry in log[at:])
            if certain or luck.random() < chance:
                world.data[number] = world.data.get(number, b"") + data
            elif chance:
                world.data[number] = world.data.get(number, b"") + data[: luck.randrange(len(data) + 1)]
        elif operation in ("name", "rename", "unlink", "mkdir"):
            folder = details[0].parent
            certain = any(entry == ("sync_folder", folder) for entry in log[at:])
            if certain or luck.random() < chance:
                apply(world, operation, details)
    return world


def apply(world: World, operation: str, details: list[Any]) -> None:
    if operation == "name":
        world.names[details[0]] = details[1]
    elif operation == "rename":
        world.names.pop(details[0], None)
        world.names[details[1]] = details[2]
    elif operation == "mkdir":
        world.folders.add(details[0])
    else:
        world.names.pop(details[0], None)
        world.folders.discard(details[0])


def worlds(log: list[tuple[Any, ...]], root: Path) -> Iterator[tuple[int, int, World]]:
    """Every cut of the log, each with nothing, everything and some random part of the rest surviving."""
    luck = random.Random(7)
    for cut in range(len(log) + 1):
        reported = max((entry[1] for entry in log[:cut] if entry[0] == "report"), default=0)
        for chance in (0.0, 1.0, 0.5, 0.5, 0.8):
            yield cut, reported, crash(log[:cut], root, luck, chance)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> RecordingDisk:
    """A run that saves, is interrupted, continues and completes, with its reports in the log."""
    root = tmp_path_factory.mktemp("disk") / "state"
    root.mkdir()
    disk = RecordingDisk(root)
    patch = pytest.MonkeyPatch()
    patch.setattr(counter, "report", lambda _, step: disk.log.append(("report", step)))
    patch.setattr(counter, "STEPS", 2)
    counter.run(Interrupted(root, disk), root / "unused")
    patch.setattr(counter, "STEPS", 3)
    counter.run(LocalStore(root, disk), root / "unused")
    patch.undo()
    return disk


class Interrupted(LocalStore):
    """Loses the transition that would complete the work, as a kill would."""

    def replace(self, key: str, data: bytes, version: str) -> str:
        return version if b'"completed"' in data else super().replace(key, data, version)


def test_whatever_survives_is_complete_and_no_report_was_premature(
    recorded: RecordingDisk, tmp_path: Path
) -> None:
    seen: set[int] = set()
    for number, (cut, reported, world) in enumerate(worlds(recorded.log, recorded.root)):
        target = tmp_path / str(number)
        world.build(recorded.root, target)
        store = LocalStore(target)
        document = State(store).read()
        current = document.current.get("ckpt") if document else None
        step = current.step if current else 0
        assert step >= reported, f"step {reported} was reported durable and is gone (cut {cut})"
        if current is not None:
            State(store).open(current).verify()
        seen.add(step)
        if number % 7 == 0:
            counter.run(store, tmp_path / f"{number}.log")
            final = State(store).read()
            assert final is not None
            assert final.progress["total"] == counter.TOTAL
    assert seen == {0, 1, 2, 3}


def test_the_check_can_fail(recorded: RecordingDisk, tmp_path: Path) -> None:
    """Without its file syncs the same run does lose what it reported, so the worlds mean something."""
    careless = [entry for entry in recorded.log if entry[0] != "sync"]
    lost = 0
    for number, (_, reported, world) in enumerate(worlds(careless, recorded.root)):
        world.build(recorded.root, tmp_path / str(number))
        try:
            document = State(LocalStore(tmp_path / str(number))).read()
            current = document.current.get("ckpt") if document else None
            lost += (current.step if current else 0) < reported
        except Exception:
            lost += 1
    assert lost > 100
