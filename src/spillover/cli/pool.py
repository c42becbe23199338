"""``spill pool``: looking at a pool and keeping it in order."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from spillover.cli import pool_lines as lines
from spillover.cli.answers import answer
from spillover.cli.progress import counting, progress, steps
from spillover.errors import InputError, LockContended
from spillover.sizes import parse_size

if TYPE_CHECKING:
    from spillover.pool import Owners, Pool

__all__ = ["app"]

Folder = Annotated[str, typer.Argument(metavar="POOL", help="The pool's folder.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON document.")]

app = typer.Typer(
    rich_markup_mode=None,
    help="Look at a pool of records and tensors, and keep it in order.",
    epilog="Who owns what is in a catalogue that one process has open at a time.",
)


@app.callback(invoke_without_command=True)
def root(ctx: typer.Context) -> None:
    """Look at a pool of records and tensors, and keep it in order."""
    if ctx.invoked_subcommand is None:
        print(ctx.get_help())


@app.command()
def stats(pool: Folder, json: Json = False) -> None:
    """Say how much a pool holds, how much of it somebody owns, and how much it may hold."""
    from spillover.pool.listing import figures

    with _opened(pool) as opened:
        found = figures(opened.folder)
        answer(found, json, lambda: lines.of_figures(found, opened.path))


@app.command("ls")
def list_(
    pool: Folder,
    owner: Annotated[str | None, typer.Option(metavar="NAME", help="What this owner owns.")] = None,
    pack: Annotated[str | None, typer.Option(metavar="ID", help="What is in this pack.")] = None,
    json: Json = False,
) -> None:
    """List who owns how much; or what an owner owns, or what is in a pack, record by record."""
    from spillover.pool.listing import list_owners, list_pack, list_publications, pack_named

    if owner is not None and pack is not None:
        raise InputError("choose either --owner or --pack", hint="spill pool ls --help")
    with _opened(pool) as opened:
        if pack is not None:
            held = list_pack(opened.folder, pack_named(pack))
            answer(held, json, lambda: lines.of_publications(held.publications))
            return
        with _owning(opened) as owners:
            if owner is not None:
                owned = list_publications(owners, owner)
                answer(owned, json, lambda: lines.of_publications(owned))
                return
            names = list_owners(owners)
    answer(names, json, lambda: lines.of_owners(names, opened.path))


@app.command()
def verify(pool: Folder, json: Json = False) -> int:
    """Check every byte of a pool. Exits 1 if something is damaged, and says what, a line each."""
    with _opened(pool) as opened, progress("verify", silent=json) as report:
        found = opened.verify(report)
    answer(found, json, lambda: lines.of_verification(found))
    return 1 if found.damaged else 0


@app.command()
def gc(
    pool: Folder,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be deleted.")] = False,
    json: Json = False,
) -> int:
    """Delete the packs that nobody owns anything in, and that no reader has open."""
    with (
        _opened(pool) as opened,
        _owning(opened) as owners,
        steps("look", "deleted, durably", silent=json) as (looked, deleting),
    ):
        found = owners.collect(dry_run=dry_run, looked=looked, deleting=deleting)
    answer(found, json, lambda: lines.of_collection(found, dry_run))
    return 1 if found.damaged else 0


@app.command()
def compact(
    pool: Folder,
    min_owned: Annotated[
        float, typer.Option(help="Rewrite packs of which less than this share is owned.", metavar="SHARE")
    ] = 0.5,
    json: Json = False,
) -> int:
    """Rewrite the packs of which little is owned. References stay valid as they are."""
    if not 0 < min_owned <= 1:
        raise InputError(f"--min-owned {min_owned} is no share", hint="--min-owned 0.5")
    with _opened(pool) as opened, _owning(opened) as owners, progress("compact", silent=json) as report:
        found = owners.compact(min_owned=min_owned, progress=report)
    answer(found, json, lambda: lines.of_compaction(found))
    return 1 if found.damaged else 0


@app.command()
def export(
    pool: Folder,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A new file.")],
    owners: Annotated[list[str], typer.Argument(metavar="OWNER...", help="Whose publications.")],
    json: Json = False,
) -> None:
    """Write what some owners own, with all that it depends on, to a file that another pool can import."""
    with _opened(pool) as opened, _owning(opened) as owned, progress("export", silent=json) as report:
        done = owned.export(owners, file, progress=report)
    answer(
        done,
        json,
        lambda: [f"{lines.of_transfer(done)}, written to {file}", f"next: spill pool import POOL {file}"],
    )


@app.command("import")
def import_(
    pool: Folder,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What `spill pool export` wrote.")],
    create: Annotated[bool, typer.Option("--create", help="Make the pool if there is none.")] = False,
    json: Json = False,
) -> None:
    """Take in what was exported. Its owners own it here too, and its references are valid as they are."""
    with (
        _opened(pool, create=create) as opened,
        _owning(opened) as owned,
        progress("import", silent=json) as report,
    ):
        done = owned.import_(file, progress=report)
    answer(done, json, lambda: [f"{lines.of_transfer(done)} taken in; owners: {', '.join(done.owners)}"])


@app.command()
def limit(
    pool: Folder,
    size: Annotated[str, typer.Argument(metavar="BYTES|none", help="Such as 20GB, 512MiB or none.")],
    json: Json = False,
) -> None:
    """Set how many bytes the packs of a pool may take. Writers notice at once; nothing is deleted."""
    wanted = None if size.lower() == "none" else parse_size(size, "20GB, 512MiB, 1000000 or none")
    with _opened(pool) as opened:
        opened.folder.limit(wanted)
        used = opened.folder.used()
        answer(opened.folder.identity, json, lambda: lines.of_limit(opened.path, wanted, used))


@app.command()
def qualify(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder on a shared mount.")],
    peer: Annotated[Path, typer.Option(metavar="DIR", help="The same folder on a second mount.")],
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Where to write the declaration.")] = None,
    durability: Annotated[
        str, typer.Option(metavar="TEXT", help="What is known of the servers: what a sync survives there.")
    ] = "",
    json: Json = False,
) -> int:
    """Try whether two mounts of one filesystem keep what a pool needs, and declare what they proved."""
    from spillover.pool import qualify as trial

    with counting("qualify", "checks", silent=json) as report:
        found = trial.qualify(
            folder,
            peer,
            progress=lambda done, total, now: report(len(done), total, lines.of_trial(done, now)),
        )
    answer(found, json, lambda: lines.of_qualification(found, out))
    if not found.passed:
        return 1
    if out is not None:
        trial.write_declaration(found.declaration(durability_description=durability), out)
    return 0


@contextlib.contextmanager
def _opened(path: str, *, create: bool = False) -> Iterator[Pool]:
    from spillover.pool import Pool

    with Pool.open(path, create=create) as pool:
        yield pool


@contextlib.contextmanager
def _owning(pool: Pool) -> Iterator[Owners]:
    """The pool's catalogue, open in this process.

    Raises:
        LockContended: another process has it open; the message names it.
    """
    from spillover.pool.listing import catalogue_owner

    try:
        owners = pool.owners()
    except LockContended:
        owner = catalogue_owner(pool.folder)
        who = f"process {owner.pid} on {owner.host}" if owner else "another process"
        raise LockContended(
            f"the catalogue of {pool.path} is open in {who}", hint="ask that process, or stop it first"
        ) from None
    with owners:
        yield owners
