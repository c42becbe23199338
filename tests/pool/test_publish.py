"""Publishing: whole or not at all, once however often it is asked for, from threads and forks."""

from __future__ import annotations

import os
import random
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spillover.errors import Conflict, InputError, SpillError, StateError, StoreError, StoreFull, Unknown
from spillover.pool import Link, Pool, Publication, Record, Ref, answers
from spillover.store.disk import Disk


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    with Pool.open(tmp_path / "pool", create=True) as found:
        yield found


def values(pool: Pool, ref: Ref) -> dict[str, Any]:
    return {name: record.payload for name, record in pool.read(ref).items()}


def spread(act: Callable[[int], Any], threads: int) -> list[Any]:
    """The results of ``act`` in so many threads at once; what it raised, where it raised."""
    results: list[Any] = [None] * threads
    gate = threading.Barrier(threads)

    def run(number: int) -> None:
        gate.wait(30)
        try:
            results[number] = act(number)
        except BaseException as error:
            results[number] = error

    running = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(60)
        assert not thread.is_alive()
    return results


def in_child(act: Callable[[], object]) -> int:
    """The exit status of a forked child: 0 if ``act`` returned something true."""
    child = os.fork()
    if child == 0:
        status = 99
        try:
            status = 0 if act() else 1
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_order_and_names_are_kept(pool: Pool) -> None:
    ref = pool.publish([Record(name, index) for index, name in enumerate("zax")])
    found = pool.read(ref)
    assert [*found] == ["z", "a", "x"]
    assert [found.ref_of(name) for name in found] == [ref.at(0), ref.at(1), ref.at(2)]
    assert pool.record(ref.at(2)) == Record("x", 2)
    with pytest.raises(KeyError):
        found["y"]


def test_nothing_is_a_publication_too(pool: Pool) -> None:
    """What follows an empty one in the pack is found as well."""
    refs = [pool.publish([]), pool.publish([Record("a", 1)]), pool.publish([], dependencies=[])]
    assert pool.publish_tensors({}) == {}
    assert pool.publish_many([]) == []
    refs.append(pool.publish([Record("b", 2)], submission="behind"))
    assert [len(pool.read(ref)) for ref in refs] == [0, 1, 0, 1]
    assert pool.receipt("behind") == [refs[-1]]
    found = pool.verify()
    assert (found.publications, found.damaged, found.torn) == (5, [], 0)


def test_tensors_by_name(pool: Pool) -> None:
    arrays = {name: np.full((3, 2), index) for index, name in enumerate("abc")}
    refs = pool.publish_tensors(arrays)
    assert [*refs] == ["a", "b", "c"]
    assert len({ref.whole() for ref in refs.values()}) == 1
    for name, ref in refs.items():
        np.testing.assert_array_equal(pool.tensor(ref).numpy(), arrays[name])


def test_dependencies_on_earlier_ones_of_the_same_call_and_of_others(pool: Pool) -> None:
    first = pool.publish([Record("first", 1)])
    refs = pool.publish_many(
        [
            Publication([Record("a", 1)]),
            Publication([Record("b", 2)], [0]),
            Publication([Record("c", 3)], [first.at(0), 1, 0, refs_of(pool)]),
        ]
    )
    assert [ref.linked for ref in refs] == [False, True, True]
    assert pool.read(refs[0]).dependencies == []
    assert pool.read(refs[1]).dependencies == [refs[0]]
    assert pool.read(refs[2]).dependencies[:3] == [first, refs[1], refs[0]]
    assert pool.verify().damaged == []


def refs_of(pool: Pool) -> Ref:
    return pool.publish([Record("other", 1)])


@pytest.mark.parametrize("number", [-1, 1, 2, 99])
def test_a_dependency_on_a_later_one_is_refused(pool: Pool, number: int) -> None:
    with pytest.raises(InputError, match="publication 1 depends"):
        pool.publish_many([Publication([]), Publication([], [number])])


