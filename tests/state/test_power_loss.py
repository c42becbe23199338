"""The power goes at every moment of a run of `counter`: see `power`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from power import RecordingDisk, worlds
from spillover.state import State
from spillover.store import LocalStore
from state import counter


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


def reported_by(log: list[tuple[Any, ...]]) -> int:
    """The last step that was reported durable."""
    return max((entry[1] for entry in log if entry[0] == "report"), default=0)


class Interrupted(LocalStore):
    """Loses the transition that would complete the work, as a kill would."""

    def replace(self, key: str, data: bytes, version: str) -> str:
        return version if b'"completed"' in data else super().replace(key, data, version)


def test_whatever_survives_is_complete_and_no_report_was_premature(
    recorded: RecordingDisk, tmp_path: Path
) -> None:
    seen: set[int] = set()
    for number, (cut, world) in enumerate(worlds(recorded.log, recorded.root)):
        reported = reported_by(recorded.log[:cut])
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
    for number, (cut, world) in enumerate(worlds(careless, recorded.root)):
        reported = reported_by(careless[:cut])
        world.build(recorded.root, tmp_path / str(number))
        try:
            document = State(LocalStore(tmp_path / str(number))).read()
            current = document.current.get("ckpt") if document else None
            lost += (current.step if current else 0) < reported
        except Exception:
            lost += 1
    assert lost > 100
