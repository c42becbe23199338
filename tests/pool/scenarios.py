"""What a pool is asked to do while its disk fails: pieces of work that can be begun again at any time."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, ClassVar

from pool.content import History, publish, records, require
from spillover.pool import Pool, Publication, Ref
from spillover.store.disk import Disk

EXPECTED_FILES = {"pool.json", ".lock", "moved", "catalogue.sqlite", "control.json"}


class Scenario:
    """Work in ``folder``, through ``disk``, told to ``history``.

    Attributes:
        unsteady: whether the number of disk calls varies from run to run.
    """

    unsteady: ClassVar[bool] = False
    pack_bytes: ClassVar[int] = 1 << 20

    def __init__(self, folder: Path, disk: Disk, history: History) -> None:
        self.folder, self.disk, self.history = folder, disk, history
        self._pools: dict[str, Pool] = {}

    def pool(self, name: str = "pool") -> Pool:
        """The pool called ``name``, the same object from the first time on."""
        if name not in self._pools:
            self._pools[name] = Pool.open(
                self.folder / name, create=True, disk=self.disk, pack_bytes=self.pack_bytes
            )
        return self._pools[name]

    def watched(self, pool: Pool) -> Any:
        """The ownership of ``pool``, its SQL counted as calls."""
        owners = pool.owners()
        if hasattr(self.disk, "watch"):
            self.disk.watch(owners.catalogue._connection)
        return owners

    def prepare(self) -> None:
        """What is there before the work begins."""

    def work(self) -> None:
        """The work; may be called again after an error, in this process or another one."""
        raise NotImplementedError

    def idents(self) -> list[str]:
        """What is owned in the end."""
        raise NotImplementedError

    def check(self) -> None:
        """What was promised holds now."""
        if (self.folder / "pool" / "pool.json").exists():
            with Pool.open(self.folder / "pool").reader() as reader:
                self.history.check(reader)

    def tidy(self) -> None:
        """A collection right after a crash takes nothing that somebody owns."""
        self.history.collecting()
        pool = self.pool()
        assert not pool.verify().damaged
        with pool.owners() as owners:
            collected = owners.collect()
            assert not collected.damaged
        self.check()

    def result(self) -> Any:
        """What the work led to, told without addresses."""
        pool, found = self.pool(), {}
        with pool.owners() as owners:
            for name in owners.names():
                notes = [pool.read(ref)["note"].payload["id"] for ref in owners.owned(name)]
                found[name] = sorted(notes)
        for ident in self.idents():
            (ref,) = pool.receipt(ident) or [None]
            require(pool, ref, ident)
        return found

    def end(self) -> None:
        """Give everything up and collect."""
        self.history.closing()
        for pool in self._pools.values():
            pool.close()
        for pool in self._pools.values():
            with pool.owners() as owners:
                for name in owners.names():
                    self.history.releasing(name)
                    owners.release(name)
                self.history.collecting()
                owners.collect()

    def require_empty(self) -> None:
        """Nothing is left but what every pool has."""
        for name in self._pools:
            files = [path for path in (self.folder / name).rglob("*") if path.is_file()]
            assert {path.name for path in files} <= EXPECTED_FILES, sorted(map(str, files))


class Single(Scenario):
    """One publication after the other: small, of two chunks, and too large to be joined before writing."""

    def idents(self) -> list[str]:
        return ["single.100", "single.70000", "single.1200000"]

    def work(self) -> None:
        pool = self.pool()
        refs = [publish(pool, self.history, ident) for ident in self.idents()]
        with pool.owners() as owners:
            owners.retain("all", refs)
        self.history.owned("all", self.idents())


class Many(Scenario):
    """Publications that become durable together and depend on each other, and tensors."""

    def idents(self) -> list[str]:
        return [f"many{number}.3000" for number in range(6)]

    def work(self) -> None:
        pool, idents = self.pool(), self.idents()
        refs = pool.receipt("many") or pool.publish_many(
            [
                Publication(records(ident), [*range(max(0, number - 2), number)])
                for number, ident in enumerate(idents)
            ],
            submission="many",
        )
        for ident, ref in zip(idents, refs, strict=True):
            self.history.acked(ident, ref)
        array = records(idents[0])[2].payload
        tensors = pool.publish_tensors({"w": array, "v": array.T}, dependencies=refs[-1:], submission="w")
        assert (pool.tensor(tensors["v"]).numpy() == array.T).all()
        with pool.owners() as owners:
            owners.retain("last", refs[-1:])
        self.history.owned("last", idents)

    def result(self) -> Any:
        pool = self.pool()
        refs = pool.receipt("many")
        assert refs is not None
        for ident, ref in zip(self.idents(), refs, strict=True):
            require(pool, ref, ident)
        with pool.owners() as owners:
            return {name: len(owners.owned(name)) for name in owners.names()}


class Threads(Scenario):
    """Four threads publish at once and share commits, while packs end."""

    unsteady = True
    pack_bytes = 20_000

    def idents(self) -> list[str]:
        return [f"thread{thread}-{number}.2500" for thread in range(4) for number in range(3)]

    def work(self) -> None:
        pool, idents = self.pool(), self.idents()
        errors: list[BaseException] = []

        def publishing(mine: list[str]) -> None:
            try:
                for ident in mine:
                    publish(pool, self.history, ident)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=publishing, args=(idents[n::4],)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), "a publication hangs"
        if errors:
            raise errors[0]
        with pool.owners() as owners:
            owners.retain("all", [publish(pool, self.history, ident) for ident in idents])
        self.history.owned("all", idents)


class Rotate(Scenario):
    """Packs that fill up, are sealed by hand and are closed."""

    pack_bytes = 6_000

    def idents(self) -> list[str]:
        return [f"rotate{number}.2000" for number in range(6)]

    def work(self) -> None:
        pool = self.pool()
        refs = []
        for number, ident in enumerate(self.idents()):
            refs.append(publish(pool, self.history, ident))
            if number == 3:
                pool.seal()
        pool.seal()
        with pool.owners() as owners:
            owners.retain("all", refs)
        self.history.owned("all", self.idents())
        pool.close()


class Prepared(Scenario):
    """A pool with closed packs, of which some publications are owned."""

    pack_bytes = 6_000
    packed: ClassVar[int] = 9

    def idents(self) -> list[str]:
        return [f"old{number}.1500" for number in range(0, self.packed, 4)]

    def prepare(self) -> None:
        with self.pool() as pool:
            refs = {}
            for number in range(self.packed):
                ident = f"old{number}.1500"
                refs[ident] = publish(pool, self.history, ident)
            with pool.owners() as owners:
                owners.retain("kept", [refs[ident] for ident in self.idents()])
                owners.retain("dropped", [*refs.values()])
        self.history.owned("kept", self.idents())
        self.history.owned("dropped", refs)

    def kept(self) -> list[Ref]:
        """The references that were handed out at first; they stay valid."""
        acked = self.history.promised().acked
        return [Ref.parse(next(iter(acked[ident]))) for ident in self.idents()]


class Own(Prepared):
    """Retaining and releasing."""

    def work(self) -> None:
        pool, refs = self.pool(), self.kept()
        with self.watched(pool) as owners:
            owners.retain("more", refs[:1])
            self.history.owned("more", self.idents()[:1])
            self.history.releasing("kept")
            owners.retain_many({"a": refs, "b": refs[1:]})
            self.history.owned("a", self.idents())
            owners.release("kept", "nobody")
            self.history.releasing("dropped")
            owners.release("dropped")


class Collect(Prepared):
    """Deleting packs, and retiring the writer of a killed process."""

    packed = 13

    def idents(self) -> list[str]:
        return ["old0.1500", "old11.1500"]

    def work(self) -> None:
        with self.watched(self.pool()) as owners:
            self.history.releasing("dropped")
            owners.release("dropped")
            self.history.collecting()
            owners.collect()
        for ref, ident in zip(self.kept(), self.idents(), strict=True):
            require(self.pool(), ref, ident)


class Compact(Collect):
    """Rewriting packs, twice over, so that what was moved moves again."""

    packed = 24

    def idents(self) -> list[str]:
        return [f"old{number}.1500" for number in (1, 6, 12, 13, 22)]

    def work(self) -> None:
        pool = self.pool()
        with self.watched(pool) as owners:
            self.history.releasing("dropped")
            owners.release("dropped")
            owners.retain("first", self.kept()[:2])
            self.history.owned("first", self.idents()[:2])
            self.history.collecting()
            owners.compact()
            self.check()
            self.history.releasing("kept")
            owners.release("kept")
            self.history.collecting()
            owners.compact(min_owned=0.9)
            owners.collect()

    def result(self) -> Any:
        pool = self.pool()
        for ref, ident in zip(self.kept()[:2], self.idents(), strict=False):
            require(pool, ref, ident)
        assert len(pool.read(self.kept()[0])) == 3
        with pool.owners() as owners:
            assert owners.owned("first") == sorted(self.kept()[:2], key=Ref.pack_bytes)
            packs = owners.stats().packs
        assert packs <= 2, packs
        return self.idents()[:2]


class Carry(Prepared):
    """Exporting to a file, and importing that in another pool."""

    def work(self) -> None:
        target = self.folder / "export.pack"
        if not target.exists():
            with self.pool().owners() as owners:
                owners.export(["kept"], target)
        other = self.pool("other")
        with self.watched(other) as owners:
            owners.import_(target)
            assert sorted(owners.owned("kept"), key=str) == sorted(self.kept(), key=str)
            assert not owners.import_(target).publications
            owners.collect()
        for ref, ident in zip(self.kept(), self.idents(), strict=True):
            require(other, ref, ident)

    def result(self) -> Any:
        other = self.pool("other")
        for ref, ident in zip(self.kept(), self.idents(), strict=True):
            require(other, ref, ident)
        with other.owners() as owners:
            return owners.names()


def named(name: str) -> type[Scenario]:
    """The scenario of a name, in lower case."""
    return {kind.__name__.lower(): kind for kind in ALL}[name]


ALL: tuple[type[Scenario], ...] = (Single, Many, Threads, Rotate, Own, Collect, Compact, Carry)
