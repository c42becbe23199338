"""Payloads: folders of immutable files with a manifest written last.

    ckpt/step-000000050-g000003-7f3a91bc/   params.safetensors  opt.safetensors  state.json  COMMIT

Guarantee: a payload that somebody can point at is complete. The name carries the writer's generation
and a random attempt, so no other writer, alive or returning from the dead, writes there. Files are
hashed on their way out and uploaded side by side; then comes ``COMMIT`` with size and sha256 of each;
then everything is read back from the store and compared. Only what survived that can be published.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from spillover.errors import Corrupt, NotFound
from spillover.state.control import Reference
from spillover.store import Buffer, Digest, Source, Store
from spillover.store.base import CHUNK, chunked, valid_key

__all__ = ["COMMIT", "Commit", "Payload", "PayloadWriter", "continue_before", "open_payload"]

COMMIT = "COMMIT"
SCHEMA = 1
UPLOADS = 4
"""Files of one payload that are written at the same time."""


class File(msgspec.Struct, frozen=True):
    """Size in bytes and sha256 of one file."""

    size: int
    sha256: str


class Commit(msgspec.Struct, frozen=True):
    """The manifest of a payload.

    ``names`` are the earlier payloads that this one needs or keeps; they stay as long as it does.
    ``cursor`` says where the work continues, in the job's own terms.
    """

    kind: str
    generation: int
    sequence: int
    attempt: str
    step: int
    cursor: Any
    names: tuple[Reference, ...]
    files: dict[str, File]
    schema: int = SCHEMA


class PayloadWriter:
    """Writes one payload. Call `add` for each file, then `commit` once.

    Args:
        kind: first part of the folder's name.
        label: what a person looks for in a listing, such as ``step-000000050``.
        generation: the owner's fencing token.
        sequence: larger than that of every payload before.
    """

    def __init__(self, store: Store, kind: str, label: str, generation: int, sequence: int) -> None:
        self.store = store
        self.kind = kind
        self.generation = generation
        self.sequence = sequence
        self.attempt = secrets.token_hex(4)
        self.folder = valid_key(f"{kind}/{label}-g{generation:06d}-{self.attempt}")
        self._files: dict[str, Future[Digest]] = {}
        self._pool = ThreadPoolExecutor(UPLOADS, thread_name_prefix="payload")

    def add(self, name: str, source: Source) -> None:
        """Begin to write ``source`` as the file ``name``; errors surface in `commit`."""
        self._files[valid_key(name)] = self._pool.submit(self._write, name, source)

    def commit(self, *, step: int, cursor: Any = None, names: tuple[Reference, ...] = ()) -> Reference:
        """Write the manifest, read everything back and return what can be published.

        Raises:
            StoreError: a file could not be written; nothing can point at this payload.
            Corrupt: the store returned other bytes than were written.
        """
        try:
            files = {name: pending.result() for name, pending in self._files.items()}
            manifest = Commit(
                kind=self.kind,
                generation=self.generation,
                sequence=self.sequence,
                attempt=self.attempt,
                step=step,
                cursor=cursor,
                names=names,
                files={name: File(digest.size, digest.sha256) for name, digest in files.items()},
            )
            data = msgspec.json.encode(manifest)
            self.store.write(f"{self.folder}/{COMMIT}", data)
            self._read_back(files, data)
        finally:
            self._pool.shutdown(cancel_futures=True)
        return Reference(
            folder=self.folder,
            kind=self.kind,
            generation=self.generation,
            sequence=self.sequence,
            step=step,
            bytes=sum(digest.size for digest in files.values()),
            commit=hashlib.sha256(data).hexdigest(),
        )

    def _write(self, name: str, source: Source) -> Digest:
        hashing = _Hashing(source)
        self.store.write(f"{self.folder}/{name}", hashing)
        return hashing.digest()

    def _read_back(self, files: dict[str, Digest], manifest: bytes) -> None:
        def same(name: str) -> bool:
            return self.store.digest(f"{self.folder}/{name}") == files[name]

        for name, intact in zip(files, self._pool.map(same, files), strict=True):
            if not intact:
                raise Corrupt(f"{self.folder}/{name} does not read back as it was written")
        if self.store.read(f"{self.folder}/{COMMIT}").data != manifest:
            raise Corrupt(f"{self.folder}/{COMMIT} does not read back as it was written")


class _Hashing:
    """A source that hashes what passes; every fresh pass starts anew, as a retried upload needs."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._size = 0
        self._sha = hashlib.sha256()

    def __call__(self) -> Iterator[Buffer]:
        self._size, self._sha = 0, hashlib.sha256()
        for piece in chunked(self._source):
            view = memoryview(piece).cast("B")
            self._size += len(view)
            self._sha.update(view)
            yield view

    def digest(self) -> Digest:
        return Digest(self._size, self._sha.hexdigest())


