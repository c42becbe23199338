"""Bytes at a URI: a local folder, S3, Google Cloud Storage, Azure or memory.

>>> store = open_store("memory://example")
>>> version = store.create("greeting", b"hello")
>>> store.read("greeting").data
b'hello'
"""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from spillover.errors import InputError
from spillover.store.base import Blob, Buffer, Digest, Entry, Hold, Source, Store
from spillover.store.faulty import Fault, FaultyStore
from spillover.store.local import LocalStore
from spillover.store.memory import MemoryStore
from spillover.store.probe import PROBE, probe

__all__ = [
    "PROBE",
    "Blob",
    "Buffer",
    "Digest",
    "Entry",
    "Fault",
    "FaultyStore",
    "Hold",
    "LocalStore",
    "MemoryStore",
    "Source",
    "Store",
    "open_store",
    "probe",
]

CLOUD = ("s3", "gs", "az")


def open_store(uri: str | Path) -> Store:
    """Return the store at ``uri``: a path, ``file://``, ``s3://``, ``gs://``, ``az://`` or ``memory://``.

    Nothing is contacted or created yet.

    Raises:
        InputError: unknown scheme, or a URI without a bucket.
    """
    text = str(uri)
    scheme, separator, rest = text.partition("://")
    if not separator:
        return LocalStore(Path(text).expanduser())
    if scheme == "file":
        return LocalStore(Path(unquote(urlsplit(text).path)))
    if scheme == "memory":
        return MemoryStore.shared(text)
    if scheme not in CLOUD:
        raise InputError(f"{text}: unknown scheme {scheme!r}", hint="use a path, s3://, gs:// or az://")
    if not rest.strip("/"):
        raise InputError(f"{text} names no bucket", hint=f"write {scheme}://BUCKET/PREFIX")
    from spillover.store.cloud import CloudStore  # loads the client library only when it is needed

    return CloudStore(text)
