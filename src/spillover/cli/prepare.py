"""``spill check`` and ``spill example``: before the work."""

from __future__ import annotations

from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated

import typer

from spillover.errors import InputError

__all__ = ["check", "example", "sample_file"]

EXAMPLES = ("tickets", "prompts", "pool", "queue")


def check(
    file: Annotated[Path, typer.Argument(help="A JSONL file.")],
    json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Check a data file: shape, ids, and what it can be used for. The first fault is named with its line."""
    from spillover.jobs.data import check_file

    summary = check_file(file)
    if json:
        import msgspec

        facts = {
            "path": str(summary.path),
            "shape": summary.shape,
            "rows": summary.rows,
            "bytes": summary.bytes,
            "sha256": summary.sha256,
            "fits": list(summary.fits),
        }
        print(msgspec.json.encode(facts).decode())
        return
    print(f"{summary.path}: {summary.rows:,} {summary.shape} rows, {summary.bytes / 1e6:,.1f} MB")
    path = summary.path
    use = {
        "prompt": f"spill run MODEL {path}",
        "train": f"spill tune MODEL {path}",
        "eval": f"spill eval {path} MODEL",
    }
    for purpose in summary.fits:
        print(f"can be used by: {use[purpose]}")


def example(
    name: Annotated[str, typer.Argument(help=f"One of: {', '.join(EXAMPLES)}.")],
    to: Annotated[Path | None, typer.Option(help="Folder to write; NAME when not given.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Write into a folder that exists.")] = False,
) -> None:
    """Write an example: files and the commands to type."""
    if name not in EXAMPLES:
        raise InputError(f"there is no example {name!r}", hint=f"spill example {EXAMPLES[0]}")
    target = to or Path(name)
    if target.exists() and not force:
        raise InputError(f"{target} exists already", hint=f"spill example {name} --to OTHER, or add --force")
    try:
        target.mkdir(parents=True, exist_ok=True)
        for file in _files(name):
            (target / file.name).write_bytes(file.read_bytes())
    except OSError as error:
        raise InputError(f"{target} cannot be written: {error.strerror}", hint="--to OTHER") from error
    print((target / "README.md").read_text(encoding="utf-8"))


def sample_file() -> Path:
    """The packaged questions, as a file in ``SPILL_HOME`` that stays the same for every run."""
    from spillover.jobs.runs import atomic_file
    from spillover.models import home

    path = home() / "examples" / "sample.jsonl"
    data = (resources.files("spillover.examples") / "sample.jsonl").read_bytes()
    if not path.exists() or path.read_bytes() != data:
        atomic_file(path, [data])
    return path


def _files(name: str) -> list[Traversable]:
    folder = resources.files("spillover.examples") / name
    return [file for file in folder.iterdir() if file.is_file()]
