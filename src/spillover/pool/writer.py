"""Publishing: a gate, and one open pack that many threads share.

Callers turn their records into extents, each on its own thread, and hand them to a `Stream`, where those that
wait together share one write and one sync.

Trade-off: a payload must not change while it is being published; a read would report it as damaged.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import xxhash

from spillover.errors import InputError, StateError
from spillover.pool import gate
from spillover.pool.answers import Answers
from spillover.pool.extent import Draft, Link, Publication, Record, Submission
from spillover.pool.folder import Folder
from spillover.pool.held import Held
from spillover.pool.quota import Quota
from spillover.pool.reference import Ref
from spillover.pool.stream import Drafted, Stream

__all__ = ["PACK_BYTES", "Writer", "settle", "submission_key"]

PACK_BYTES = 256 << 20
"""A pack that has grown to this is sealed and the next one begun."""

_writers: weakref.WeakSet[Writer] = weakref.WeakSet()


def submission_key(submission: str) -> bytes:
    """What an extent stores of a submission id."""
    return xxhash.xxh3_128_digest(submission.encode())


class Writer:
    """One writer of a pool: a gate, and a sequence of packs. Any number of threads may share it.

    Args:
        folder: the pool.
        pack_bytes: size at which a pack is sealed.
        quota: the room it has; the pool's limit if none is given.

    Raises:
        StoreError: the folder cannot be written.
    """

    def __init__(self, folder: Folder, *, pack_bytes: int = PACK_BYTES, quota: Quota | None = None) -> None:
        self.folder = folder
        self._pack_bytes = pack_bytes
        self._gate = gate.enter(folder)
        self.id = self._gate.writer
        self._process = os.getpid()
        self._closed = False
        self._held = Held()
        self._stream = Stream(folder, self._gate, self._held, quota or Quota(folder), pack_bytes)
        self._answers = Answers()
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
        content = _content(drafts)
        return self._answers.once(key, content, submission, lambda: self.write(drafts))

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
        self._require_usable()
        self._stream.seal()

    def close(self) -> None:
        """Seal, and give up the gate. What nobody owns by now can be collected."""
        if self._closed or self._process != os.getpid():
            return
        self._closed = True
        try:
            self._stream.close()
        finally:
            _writers.discard(self)
            self._held.close()
            self._gate.leave()

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def write(self, drafts: Sequence[Drafted]) -> list[Ref]:
        """Write extents that are complete; durable on return."""
        self._require_usable()
        if not drafts:
            return []
        return self._stream.write(drafts)

    def _require_usable(self) -> None:
        if self._process != os.getpid():
            raise StateError("a writer cannot be used in a forked process", hint="open the pool again there")
        if self._closed:
            raise StateError("this writer is closed", hint="open the pool again")


def _content(drafts: Sequence[Draft]) -> bytes:
    """Checksum of all that a submission publishes."""
    digests = [xxhash.xxh3_128_digest(draft.index) for draft in drafts]
    return digests[0] if len(digests) == 1 else xxhash.xxh3_128_digest(b"".join(digests))


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
        writer._stream.forget()


os.register_at_fork(after_in_child=_forget_in_child)
