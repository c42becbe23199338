"""Whole jobs through every store fault: nothing reported durable is lost, nothing is done twice."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from faults import Zygote
from jobs.test_run import answers
from spillover.jobs.segments import KIND, Segments
from spillover.state import Control, State
from spillover.store import open_store


@pytest.fixture(scope="module")
def zygotes(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Iterator[tuple[Zygote, Zygote]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPILL_HOME", str(tmp_path_factory.mktemp("home")))
        patch.setenv("OMP_NUM_THREADS", "1")
        with (
            Zygote("jobs.scenarios:tune_logged") as tuning,
            Zygote("jobs.scenarios:rows_logged") as answering,
        ):
            yield tuning, answering


def reported(log: Path) -> int:
    return max(map(int, log.read_text().split())) if log.exists() else 0


def faults(count: int, stride: int) -> Iterator[tuple[int, str]]:
    """Every call with one kind of fault, the kinds in turn; every ``stride``-th call with all of them."""
    kinds = ("kill", "after", "before", "killed")
    for at in range(1, count + 1):
        for number, kind in enumerate(kinds):
            if at % stride == 0 or at % len(kinds) == number:
                yield at, kind


def require_turns(turns: list[bool]) -> None:
    """Saves run beside the work, so the number of calls varies: a late fault may not have its turn."""
    assert turns.count(True) > len(turns) * 0.75, "the calls are not the same from run to run"


def current(uri: str, name: str, log: Path) -> Control | None:
    """I2 and I4: what is current verifies, and reaches what was reported."""
    document = State(open_store(uri)).read()
    reference = document.current.get(name) if document else None
    assert (reference.step if reference else 0) >= reported(log)
    if document is not None and reference is not None:
        for one in (reference, *document.previous.values()):
            State(open_store(uri)).open(one).verify()
    return document


@pytest.mark.slow
def test_tune_through_every_fault(quick_uri: str, folder: Path, tiny: Path, zygotes) -> None:
    tuning, _ = zygotes
    options = {"folder": str(folder), "model": str(tiny)}
    clean = tuning.run(f"{quick_uri}/clean", folder / "clean.log", **options)
    assert clean.code == 0, clean
    wanted = losses_and_params(f"{quick_uri}/clean", folder)
    local = not quick_uri.startswith("s3:")
    turns: list[bool] = []
    for at, kind in faults(len(clean.calls), 8 if local else 1000):
        uri, log = f"{quick_uri}/{at}-{kind}", folder / f"{at}-{kind}.log"
        turns.append(tuning.run(uri, log, (at, kind), **options).require(at, kind))
        current(uri, "ckpt", log)
        final = tuning.run(uri, log, takeover=not local, **options)
        assert final.code == 0, (at, kind, final)
        current(uri, "ckpt", log)
        assert losses_and_params(uri, folder) == wanted, (at, kind)
    require_turns(turns)


@pytest.mark.slow
def test_rows_through_every_fault(quick_uri: str, folder: Path, tiny: Path, zygotes) -> None:
    _, answering = zygotes
    options = {"folder": str(folder), "model": str(tiny)}
    clean = answering.run(f"{quick_uri}/clean", folder / "clean.log", **options)
    assert clean.code == 0, clean
    wanted = rows(f"{quick_uri}/clean", folder)
    assert len(wanted) == 12
    local = not quick_uri.startswith("s3:")
    turns: list[bool] = []
    for at, kind in faults(len(clean.calls), 8 if local else 1000):
        uri, log = f"{quick_uri}/{at}-{kind}", folder / f"{at}-{kind}.log"
        turns.append(answering.run(uri, log, (at, kind), **options).require(at, kind))
        current(uri, "rows", log)
        final = answering.run(uri, log, takeover=not local, **options)
        assert final.code == 0, (at, kind, final)
        current(uri, "rows", log)
        assert rows(uri, folder) == wanted, (at, kind)
    require_turns(turns)


def losses_and_params(uri: str, scratch: Path) -> tuple[list[float], dict[str, bytes]]:
    state = State(open_store(uri))
    document = state.read()
    assert document is not None
    assert document.status == "completed"
    payload = state.open(document.current["ckpt"])
    payload.fetch("params.safetensors", scratch / "params")
    params = {name: array.tobytes() for name, array in load_file(scratch / "params").items()}
    return json.loads(payload.read("state.json"))["losses"], params


def rows(uri: str, scratch: Path) -> list[dict]:
    """The results at a place, without what differs from run to run."""
    state = State(open_store(uri))
    document = state.read()
    assert document is not None
    assert document.status == "completed"
    segments = Segments(state.open, document.current[KIND])
    (scratch / "rows").write_bytes(b"".join(segments.lines()))
    return answers(scratch / "rows")
