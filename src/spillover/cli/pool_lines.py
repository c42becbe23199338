"""What ``spill pool`` tells a person, line by line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from spillover.pool import Collection, Compaction, Transfer, Verification
    from spillover.pool.listing import Figures, OwnerListing, PublicationListing, RecordListing
    from spillover.pool.qualify import Check, Qualification

WIDTH = 50
"""Characters of the bar."""
UNITS = ("B", "kB", "MB", "GB", "TB")


def shown_size(size: float) -> str:
    """A number of bytes in the unit that suits it."""
    power = 0
    while size >= 999.95 and power < len(UNITS) - 1:
        size, power = size / 1000, power + 1
    return f"{size:,.{1 if power else 0}f} {UNITS[power]}"


def counted(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def of_figures(found: Figures, path: Path) -> Iterator[str]:
    limit = "no limit" if found.max_bytes is None else f"of at most {shown_size(found.max_bytes)}"
    yield f"pool {found.pool} at {path}"
    yield f"holds    {counted(found.packs, 'pack')}, {shown_size(found.bytes)}, {limit}"
    if found.owned_bytes is None:
        yield f"owned    not known: {_closed(found)}"
    else:
        publications, owners = found.owned_extents or 0, found.owners or 0
        share = found.owned_bytes / found.bytes if found.bytes else 0
        yield (
            f"owned    {counted(publications, 'publication')} by {counted(owners, 'owner')}, "
            f"{shown_size(found.owned_bytes)} ({share:.0%})"
        )
    yield f"written  by {counted(found.writers, 'registered writer')}"
    if found.replaced:
        yield f"replaced {counted(found.replaced, 'pack')}, kept until readers let go"
    yield from _bar(found)


def _closed(found: Figures) -> str:
    if found.catalogue is not None:
        return f"the catalogue is open in process {found.catalogue.pid} on {found.catalogue.host}"
    return str(found.refused)


def _bar(found: Figures) -> Iterator[str]:
    """What is owned, what is not, and what is free under the limit, as one bar and its legend."""
    whole = max(found.bytes, found.max_bytes or 0)
    if not whole:
        return
    owned = found.owned_bytes
    parts = [("█", "owned", owned or 0), ("▒", "unowned", found.bytes - (owned or 0))]
    if owned is None:
        parts = [("▒", "in packs", found.bytes)]
    if found.max_bytes is not None:
        parts.append(("·", "free", max(0, found.max_bytes - found.bytes)))
    edge, start, drawn = 0, 0, ""
    for mark, _, size in parts:
        edge += size
        stop = round(WIDTH * edge / whole)
        drawn, start = drawn + mark * (stop - start), stop
    yield drawn
    yield "  ".join(f"{mark} {name} {shown_size(size)}" for mark, name, size in parts)


def of_owners(found: Sequence[OwnerListing], path: Path) -> Iterator[str]:
    if not found:
        yield f"nobody owns anything in {path}"
    for owner in found:
        number = counted(owner.publications, "publication")
        yield f"{owner.name:32} {number:>20} {shown_size(owner.bytes):>10}"


def of_publications(found: Sequence[PublicationListing]) -> Iterator[str]:
    for publication in found:
        kind = "  relocation table" if publication.relocations else ""
        yield (
            f"{publication.ref}  {publication.pack} at {publication.offset}, "
            f"{shown_size(publication.bytes)}{kind}"
        )
        yield from (f"    needs {need}" for need in publication.dependencies)
        yield from (_record_line(record) for record in publication.records)


def _record_line(record: RecordListing) -> str:
    if record.target is not None:
        return f"    {record.id:24} link to {record.target}"
    what = record.codec if record.shape is None else f"{record.dtype} {[*record.shape]}"
    return f"    {record.id:24} {what:24} {shown_size(record.bytes):>9}  {record.ref}"


def of_verification(found: Verification) -> Iterator[str]:
    yield from found.damaged
    verdict = f"{len(found.damaged):,} damaged" if found.damaged else "nothing damaged"
    seen = f"{counted(found.packs, 'pack')}, {counted(found.publications, 'publication')}"
    yield f"{seen}, {shown_size(found.bytes)}: {verdict}"
    if found.torn:
        yield f"{shown_size(found.torn)} at the ends of packs were never acknowledged: their writers died"


def of_collection(found: Collection, dry_run: bool) -> Iterator[str]:
    yield from found.damaged
    verb = "would delete" if dry_run else "deleted"
    yield f"{verb} {counted(found.deleted, 'pack')}, {shown_size(found.freed)}"
    if found.held:
        yield f"kept {counted(found.held, 'pack')} that a reader has open or a live writer has not settled"
    if found.retired:
        yield f"retired {counted(found.retired, 'writer')} whose process is dead"
    yield f"{counted(found.packs, 'pack')} left, {shown_size(found.bytes)}"


def of_compaction(found: Compaction) -> Iterator[str]:
    yield from found.damaged
    yield (
        f"rewrote {counted(found.rewritten, 'pack')} as {found.made:,}: {shown_size(found.copied)} copied, "
        f"{shown_size(found.freed)} deleted"
    )
    if found.held:
        yield f"kept {counted(found.held, 'replaced pack')} that a reader has open; spill pool gc, later"


def of_transfer(done: Transfer) -> str:
    return f"{counted(done.publications, 'publication')}, {shown_size(done.bytes)}"


def of_limit(path: Path, wanted: int | None, used: int) -> Iterator[str]:
    if wanted is None:
        yield f"{path}: no limit"
        return
    yield f"{path}: at most {shown_size(wanted)}"
    if used > wanted:
        yield f"it holds {shown_size(used)} already, so nothing can be published until some is collected"


def of_trial(done: Sequence[Check], now: str) -> str:
    """What is being tried, and how the last check ended."""
    last = done[-1] if done else None
    ended = f"{last.name} {'holds' if last.passed else 'FAILED'} ({last.seconds:.1f} s)" if last else ""
    return "; ".join(part for part in (f"now: {now}" if now else "", ended) if part)


def of_qualification(found: Qualification, out: Path | None) -> Iterator[str]:
    yield f"{found.profile}, {found.client_version}: {found.path} and {found.peer}"
    for check in found.checks:
        yield f"{'holds ' if check.passed else 'FAILED'}  {check.name}: {check.seen} ({check.seconds:.1f} s)"
    if not found.passed:
        yield "these mounts cannot hold a pool"
    elif out is None:
        yield "next: the same command with --out FILE writes the declaration"
    else:
        yield f"next: export SPILL_STORAGE_DECLARATION={out}"