def test_links_share_the_payload(pool: Pool) -> None:
    payload = np.arange(100_000, dtype=np.float64)
    old = pool.publish([Record("w", payload, {"kind": "weights"}), Record("n", 1)])
    new = pool.publish([Record("m", 2), Link("alias", old.at(0)), Link("n", old.at(1))])
    again = pool.publish([Link("twice", new.at(1))])
    assert new.length + again.length < 2000
    found = pool.read(new)
    assert [*found] == ["m", "alias", "n"]
    assert (found["n"].payload, found["alias"].id, found["alias"].metadata) == (
        1,
        "alias",
        {"kind": "weights"},
    )
    np.testing.assert_array_equal(found["alias"].payload.numpy(), payload)
    np.testing.assert_array_equal(pool.tensor(again.at(0))[5:7], payload[5:7])
    assert found.dependencies == [old]
    with pytest.raises(InputError, match="'x'"):
        pool.publish([Link("x", old)])


def test_many_links_to_many_publications(pool: Pool) -> None:
    refs = pool.publish_many([Publication([Record("r", number)]) for number in range(3000)])
    manifest = pool.publish(
        [Link(str(number), ref.at(0)) for number, ref in enumerate(refs)], dependencies=refs[:7]
    )
    found = pool.read(manifest)
    assert [found[str(number)].payload for number in range(0, 3000, 100)] == [*range(0, 3000, 100)]
    assert found.dependencies == refs


def test_updated_replaces_shares_and_adds(pool: Pool) -> None:
    old = pool.publish([Record("a", 1), Record("b", np.arange(50_000)), Record("c", 3)])
    new = pool.updated(old, {"a": 10, "d": 4})
    newer = pool.updated(new, {"c": 30})
    assert new.length + newer.length < 4000
    for ref, expected in [(old, (1, 3)), (new, (10, 3)), (newer, (10, 30))]:
        found = pool.read(ref)
        assert (found["a"].payload, found["c"].payload) == expected
        np.testing.assert_array_equal(found["b"].payload.numpy(), np.arange(50_000))
    assert [*pool.read(newer)] == ["a", "b", "c", "d"]


class Counting(Disk):
    """Counts syncs, and can fail or be interrupted in one of them; with a ``write_error``, in all writes."""

    def __init__(self) -> None:
        self.syncs = 0
        self.error: BaseException | None = None
        self.write_error: OSError | None = None

    def sync_data(self, file: int) -> None:
        self.syncs += 1
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        super().sync_data(file)

    def write_at(self, file: int, parts: Sequence[bytes | memoryview], offset: int) -> None:
        if self.write_error is not None:
            super().write_at(file, [b"x" * 100], offset)  # a part of it got there
            raise self.write_error
        super().write_at(file, parts, offset)


def test_threads_share_syncs_and_packs_are_rotated(tmp_path: Path) -> None:
    disk = Counting()
    with Pool.open(tmp_path / "pool", create=True, disk=disk, pack_bytes=20_000) as pool:

        def work(thread: int) -> list[tuple[Ref, Any]]:
            found = []
            for number in range(40):
                content = {
                    "thread": thread,
                    "number": number,
                    "x": "y" * random.Random(number).randrange(300),
                }
                found.append((pool.publish([Record("r", content)]), content))
            return found

        results = [pair for result in spread(work, 12) for pair in result]
        assert len({ref for ref, _ in results}) == 480
        for ref, content in results:
            assert pool.record(ref.at(0)).payload == content
        packs = len([*pool.folder.list_packs()])
        assert packs > 3
        assert disk.syncs - 2 * packs < 480, "no two calls ever shared a sync"
        found = pool.verify()
        assert (found.publications, found.damaged, found.torn) == (480, [], 0)


def test_a_submission_is_answered_again(pool: Pool) -> None:
    records = [Record("a", 1), Record("t", np.arange(5)), Record("b", b"x", {"m": 1})]
    first = pool.publish(records, submission="s")
    used = pool.folder.used()
    assert pool.publish(records, submission="s") == first
    assert pool.publish_many([Publication(records)], submission="s") == [first]
    assert pool.folder.used() == used
    assert pool.receipt("s") == [first]
    assert pool.receipt("t") is None
    assert pool.publish(records) != first


