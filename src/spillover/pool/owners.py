"""Who keeps what in a pool, and what nobody keeps any more.

One process has the ownership catalogue open, fenced by the control object in ``owner/``. Others publish and
read as they like; what they publish belongs to their writer, as long as it lives, until somebody is named
here. Owning is by publication, deleting by pack: see `spillover.pool.collection` and
`spillover.pool.compaction`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from spillover.errors import InputError
from spillover.pool.catalogue import Catalogue
from spillover.pool.collection import Collection, Progress, collect, retire, silent
from spillover.pool.compaction import MIN_OWNED, Compaction, compact
from spillover.pool.folder import Folder
from spillover.pool.gate import resident
from spillover.pool.reference import Ref
from spillover.pool.transfer import Transfer, export_pool, import_pool
from spillover.pool.writer import PACK_BYTES, settle
from spillover.state import State
from spillover.store import LocalStore

__all__ = ["Owners", "Stats", "WriterInfo"]


class WriterInfo(msgspec.Struct, frozen=True):
    """A registered writer.

    Attributes:
        id: its number; in file names ten hexadecimal digits.
        host: where it runs.
        pid: its process there.
    """

    id: int
    host: str
    pid: int


class Stats(msgspec.Struct, frozen=True):
    """A pool in figures; sizes in bytes.

    Attributes:
        pool: its id.
        packs: number of pack files.
        bytes: what they take.
        max_bytes: the pool's limit.
        owners: how many names own something.
        owned_extents: how many publications somebody owns.
        owned_bytes: what these take.
        writers: how many writers are registered.
        replaced: packs that were rewritten and wait for a reader to let go.
    """

    pool: str
    packs: int
    bytes: int
    max_bytes: int | None
    owners: int
    owned_extents: int
    owned_bytes: int
    writers: int
    replaced: int


class Owners:
    """The ownership of a pool, in this process. Threads may share it; a context manager.

    Args:
        folder: the pool.
        takeover: do not ask whether the former owner is dead; it is fenced off in any case.

    Raises:
        LockContended: another live process has it.
        StoreRefused: the filesystem is not known to keep locks and syncs.
    """

    def __init__(self, folder: Folder, *, takeover: bool = False, pack_bytes: int = PACK_BYTES) -> None:
        self.folder = folder
        self._pack_bytes = pack_bytes
        self._maintaining = threading.Lock()
        state = State(LocalStore(folder.path / "owner", folder.disk))
        self._owned = state.acquire({"work": "pool", "pool": folder.identity.id}, takeover=takeover)
        try:
            self.catalogue = Catalogue(folder, self._owned.generation)
        except BaseException:
            self._owned.release()
            raise

    @property
    def generation(self) -> int:
        """The fencing token of this ownership."""
        return self._owned.generation

    def check(self) -> None:
        """Return if this process still owns the pool.

        Raises:
            Superseded: another process does.
        """
        self._owned.check()

    def retain(self, owner: str, refs: Iterable[Ref]) -> None:
        """Let ``owner`` own publications, and all that they depend on, besides what it owns already.

        Raises:
            Collected: one of them is gone; then nothing changed.
            Mismatch: one belongs to another pool.
            Superseded: another process owns the pool by now.
        """
        self.retain_many({owner: refs})

    def retain_many(self, owners: dict[str, Iterable[Ref]]) -> None:
        """Like `retain` for several owners, all or none."""
        named = {name: [*refs] for name, refs in owners.items()}
        self.catalogue.retain(named)
        self._owned.check()
        settle(ref for refs in named.values() for ref in refs)

    def release(self, *owners: str) -> None:
        """Let the owners own nothing any more. An owner that there is not is fine."""
        self.catalogue.release(owners)
        self._owned.check()

    def owned(self, owner: str) -> list[Ref]:
        """What was retained for ``owner``, in no order."""
        return self.catalogue.owned(owner)

    def names(self) -> list[str]:
        """The owners, sorted."""
        return self.catalogue.names()

    def collect(
        self, *, dry_run: bool = False, looked: Progress = silent, deleting: Progress = silent
    ) -> Collection:
        """Delete the packs that nobody needs; see `spillover.pool.collection`."""
        self._owned.check()
        with self._maintaining:
            return collect(self.catalogue, dry_run=dry_run, looked=looked, deleting=deleting)

    def compact(self, *, min_owned: float = MIN_OWNED, progress: Progress = silent) -> Compaction:
        """Rewrite the packs of which less than ``min_owned`` is owned; see `spillover.pool.compaction`."""
        self._owned.check()
        with self._maintaining:
            return compact(
                self.catalogue, min_owned=min_owned, pack_bytes=self._pack_bytes, progress=progress
            )

    def export(self, names: Sequence[str], target: Path, *, progress: Progress = silent) -> Transfer:
        """Write what the owners own to a file that another pool can import.

        Raises:
            InputError: there is no such owner, or ``target`` exists.
        """
        owners = {name: self.owned(name) for name in names}
        for name, refs in owners.items():
            if not refs:
                raise InputError(
                    f"{self.folder.path} has no owner {name!r}", hint=f"spill pool ls {self.folder.path}"
                )
        return export_pool(self.folder, owners, target, progress)

    def import_(self, source: Path, *, progress: Progress = silent) -> Transfer:
        """Take in what `export` wrote, from any pool; its owners own it here, under its old references."""
        self._owned.check()
        with self._maintaining:
            return import_pool(self.catalogue, source, pack_bytes=self._pack_bytes, progress=progress)

    def writers(self) -> list[WriterInfo]:
        """The registered writers, dead ones that nobody retired yet included."""
        found = [(writer, resident(self.folder.gate_of(writer))) for writer in self.folder.list_writers()]
        return [WriterInfo(writer, who.host, who.pid) for writer, who in found]

    def retire(self, writer: int, *, adopt: str | None = None) -> list[Ref]:
        """End a writer whose process is dead; nothing it may still write counts from here on.

        Args:
            adopt: an owner that takes over all its publications that are whole, with all that they depend
                on. Without one, those that nobody owns go with the next collection.

        Returns:
            Those publications.

        Raises:
            LockContended: the writer is alive.
        """
        self._owned.check()
        with self._maintaining:
            refs = self.catalogue.complete(retire(self.folder, writer))
            if adopt is not None:
                self.retain(adopt, refs)
        return refs

    def stats(self) -> Stats:
        """The pool in figures."""
        files = [*self.folder.list_packs()]
        with self.catalogue.reading() as cursor:
            ((owners,),) = cursor.execute("SELECT COUNT(*) FROM names").fetchall()
            query = (
                "SELECT COUNT(*), COALESCE(SUM(length), 0) "
                "FROM (SELECT pack, place, MAX(length) AS length FROM owned GROUP BY pack, place)"
            )
            ((extents, owned),) = cursor.execute(query).fetchall()
            ((replaced,),) = cursor.execute("SELECT COUNT(*) FROM packs WHERE status = 'moved'").fetchall()
        identity = self.folder.identity
        size = sum(file.size for file in files)
        writers = len(self.folder.list_writers())
        return Stats(
            identity.id, len(files), size, identity.max_bytes, owners, extents, owned, writers, replaced
        )

    def close(self) -> None:
        """Close the catalogue and give the ownership up; in a forked child, which has neither, do nothing."""
        if self.catalogue.inherited:
            return
        self.catalogue.close()
        self._owned.release()

    def __enter__(self) -> Owners:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
