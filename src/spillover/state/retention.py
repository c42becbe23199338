"""What may be deleted, and by whom.

Reachable is what the control object points at, current and previous, and what the manifests of those
payloads name. So two checkpoints are always kept, and a segment of rows keeps every segment that is
still needed beside it.

Two rules keep a process that lost the work, perhaps in the middle of a deletion, from harming it:

- After publishing, an owner deletes only what its own publication made unreachable. Reach only ever
  moves to newer payloads, so nothing that comes later can need it.
- The sweep for leftovers of dead writers, once after acquiring, deletes only payloads of *earlier*
  generations. A later owner's unpublished work carries a later generation and is out of its reach.

A damaged manifest hides what it names. Who cannot see what is needed must not delete.
"""

from __future__ import annotations

import re

from spillover.errors import StateError
from spillover.state.control import Control
from spillover.state.payload import COMMIT, open_payload
from spillover.store import Store

__all__ = ["FOLDER", "Reach", "sweep_orphans"]

FOLDER = re.compile(r"(?P<folder>[^/]+/[^/]+-g(?P<generation>\d{6,})-[0-9a-f]{8})/")


class Reach:
    """Finds what documents reach, reading each manifest once."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._named: dict[str, frozenset[str]] = {}

    def of(self, document: Control) -> set[str]:
        """Folders of all payloads that ``document`` needs.

        Raises:
            Corrupt: a manifest is missing or damaged.
        """
        folders: set[str] = set()
        for reference in (*document.current.values(), *document.previous.values()):
            if reference.commit not in self._named:
                names = open_payload(self.store, reference).manifest.names
                self._named[reference.commit] = frozenset(named.folder for named in names)
            folders |= {reference.folder} | self._named[reference.commit]
        return folders

    def drop(self, before: Control, after: Control) -> None:
        """Delete what ``before`` reached and ``after``, its successor by this owner, does not."""
        try:
            dropped = self.of(before) - self.of(after)
        except StateError:
            return
        for folder in sorted(dropped):
            _delete(self.store, folder)
        live = {ref.commit for ref in (*after.current.values(), *after.previous.values())}
        self._named = {commit: names for commit, names in self._named.items() if commit in live}


def sweep_orphans(store: Store, document: Control, generation: int) -> list[str]:
    """Delete payloads of generations before ``generation`` that ``document`` does not reach.

    Returns the folders that were deleted; none when a manifest is damaged.
    """
    try:
        kept = Reach(store).of(document)
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
