"""``spill models`` and ``spill adapters``: what is on this machine and what could be."""

from __future__ import annotations

import shutil
from typing import Annotated

import typer

from spillover.errors import InputError

__all__ = ["adapters", "models"]


def models(
    fetch: Annotated[str | None, typer.Option(help="Get this model now.", metavar="MODEL")] = None,
) -> None:
    """List the models with a tag, and which of them are on this machine."""
    from spillover.models import DEMO, TAGS, installed

    if fetch is not None:
        _fetch(fetch)
        return
    here = {model.name: model for model in installed()}
    rows = {DEMO: "SmolLM2-135M-Instruct, from PyPI"} | {tag: source.repo for tag, source in TAGS.items()}
    rows |= {name: str(model.path) for name, model in here.items() if name not in rows}
    for name, what in rows.items():
        size = f"{here[name].bytes / 1e9:.1f} GB" if name in here else "-"
        print(f"{name:16} {size:>9}  {what}")


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
