"""Publishing: one open pack a process, one gathered write and one sync a group of callers.

Guarantee: a reference is returned only when its extent is durable and this writer was still registered
afterwards. A failed publication leaves everything acknowledged before it as it was, and may be repeated.

Steps: callers turn their records into extents, each on its own thread. Whoever commits lays the waiting
extents out behind each other, writes them with one call, syncs, and looks whether the gate still stands.
When a write fails, the pack is cut back to its durable end. When a sync fails, nobody knows what the disk
kept (the kernel may drop the pages and report success the next time), so that pack is left for good.

Trade-off: a payload must not change while it is being published; a read would report it as damaged.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from spillover.errors import Conflict, InputError, StateError, StoreError, Superseded, Unknown
from spillover.pool import gate
from spillover.pool.extent import Copy, Draft, Link, Publication, Record, Submission
from spillover.pool.folder import Folder
from spillover.pool.group import Group
from spillover.pool.held import Held
from spillover.pool.layout import HEADER, PackHeader, Seal
from spillover.pool.quota import Quota
from spillover.pool.reference import Ref, pack_id
from spillover.store.disk import refusal

__all__ = ["PACK_BYTES", "Writer", "settle", "submission_key"]

PACK_BYTES = 256 << 20
"""A pack that has grown to this is sealed and the next one begun."""
GROUP_BYTES = 64 << 20
JOIN_BYTES = 1 << 20
REMEMBERED = 1 << 16
"""How many of its latest submissions a writer can answer again."""

Drafted = Draft | Copy
_writers: weakref.WeakSet[Writer] = weakref.WeakSet()


def submission_key(submission: str) -> bytes:
    """What an extent stores of a submission id."""
    return xxhash.xxh3_128_digest(submission.encode())


class Writer:
    """One writer of a pool: a gate, and a sequence of packs. Any number of threads may share it.

    Args:
        folder: the pool.
        pack_bytes: size at which a pack is sealed.

    Raises:
        StoreError: the folder cannot be written.
    """

    def __init__(self, folder: Folder, *, pack_bytes: int = PACK_BYTES) -> None:
        self.folder = folder
        self._pack_bytes = pack_bytes
        self._gate = gate.enter(folder)
        self.id = self._gate.writer
        self._process = os.getpid()
        self._quota = Quota(folder)
        self._group: Group[Sequence[Drafted] | None, list[Ref]] = Group(self._commit, _weight, GROUP_BYTES)
        self._pack: _Pack | None = None
        self._serial = 0
        self._closed = False
        self._held = Held()
        self._answers_lock = threading.Lock()
        self._answers: OrderedDict[bytes, tuple[bytes, tuple[Ref, ...]]] = OrderedDict()
        self._answering: dict[bytes, tuple[bytes, Future[list[Ref]]]] = {}
        _writers.add(self)

    def publish(
        self,
        records: Sequence[Record | Link],
        *,
        dependencies: Sequence[Ref] = (),
        submission: str | None = None,
    ) -> Ref:
        """Publish records as one whole, durable on return.

        Args:
            records: what it consists of. Links share the payload of records published before.
            dependencies: publications that must stay alive as long as this one.
            submission: names the request. Repeating it returns the first answer.

        Raises:
            InputError: a value that cannot be stored, or two records with one id.
            Conflict: ``submission`` was used for other content.
            StoreFull: the disk or the pool's limit has no room.
            Superseded: this writer was retired.
        """
        return self.publish_many([Publication(records, dependencies)], submission=submission)[0]

    def publish_many(
        self, publications: Sequence[Publication], *, submission: str | None = None
    ) -> list[Ref]:
        """Like `publish` for several publications, which become durable together."""
        _require_order(publications)
        if submission is None:
            return self.write([Draft(publication, self.id) for publication in publications])
        key, parts = submission_key(submission), len(publications)
        drafts = [
            Draft(publication, self.id, Submission(key, part, parts))
            for part, publication in enumerate(publications)
        ]
        return self._answer(key, submission, drafts)

    def publish_tensors(
        self, tensors: Mapping[str, Any], *, dependencies: Sequence[Ref] = (), submission: str | None = None
    ) -> dict[str, Ref]:
        """Publish named tensors as one whole; returns the reference of each."""
        records = [Record(name, tensor) for name, tensor in tensors.items()]
        ref = self.publish(records, dependencies=dependencies, submission=submission)
        return {name: ref.at(place) for place, name in enumerate(tensors)}

    def settle(self, refs: Iterable[Ref]) -> None:
        """Let go of publications that somebody owns by now, or that nobody will.

        Until then this writer keeps them from collection, as long as it lives. References of other writers
        are fine.
        """
        self._held.settle(refs)

    def seal(self) -> None:
        """End the open pack, so that it can be collected or compacted; later publications begin another.

        Raises:
            StoreError: it has no seal now. Its publications stay, and it ends when this writer does.
        """
        self._enter(None)

    def close(self) -> None:
        """Seal, and give up the gate. What nobody owns by now can be collected."""
        if self._closed or self._process != os.getpid():
            return
        with contextlib.suppress(StoreError, Superseded):
            self.seal()
        self._closed = True
        _writers.discard(self)
        self._held.close()
        self._gate.leave()

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def write(self, drafts: Sequence[Drafted]) -> list[Ref]:
        """Write extents that are complete; durable on return."""
        return self._enter(drafts) if drafts else []

    def _enter(self, drafts: Sequence[Drafted] | None) -> list[Ref]:
        if self._process != os.getpid():
            raise StateError("a writer cannot be used in a forked process", hint="open the pool again there")
        return self._group(drafts)

    def _answer(self, key: bytes, submission: str, drafts: Sequence[Draft]) -> list[Ref]:
        """Submit once, however often and from however many threads the same request comes."""
        content = xxhash.xxh3_128_digest(b"".join(draft.index for draft in drafts))
        mine: Future[list[Ref]] = Future()
        with self._answers_lock:
            answer = self._answers.get(key)
            known, first = self._answering.get(key, (content, mine))
            if (answer[0] if answer else known) != content:
                raise Conflict(f"submission {submission!r} was used for other content")
            if answer is None:
                self._answering[key] = (content, first)
        if answer is not None:
            return [*answer[1]]
        return first.result() if first is not mine else self._first(key, content, mine, drafts)

    def _first(
        self, key: bytes, content: bytes, mine: Future[list[Ref]], drafts: Sequence[Draft]
    ) -> list[Ref]:
        """Submit, and answer those who asked for the same meanwhile and those who will."""
        try:
            refs = self.write(drafts)
        except BaseException as error:
            del self._answering[key]
            interrupted = Unknown("the commit was interrupted: it may have happened or not")
            mine.set_exception(error if isinstance(error, Exception) else interrupted)
            raise
        with self._answers_lock:
            self._answers[key] = (content, tuple(refs))
            del self._answering[key]
            if len(self._answers) > REMEMBERED:
                self._answers.popitem(last=False)
        mine.set_result(refs)
        return refs

    def _commit(self, calls: Sequence[Sequence[Drafted] | None]) -> list[list[Ref] | BaseException]:
        """Make the extents of all ``calls`` durable; None seals. One caller at a time gets here."""
        if self._closed:
            raise StateError("this writer is closed", hint="open the pool again")
        if self._pack is None and not any(calls):
            return [[] for _ in calls]
        answers: list[list[Ref] | BaseException] = []
        parts: list[bytes | memoryview] = []
        offsets: list[int] = []
        pack = self._ready(sum(map(_weight, calls)))
        end = pack.end
        for drafts in calls:
            refs: list[Ref] = []
            for draft in drafts or ():
                draft.resolve(refs)
                refs.append(
                    Ref(self.folder.short, pack.id, end, draft.length, draft.check, None, draft.linked)
                )
                parts += draft.parts
                offsets.append(end)
                if draft.relocates:
                    pack.relocations = end
                end += draft.length
            answers.append(refs)
        if parts:
            self._write(pack, parts, end)
            pack.extents += len(offsets)
            self._held.add(pack.id, offsets)
        if None in calls or pack.end >= self._pack_bytes:
            unsealed = self._finish(pack)
            if unsealed is not None:
                return [unsealed if call is None else refs for call, refs in zip(calls, answers, strict=True)]
        return answers

    def _ready(self, size: int) -> _Pack:
        """The open pack, or a new one, with room for ``size`` bytes under the pool's limit."""
        if size:
            self._quota.require(size + HEADER)
        if self._pack is None:
            self._pack = self._begin()
        return self._pack

    def _begin(self) -> _Pack:
        while True:
            self._serial += 1
            number = pack_id(self.id, self._serial)
            path = self.folder.path_of(number)
            self._quota.refresh()
            try:
                file = self.folder.disk.open(path)
                self._held.begin(number, file)
            except FileExistsError:  # of an earlier writer that drew the same id
                continue
            except OSError as error:
                raise refusal(error, str(path)) from error
            return _Pack(number, path, file)

    def _write(self, pack: _Pack, parts: list[bytes | memoryview], end: int) -> None:
        """Write behind the pack's durable end, sync, and make sure that it counts."""
        disk, start = self.folder.disk, pack.end
        if not pack.begun:
            parts.insert(0, PackHeader(self.folder.id, pack.id, self.id).encode())
            start = 0
        if end - start <= JOIN_BYTES:
            parts = [b"".join(parts)]
        synced = False
        try:
            disk.write_at(pack.file, parts, start)
            synced = True
            disk.sync_data(pack.file)
            if start == 0:
                disk.sync_folder(self.folder.packs)
            pack.end, pack.begun = end, True
        except OSError as error:
            self._cut(pack, keep=not synced)
            raise refusal(error, str(pack.path)) from error
        except BaseException:
            self._cut(pack, keep=False)
            raise
        self._quota.add(end - start)
        self._gate.check()

    def _cut(self, pack: _Pack, *, keep: bool) -> None:
        """Cut the pack back to its durable end; after anything but a failed write, never touch it again.

        Cut in any case: what a failed sync left in the page cache would read as if it were on the disk.
        """
        disk = self.folder.disk
        with contextlib.suppress(OSError):
            disk.truncate(pack.file, pack.end if pack.begun else 0)
            if keep:
                disk.sync_data(pack.file)
                return
        self._pack = None
        self._held.end(pack.id)
        os.close(pack.file)

    def _finish(self, pack: _Pack) -> StoreError | None:
        """Seal the open pack, or remove it if nothing was published in it; returns what went wrong.

        A pack without a seal is whole as well: it counts as open until this writer ends.
        """
        disk = self.folder.disk
        self._pack = None
        try:
            if not pack.begun:
                disk.unlink(pack.path)
                return None
            disk.write_at(pack.file, [Seal(pack.end, pack.extents, pack.relocations).encode()], pack.end)
            disk.sync_data(pack.file)
        except OSError as error:
            return refusal(error, str(pack.path))
        finally:
            self._held.end(pack.id)
            os.close(pack.file)
        return None