def continue_before() -> str:
    """What to do about a damaged payload that work was to continue from."""
    return "pass --from-previous to continue from the checkpoint before it"


class Payload:
    """A committed payload whose manifest is intact. Files are verified as they are read.

    ``remedy`` says what to do when one is damaged.
    """

    def __init__(
        self,
        store: Store,
        reference: Reference,
        manifest: Commit,
        remedy: Callable[[], str] = continue_before,
    ) -> None:
        self.store = store
        self.reference = reference
        self.manifest = manifest
        self._remedy = remedy

    def read(self, name: str) -> bytes:
        """The bytes of a file.

        Raises:
            Corrupt: missing, or not the bytes that were committed.
        """
        return b"".join(self.chunks(name))

    def chunks(self, name: str, size: int = CHUNK) -> Iterator[bytes]:
        """Yield a file in pieces of ``size`` bytes; raises `Corrupt` after the last if any was wrong."""
        total, sha = 0, hashlib.sha256()
        try:
            for piece in self.store.chunks(self._key(name), size):
                total += len(piece)
                sha.update(piece)
                yield piece
        except NotFound:
            raise self.damaged(name, "is missing") from None
        self._compare(name, Digest(total, sha.hexdigest()))

    def fetch(self, name: str, path: Path) -> None:
        """Copy a file to ``path``; raises `Corrupt` and removes ``path`` if the bytes are wrong."""
        try:
            self._compare(name, self.store.fetch(self._key(name), path))
        except NotFound:
            path.unlink(missing_ok=True)
            raise self.damaged(name, "is missing") from None
        except BaseException:
            path.unlink(missing_ok=True)
            raise

    def verify(self) -> None:
        """Read every file and compare it with the manifest; raises `Corrupt` naming the first damaged one."""
        for name in self.manifest.files:
            for _ in self.chunks(name):
                pass

    def _key(self, name: str) -> str:
        return f"{self.reference.folder}/{name}"

    def _compare(self, name: str, found: Digest) -> None:
        wanted = self.manifest.files[name]
        if found.size != wanted.size:
            raise self.damaged(name, f"has {found.size} bytes instead of {wanted.size}")
        if found.sha256 != wanted.sha256:
            raise self.damaged(name, "does not match its checksum")

    def damaged(self, name: str, what: str) -> Corrupt:
        """The error that says ``what`` is wrong with a file, and what to do about it."""
        return _damaged(self.store, self._key(name), what, self._remedy)


def open_payload(store: Store, reference: Reference, remedy: Callable[[], str] = continue_before) -> Payload:
    """Read and check the manifest that ``reference`` points at; ``remedy`` is for hints about damage.

    Raises:
        Corrupt: it is missing or not the one that was published.
    """
    key = f"{reference.folder}/{COMMIT}"
    try:
        data = store.read(key).data
    except NotFound:
        raise _damaged(store, key, "is missing", remedy) from None
    if hashlib.sha256(data).hexdigest() != reference.commit:
        raise _damaged(store, key, "does not match the control object", remedy)
    try:
        manifest = msgspec.json.decode(data, type=Commit)
    except msgspec.DecodeError as error:
        what = f"is of a version that this spillover does not read ({error})"
        raise _damaged(store, key, what, remedy) from error
    if manifest.schema > SCHEMA:
        what = f"was written by a newer spillover (schema {manifest.schema})"
        raise _damaged(store, key, what, remedy)
    return Payload(store, reference, manifest, remedy)


def _damaged(store: Store, key: str, what: str, remedy: Callable[[], str]) -> Corrupt:
    return Corrupt(f"{store.uri}/{key} {what}", hint=remedy())