@pytest.mark.parametrize(
    "other",
    [
        [Publication([Record("a", 2)])],
        [Publication([Record("b", 1)])],
        [Publication([Record("a", 1, {"m": 1})])],
        [Publication([Record("a", b"1")])],
        [Publication([Record("a", 1), Record("b", 1)])],
        [Publication([Record("a", 1)]), Publication([Record("a", 1)])],
        [Publication([Record("a", 1)]), Publication([])],
        [Publication([])],
        [],
    ],
)
def test_a_submission_with_other_content_is_a_conflict(pool: Pool, other: list[Publication]) -> None:
    first = pool.publish([Record("a", 1)], submission="s")
    with pytest.raises(Conflict, match="'s'"):
        pool.publish_many(other, submission="s")
    assert pool.publish([Record("a", 1)], submission="s") == first


def test_other_dependencies_are_a_conflict(pool: Pool) -> None:
    one, two = pool.publish([Record("d", 1)]), pool.publish([Record("d", 2)])
    pool.publish([Record("a", 1)], dependencies=[one], submission="s")
    with pytest.raises(Conflict):
        pool.publish([Record("a", 1)], dependencies=[two], submission="s")
    parts = [Publication([Record("x", 1)]), Publication([Record("y", 1)])]
    pool.publish_many([*parts, Publication([Record("z", 1)], [0])], submission="local")
    with pytest.raises(Conflict):
        pool.publish_many([*parts, Publication([Record("z", 1)], [1])], submission="local")