@dataclass(slots=True)
class _Pack:
    """The open pack. ``end`` is where its durable extents end; ``begun`` is false until there is one."""

    id: int
    path: Path
    file: int
    end: int = HEADER
    extents: int = 0
    relocations: int = 0
    begun: bool = False


def _weight(drafts: Sequence[Drafted] | None) -> int:
    return sum(draft.length for draft in drafts or ())


def _require_order(publications: Sequence[Publication]) -> None:
    for place, publication in enumerate(publications):
        for dependency in publication.dependencies:
            if isinstance(dependency, int) and not 0 <= dependency < place:
                raise InputError(
                    f"publication {place} depends on number {dependency}, which is not before it"
                )


def settle(refs: Iterable[Ref | None]) -> None:
    """Settle publications with whichever writers of this process made them."""
    found = [ref for ref in refs if ref is not None]
    for writer in [*_writers] if found else ():
        writer.settle(found)


def _forget_in_child() -> None:
    """A forked child must not keep the locks of its parent after the parent died."""
    for writer in [*_writers]:
        _writers.discard(writer)  # a child of this child inherits none of it
        writer._gate.forget()
        writer._held.forget()
        if writer._pack is not None:
            os.close(writer._pack.file)
            writer._pack = None


os.register_at_fork(after_in_child=_forget_in_child)
