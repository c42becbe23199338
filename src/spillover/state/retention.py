"""What may be deleted, and by whom.

Reachable is what the control object points at, and what the manifests of those payloads name. A tune
checkpoint names the one before it, so two are always kept; a segment of rows names every segment that
is still needed beside it.

Two rules keep a process that lost the work, perhaps in the middle of a deletion, from harming it:

- After publishing, an owner deletes only what its own publication made unreachable. Reach only ever
  shrinks to newer payloads, so nothing that comes later can need it.
- The sweep for leftovers of dead writers, once after acquiring, deletes only payloads of *earlier*
  generations. A later owner's unpublished work carries a later generation and is out of its reach.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from spillover.errors import StateError
from spillover.state.control import Control, Reference
from spillover.state.payload import COMMIT, open_payload
from spillover.store import Store

__all__ = ["drop_unreachable", "reachable", "sweep_orphans"]

FOLDER = re.compile(r"(?P<folder>[^/]+/[^/]+-g(?P<generation>\d{6,})-[0-9a-f]{8})/")


def reachable(store: Store, references: Iterable[Reference]) -> set[str]:
    """Folders of ``references`` and of the payloads that their manifests name.

    A damaged manifest hides what it names, so its error is not swallowed: who cannot see what is
    needed must not delete.

    Raises:
        Corrupt: a manifest is missing or damaged.
    """
    folders = set()
    for reference in references:
        folders.add(reference.folder)
        folders.update(named.folder for named in open_payload(store, reference).manifest.names)
    return folders


def drop_unreachable(store: Store, before: Reference, now: Reference) -> None:
    """Delete what ``before`` reached and ``now`` does not."""
    try:
        dropped = reachable(store, [before]) - reachable(store, [now])
    except StateError:
        return
    for folder in sorted(dropped):
        _delete(store, folder)


def sweep_orphans(store: Store, document: Control, generation: int) -> list[str]:
    """Delete payloads of generations before ``generation`` that ``document`` does not reach.

    Returns the folders that were deleted. Does nothing when a current manifest is damaged.
    """
    try:
        kept = reachable(store, document.current.values())
    except StateError:
        return []
    orphans = set()
    for entry in store.list():
        match = FOLDER.match(entry.key)
        if match and match["folder"] not in kept and int(match["generation"]) < generation:
            orphans.add(match["folder"])
    for folder in sorted(orphans):
        _delete(store, folder)
    return sorted(orphans)


def _delete(store: Store, folder: str) -> None:
    """Remove a payload, its manifest first, so that half of one never looks whole."""
    store.delete(f"{folder}/{COMMIT}")
    for entry in [*store.list(f"{folder}/")]:
        store.delete(entry.key)