def test_a_writer_remembers_the_latest_and_the_pool_remembers_all(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many publications a submission has, what a writer remembers is bounded."""
    monkeypatch.setattr(answers, "REMEMBERED", 100)
    many = [[Publication([Record("r", [number, part])]) for part in range(9)] for number in range(30)]
    refs = [pool.publish_many(many[number], submission=f"s{number}") for number in range(30)]
    assert [pool.publish_many(many[number], submission=f"s{number}") for number in (28, 29)] == refs[28:]
    assert sum(len(answer) for _, answer in pool.writer._answers._known.values()) <= 100
    assert pool.receipt("s0") == refs[0]
    assert pool.publish_many(many[0], submission="s0") != refs[0]


def test_one_submission_from_many_threads_is_published_once(pool: Pool) -> None:
    for number in range(20):
        refs = spread(
            lambda _, number=number: pool.publish([Record("a", number)], submission=f"s{number}"), 8
        )
        assert len({*refs}) == 1
    assert pool.verify().publications == 20


def test_conflicting_threads_agree_on_one_content(pool: Pool) -> None:
    for number in range(20):
        name = f"s{number}"
        outcomes = spread(
            lambda thread, name=name: pool.publish([Record("a", thread % 2)], submission=name), 8
        )
        refs = {outcome for outcome in outcomes if isinstance(outcome, Ref)}
        assert len(refs) == 1
        winner = pool.record(refs.pop().at(0)).payload
        for thread, outcome in enumerate(outcomes):
            assert isinstance(outcome, Ref if thread % 2 == winner else Conflict)


def test_a_receipt_is_whole_or_none_wherever_the_pack_was_cut(tmp_path: Path) -> None:
    """A writer that dies in the middle of `publish_many` leaves any beginning of it behind."""
    with Pool.open(tmp_path / "pool", create=True) as pool:
        before = pool.publish([Record("before", 0)], submission="before")
        many = [Publication([Record("r", "x" * 100 * number)], [*range(number)]) for number in range(4)]
        refs = pool.publish_many(many, submission="many")
        (file,) = pool.folder.list_packs()
        shutil.copytree(tmp_path / "pool", tmp_path / "cut")
    pack = tmp_path / "cut" / "packs" / file.path.name
    end = refs[-1].offset + refs[-1].length
    with Pool.open(tmp_path / "cut") as pool:
        for size in range(end, before.offset + before.length - 1, -37):
            os.truncate(pack, size)
            assert pool.receipt("many") == (refs if size == end else None), size
            assert pool.receipt("before") == [before]


def test_a_receipt_is_not_given_for_a_damaged_payload(tmp_path: Path) -> None:
    """After a power loss a header and an index may be there, and the bytes between them not."""
    with Pool.open(tmp_path / "pool", create=True) as pool:
        ref = pool.publish([Record("r", b"x" * 100_000)], submission="s")
        (file,) = pool.folder.list_packs()
        with file.path.open("rb+") as pack:
            pack.seek(ref.offset + 50_000)
            pack.write(bytes(4096))
        assert pool.receipt("s") is None


def test_receipts_of_writers_that_are_gone(tmp_path: Path) -> None:
    with Pool.open(tmp_path / "pool", create=True) as first:
        refs = first.publish_many([Publication([Record("a", n)]) for n in range(3)], submission="s")
    with Pool.open(tmp_path / "pool") as second:
        assert second.receipt("s") == refs
        assert second.publish([Record("x", 1)], submission="s") != refs[0]  # another writer, another answer


@pytest.mark.parametrize("submission", [None, "s"])
def test_an_interrupted_leader_loses_nothing(tmp_path: Path, submission: str | None) -> None:
    disk = Counting()
    with Pool.open(tmp_path / "pool", create=True, disk=disk) as pool:
        before = pool.publish([Record("r", "before")])
        disk.error = KeyboardInterrupt()
        with pytest.raises(KeyboardInterrupt):
            pool.publish([Record("r", "during")], submission=submission)
        after = pool.publish([Record("r", "after")], submission=submission)
        assert [values(pool, ref)["r"] for ref in (before, after)] == ["before", "after"]
        assert before.pack != after.pack, "the pack of a commit in doubt was used again"
    assert pool.verify().damaged == []


def test_who_repeats_an_interrupted_submission_is_told_that_it_is_in_doubt(tmp_path: Path) -> None:
    inside, go = threading.Event(), threading.Event()

    class Interrupted(Disk):
        def sync_data(self, file: int) -> None:
            if not inside.is_set():
                inside.set()
                assert go.wait(30)
                raise KeyboardInterrupt
            super().sync_data(file)

    with Pool.open(tmp_path / "pool", create=True, disk=Interrupted()) as pool:
        outcomes: list[Any] = []

        def publish() -> None:
            try:
                outcomes.append(pool.publish([Record("a", 1)], submission="s"))
            except BaseException as error:
                outcomes.append(error)

        threads = [threading.Thread(target=publish) for _ in range(3)]
        threads[0].start()
        assert inside.wait(30)
        for thread in threads[1:]:
            thread.start()
        go.set()
        for thread in threads:
            thread.join(30)
        kinds = [type(outcome) for outcome in outcomes]
        assert KeyboardInterrupt in kinds
        assert kinds.count(KeyboardInterrupt) == 1
        assert {*kinds} <= {KeyboardInterrupt, Unknown, Ref}
        assert values(pool, pool.publish([Record("a", 1)], submission="s")) == {"a": 1}


@pytest.mark.parametrize(
    ("number", "expected"), [(28, StoreFull), (122, StoreFull), (5, StoreError), (116, StoreError)]
)
@pytest.mark.parametrize("when", ["write", "sync"])
@pytest.mark.parametrize("first", [True, False])
def test_a_failed_publication_may_be_repeated(
    tmp_path: Path, number: int, expected: type[SpillError], when: str, first: bool
) -> None:
    disk = Counting()
    with Pool.open(tmp_path / "pool", create=True, disk=disk) as pool:
        before = None if first else pool.publish([Record("r", "before")])
        error = OSError(number, os.strerror(number))
        if when == "write":
            disk.write_error = error
        else:
            disk.error = error
        with pytest.raises(expected):
            pool.publish([Record("r", "x" * 1000)], submission="s")
        disk.write_error = None
        assert pool.receipt("s") is None, "nobody knows whether that is on the disk"
        ref = pool.publish([Record("r", "x" * 1000)], submission="s")
        assert values(pool, ref) == {"r": "x" * 1000}
        assert before is None or values(pool, before) == {"r": "before"}
        assert pool.receipt("s") == [ref]
    assert pool.verify().damaged == []


def test_no_room_under_the_limit(tmp_path: Path) -> None:
    with Pool.open(tmp_path / "pool", create=True, max_bytes=10_000) as pool:
        ref = pool.publish([Record("r", b"x" * 5000)])
        with pytest.raises(StoreFull, match="10,000") as refused:
            pool.publish([Record("r", b"x" * 5000)])
        assert "gc" in str(refused.value.hint)
        assert pool.publish([Record("small", 1)])
        assert values(pool, ref) == {"r": b"x" * 5000}


def test_a_full_pool_is_sealed_and_closed(tmp_path: Path) -> None:
    pool = Pool.open(tmp_path / "pool", create=True, max_bytes=10_000)
    ref = pool.publish([Record("r", b"x" * 5000)])
    pool.folder.limit(100)
    pool.seal()
    pool.seal()
    pool.close()
    pool.close()
    assert pool.folder.list_writers() == []
    assert values(pool, ref) == {"r": b"x" * 5000}


def test_sealing_an_unused_writer_leaves_nothing(pool: Pool) -> None:
    pool.seal()
    assert [*pool.folder.list_packs()] == []


def test_a_closed_writer_refuses(pool: Pool) -> None:
    writer = pool.writer
    pool.close()
    with pytest.raises(StateError, match="closed"):
        writer.publish([Record("a", 1)])


def test_a_forked_child_gets_its_own_writer(pool: Pool) -> None:
    writer, before = pool.writer, pool.publish([Record("a", "parent")])

    def child() -> bool:
        assert values(pool, before) == {"a": "parent"}
        for act in (lambda: writer.publish([Record("a", 1)]), writer.seal):
            try:
                act()
            except StateError as error:
                assert "forked" in str(error)
            else:
                return False
        writer.close()  # which is the parent's to close
        ref = pool.publish([Record("a", "child")])
        return ref.pack != before.pack and pool.writer.id != writer.id

    assert in_child(child) == 0
    after = pool.publish([Record("a", "again")])
    assert after.pack == before.pack
    assert [values(pool, ref)["a"] for ref in (before, after)] == ["parent", "again"]
    assert pool.verify().damaged == []


def test_a_fork_closes_no_descriptor_that_is_not_the_pools(pool: Pool) -> None:
    """A closed writer's descriptor may have been given to somebody else, in the child and in its child."""
    pool.publish([Record("a", 1)])
    closed = pool.writer
    pool.close()
    others = [os.open(os.devnull, os.O_RDONLY) for _ in range(20)]
    pool.publish([Record("a", 2)])  # a second writer, open during the fork

    def grandchild() -> bool:
        return all(os.fstat(other) for other in others)

    def child() -> bool:
        more = [os.open(os.devnull, os.O_RDONLY) for _ in range(20)]
        others.extend(more)
        return all(os.fstat(other) for other in others) and in_child(grandchild) == 0

    assert in_child(child) == 0
    assert closed is not pool.writer
    for other in others:
        os.close(other)


def test_pools_made_at_once_are_one(tmp_path: Path) -> None:
    for number in range(10):
        path = tmp_path / str(number)
        found = spread(lambda _, path=path: Pool.open(path, create=True).id, 6)
        assert len({*found}) == 1, found


def test_a_folder_that_holds_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    with pytest.raises(StateError, match="not empty"):
        Pool.open(tmp_path, create=True)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    "text", ["", "{}", "null", "[", '{"format":1,"id":"zz"}', '{"format":1,"id":7}', "\x00" * 100]
)
def test_a_damaged_identity_is_damage(pool: Pool, text: str) -> None:
    (pool.path / "pool.json").write_text(text)
    with pytest.raises(SpillError, match=r"pool\.json"):
        Pool.open(pool.path)
