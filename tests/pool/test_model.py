"""Random histories against a small model: what is owned reads, always; what is not, reads or is collected."""

from __future__ import annotations

import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, rule

from spillover.errors import Collected, Mismatch
from spillover.pool import Link, Owners, Pool, Publication, Record, Ref, Tensor

NAMES = st.sampled_from(["a", "b", "c", "checkpoint:1"])


class Side:
    """One of two pools, what is known of it, and the processes' handles on it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.pool = Pool.open(path, create=True, pack_bytes=2000)
        self.owners: Owners = self.pool.owners()
        self.owned: dict[str, set[Ref]] = {}
        self.unsettled: set[Ref] = set()
        self.gone: set[Ref] = set()
        """What was seen to be collected; it may come back by an import only."""

    def reopen(self) -> None:
        self.owners.close()
        self.pool.close()
        self.pool = Pool.open(self.path, pack_bytes=2000)
        self.owners = self.pool.owners()
        self.unsettled.clear()


class Pools(RuleBasedStateMachine):
    """Two pools that publish, own, release, rewrite, collect, and carry publications to each other."""

    refs = Bundle("refs")

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.sides: list[Side] = []
        self.content: dict[Ref, dict[str, Any]] = {}
        self.needs: dict[Ref, set[Ref]] = {}
        self.files = 0

    @initialize()
    def open(self) -> None:
        self.sides = [Side(self.folder / name) for name in ("one", "two")]

    def teardown(self) -> None:
        for side in self.sides:
            side.owners.close()
            side.pool.close()
        shutil.rmtree(self.folder)

    def closure(self, refs: set[Ref]) -> set[Ref]:
        found: set[Ref] = set()
        todo = [*refs]
        while todo:
            if (ref := todo.pop()) not in found:
                found.add(ref)
                todo += self.needs[ref]
        return found

    def safe(self, side: Side) -> set[Ref]:
        """What must be readable: owned with all that it depends on, or just published.

        A writer holds what it published, but not what that depends on: somebody has to own this meanwhile.
        """
        kept = self.closure(set().union(*side.owned.values())) | side.unsettled
        return {ref for ref in kept if self.closure({ref}) <= kept}

    def readable(self, side: Side, ref: Ref) -> bool:
        try:
            found = {name: record.payload for name, record in side.pool.read(ref).items()}
        except (Collected, Mismatch):
            side.gone.add(ref)
            return False
        assert ref not in side.gone, "what was collected came back"
        plain = {
            name: value.numpy().tolist() if isinstance(value, Tensor) else value
            for name, value in found.items()
        }
        assert plain == self.content[ref]
        return True

    @rule(target=refs, which=st.integers(0, 1), seed=st.integers(0, 999), size=st.integers(0, 1200))
    def publish(self, which: int, seed: int, size: int) -> Ref:
        side, luck = self.sides[which], random.Random(seed)
        array = np.arange(luck.randrange(5))
        records = [Record("b", luck.randbytes(size)), Record("j", {"n": seed}), Record("t", array)]
        ref = side.pool.publish(records)
        content = {"b": records[0].payload, "j": {"n": seed}, "t": array.tolist()}
        return self.note(side, ref, content, set())

    @rule(target=refs, which=st.integers(0, 1), old=refs, link=st.booleans())
    def publish_with_dependency(self, which: int, old: Ref, link: bool) -> Any:
        side = self.sides[which]
        if not self.readable(side, old):
            return multiple()
        records: list[Record | Link] = [Record("n", "new")]
        content: dict[str, Any] = {"n": "new"}
        name = sorted(self.content[old])[0] if self.content[old] else ""
        if link and name:
            place = [*side.pool.read(old)].index(name)
            records.append(Link("linked", old.at(place)))
            content["linked"] = self.content[old][name]
        ref = side.pool.publish(records, dependencies=[old])
        return self.note(side, ref, content, {old})

    @rule(target=refs, which=st.integers(0, 1), seed=st.integers(0, 999), count=st.integers(1, 4))
    def publish_many(self, which: int, seed: int, count: int) -> Any:
        side = self.sides[which]
        many = [Publication([Record("m", [seed, number])], [*range(number)]) for number in range(count)]
        refs = side.pool.publish_many(many, submission=None if seed % 2 else f"{seed} {count}")
        for number, ref in enumerate(refs):
            if ref not in self.content:
                self.note(side, ref, {"m": [seed, number]}, {*refs[:number]})
        return multiple(*refs)

    def note(self, side: Side, ref: Ref, content: dict[str, Any], needs: set[Ref]) -> Ref:
        self.content[ref], self.needs[ref] = content, needs
        side.unsettled.add(ref)
        return ref

    @rule(which=st.integers(0, 1), name=NAMES, refs=st.lists(refs, min_size=1, max_size=3))
    def retain(self, which: int, name: str, refs: list[Ref]) -> None:
        side = self.sides[which]
        try:
            side.owners.retain(name, refs)
        except (Collected, Mismatch):
            safe = self.safe(side)
            assert any(self.closure({ref}) - safe for ref in refs), "what is owned could not be owned again"
            return
        side.owned.setdefault(name, set()).update(refs)
        side.unsettled -= {*refs}

    @rule(which=st.integers(0, 1), name=NAMES)
    def release(self, which: int, name: str) -> None:
        self.sides[which].owners.release(name)
        self.sides[which].owned.pop(name, None)

    @rule(which=st.integers(0, 1))
    def settle(self, which: int) -> None:
        side = self.sides[which]
        side.pool.settle(side.unsettled)
        side.unsettled.clear()

    @rule(which=st.integers(0, 1))
    def seal(self, which: int) -> None:
        self.sides[which].pool.seal()

    @rule(which=st.integers(0, 1))
    def reopen(self, which: int) -> None:
        self.sides[which].reopen()

    @rule(which=st.integers(0, 1))
    def collect(self, which: int) -> None:
        found = self.sides[which].owners.collect()
        assert found.damaged == []

    @rule(which=st.integers(0, 1), share=st.sampled_from([0.3, 0.7, 1.1]))
    def compact(self, which: int, share: float) -> None:
        found = self.sides[which].owners.compact(min_owned=share)
        assert found.damaged == []

    @rule(which=st.integers(0, 1), name=NAMES)
    def carry(self, which: int, name: str) -> None:
        side, other = self.sides[which], self.sides[1 - which]
        if name not in side.owned:
            return
        self.files += 1
        file = self.folder / f"file {self.files}"
        side.owners.export([name], file)
        other.owners.import_(file)
        other.owned.setdefault(name, set()).update(side.owned[name])
        other.gone -= self.closure(side.owned[name])

    @rule(which=st.integers(0, 1), ref=refs)
    def read(self, which: int, ref: Ref) -> None:
        self.readable(self.sides[which], ref)

    @rule(which=st.integers(0, 1), refs=st.lists(refs, min_size=1, max_size=3))
    def read_under_a_pin(self, which: int, refs: list[Ref]) -> None:
        side = self.sides[which]
        try:
            pin = side.pool.pin(refs)
        except (Collected, Mismatch):
            assert not self.closure({*refs}) <= self.safe(side)
            return
        with pin:
            side.owners.compact(min_owned=1.1)
            side.owners.collect()
            assert all(self.readable(side, ref) for ref in self.closure({*refs}))

    @rule(which=st.integers(0, 1))
    def verify(self, which: int) -> None:
        found = self.sides[which].pool.verify()
        assert (found.damaged, found.torn) == ([], 0)

    @invariant()
    def what_is_owned_reads(self) -> None:
        for side in self.sides:
            for ref in self.safe(side):
                assert self.readable(side, ref), "owned, and gone"
            assert side.owners.names() == sorted(side.owned)
            for name, refs in side.owned.items():
                assert {*side.owners.owned(name)} == refs


def run(examples: int, steps: int) -> None:
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(
        Pools,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=[*HealthCheck],
        ),
    )


def test_histories() -> None:
    run(25, 30)


@pytest.mark.slow
def test_many_long_histories() -> None:
    run(150, 60)
