"""S3, Google Cloud Storage and Azure Blob Storage as stores, through obstore.

Conditional writes use the protocols' own preconditions (``If-None-Match: *`` and ``If-Match``,
RFC 9110 section 13; generation and etag matches on the others) on a client without retries: a
retried conditional write that had in fact succeeded would report that it lost against itself.
Plain calls use a client that retries.

Endpoint and credentials come from each SDK's usual environment variables (``AWS_ENDPOINT_URL``,
``AWS_ACCESS_KEY_ID``, ``GOOGLE_APPLICATION_CREDENTIALS``, ``AZURE_STORAGE_ACCOUNT_NAME``, ...).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta
from itertools import chain
from typing import TYPE_CHECKING, Any

import obstore
from obstore import exceptions
from obstore.store import from_url

from spillover.errors import InputError, Lost, NotFound, Retry, StoreError, StoreFull, Unknown
from spillover.store.base import CHUNK, Blob, Entry, Source, Store, chunked, valid_key

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore

__all__ = ["CloudStore"]

PART = 8 * 1024 * 1024
"""Bytes in one part of a multipart upload. Shorter values are sent in one request."""

DENIED = (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError)


class CloudStore(Store):
    """The objects below ``uri``: ``s3://bucket/prefix``, ``gs://...`` or ``az://container/prefix``.

    ``timeout`` is the seconds one request may take.
    """

    def __init__(self, uri: str, *, timeout: float = 60.0) -> None:
        self.uri = uri.rstrip("/")
        options: ClientConfig = {"timeout": timedelta(seconds=timeout)}
        if os.environ.get("AWS_ENDPOINT_URL", "").startswith("http://"):
            options["allow_http"] = True
        try:
            self._plain = _open(self.uri, options, retries=6)
            self._once = _open(self.uri, options, retries=0)
        except (exceptions.BaseError, ValueError) as error:
            raise InputError(f"{uri} cannot be opened: {_reason(error)}") from error

    def read(self, key: str) -> Blob:
        with self._translated(key):
            result = obstore.get(self._plain, valid_key(key))
            return Blob(bytes(result.bytes()), _etag(result.meta))

    def read_range(self, key: str, start: int, stop: int) -> bytes:
        if stop <= start:
            return b""
        with self._translated(key):
            return bytes(obstore.get_range(self._plain, valid_key(key), start=start, end=stop))

    def head(self, key: str) -> Entry:
        with self._translated(key):
            return Entry(key, obstore.head(self._plain, valid_key(key))["size"])

    def chunks(self, key: str, size: int = CHUNK) -> Iterator[bytes]:
        with self._translated(key):
            for piece in obstore.get(self._plain, valid_key(key)).stream(min_chunk_size=size):
                yield bytes(piece)

    def write(self, key: str, source: Source) -> None:
        with self._translated(key):
            parts = _parts(source)
            first = next(parts, b"")
            if len(first) < PART:  # it fits in one request
                obstore.put(self._plain, valid_key(key), first, use_multipart=False)
            else:
                whole = chain([first], parts)
                obstore.put(self._plain, valid_key(key), whole, chunk_size=PART, max_concurrency=4)

    def create(self, key: str, data: bytes) -> str:
        try:
            with self._translated(key, conditional=True):
                return _etag(
                    obstore.put(self._once, valid_key(key), data, mode="create", use_multipart=False)
                )
        except Lost:
            # S3 answers 409 while another create of the same key is under way, and the client library
            # reports that as "already exists". It only does if it can be seen.
            with contextlib.suppress(NotFound):
                self.head(key)
                raise
            raise Retry(f"{key} in {self.uri}: a concurrent create is under way") from None

    def replace(self, key: str, data: bytes, version: str) -> str:
        with self._translated(key, conditional=True):
            try:
                result = obstore.put(
                    self._once, valid_key(key), data, mode={"e_tag": version}, use_multipart=False
                )
            except exceptions.AlreadyExistsError as error:  # HTTP 409: a concurrent conditional request
                raise Retry(f"{key} in {self.uri}: a concurrent write is under way") from error
            except exceptions.NotFoundError as error:
                raise Lost(f"{key} does not exist in {self.uri}") from error
            return _etag(result)

    def list(self, prefix: str = "") -> Iterator[Entry]:
        folder, _, _ = prefix.rpartition("/")  # the protocol lists whole folders
        found: list[Entry] = []
        with self._translated(prefix or "/"):
            for batch in obstore.list(self._plain, folder or None, chunk_size=1000):
                found += [Entry(meta["path"], meta["size"]) for meta in batch]
        yield from sorted((entry for entry in found if entry.key.startswith(prefix)), key=lambda e: e.key)

    def delete(self, key: str) -> None:
        with self._translated(key), contextlib.suppress(NotFound, exceptions.NotFoundError):
            obstore.delete(self._plain, valid_key(key))

    @contextlib.contextmanager
    def _translated(self, key: str, *, conditional: bool = False) -> Iterator[None]:
        """Turn the client library's errors into the store's.

        Whatever is neither a clear refusal nor a clear answer is `Unknown` for a conditional write:
        a timeout, a cut connection and a 5xx all leave open whether the write happened.
        """
        where = f"{key} in {self.uri}"
        try:
            yield
        except (exceptions.NotFoundError, FileNotFoundError) as error:
            raise NotFound(f"{where} does not exist") from error
        except (exceptions.PreconditionError, exceptions.AlreadyExistsError) as error:
            raise Lost(f"{where} was written by somebody else") from error
        except DENIED as error:
            hint = "check the credentials in the environment"
            raise StoreError(f"{where}: access denied: {_reason(error)}", hint=hint) from error
        except exceptions.BaseError as error:
            if conditional:
                raise Unknown(f"{where}: no clear answer: {_reason(error)}") from error
            if "QuotaExceeded" in str(error) or "InsufficientStorage" in str(error):
                raise StoreFull(f"no space left for {where}", hint="free space or raise the quota") from error
            raise StoreError(
                f"{where}: {_reason(error)}", hint="check the network and the endpoint"
            ) from error


def _open(uri: str, options: ClientConfig, *, retries: int) -> ObjectStore:
    return from_url(uri, client_options=options, retry_config={"max_retries": retries})


def _etag(meta: Any) -> str:
    """The entity tag in an answer; without one nothing can be compared and swapped."""
    tag = meta["e_tag"]
    if not tag:
        raise StoreError("the store returned no entity tag, so it cannot replace conditionally")
    return str(tag)


def _parts(source: Source) -> Iterator[bytes]:
    """Yield ``source`` in parts of exactly `PART` bytes; the last may be shorter, none is empty."""
    pending = bytearray()
    for piece in chunked(source):
        pending += piece
        while len(pending) >= PART:
            yield bytes(pending[:PART])
            del pending[:PART]
    if pending:
        yield bytes(pending)


def _reason(error: Exception) -> str:
    """The first line of an error, without the nested debug output that may follow it."""
    return str(error).strip().split("\n", 1)[0][:200]
