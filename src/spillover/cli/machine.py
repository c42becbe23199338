"""``spill doctor``: what this machine is, how fast, what works on it, and why not what does not."""

from __future__ import annotations

import os
import platform
import shutil
import sys
import time
from collections.abc import Iterator
from importlib import metadata, util
from typing import TYPE_CHECKING, Annotated, Any

import typer

from spillover.cli.answers import answer

if TYPE_CHECKING:
    from spillover.engine.speeds import Machine

__all__ = ["doctor"]

EXTRAS = (("gguf", "demo", "the demo model"), ("obstore", "cloud", "s3://, gs:// and az://"))
AGES = (("days", 86_400), ("hours", 3_600), ("minutes", 60))


def doctor(
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure memory, drive, products and passes: half a minute.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Describe this machine: memory, disk, engines, speeds, unfinished runs."""
    from spillover.engine.speeds import machines

    kept = True
    if measure:
        machine, kept = _measured(silent=json)
        found = [machine]
    else:
        found = machines()
    facts = _facts() | {"measured": found[0] if found else None}
    answer(facts, json, lambda: _lines(facts))
    if not kept:
        print(f"{facts['home']} cannot be written: nothing of this was kept", file=sys.stderr)


def _measured(*, silent: bool) -> tuple[Machine, bool]:
    from spillover.cli.progress import counting
    from spillover.engine.torch.measure import measure

    with counting("measuring", "parts", silent=silent) as turn:
        return measure(turn)


def _facts() -> dict[str, Any]:
    from spillover import __version__
    from spillover.jobs.runs import hardware, list_runs
    from spillover.models import home

    disk = shutil.disk_usage(next(path for path in (home(), *home().parents) if path.exists()))
    versions = {name: _version(name) for name in ("torch", *(name for name, _, _ in EXTRAS))}
    return {
        "spillover": __version__,
        "python": platform.python_version(),
        "hardware": hardware(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "home": str(home()),
        "free_bytes": disk.free,
        "disk_bytes": disk.total,
        "packages": versions,
        "unfinished": [run.id for run in list_runs() if (m := run.manifest()) and m.status != "completed"],
    }


def _lines(facts: dict[str, Any]) -> Iterator[str]:
    """What a person reads."""
    versions, unfinished = facts["packages"], facts["unfinished"]
    yield f"spillover {facts['spillover']}, Python {facts['python']}"
    yield f"machine   {facts['hardware']}, {facts['memory_bytes'] / 1e9:.1f} GB memory"
    free, total = facts["free_bytes"] / 1e9, facts["disk_bytes"] / 1e9
    yield f"home      {facts['home']}, {free:,.0f} GB free of {total:,.0f} GB"
    yield f"torch     {versions['torch'] or 'not installed; pip install spillover'}"
    for name, extra, why in EXTRAS:
        have = versions[name] or f'not installed; pip install "spillover[{extra}]"'
        yield f"{name:9} {have} ({why})"
    named = f": {', '.join(unfinished[:5])}" if unfinished else ""
    yield f"runs      {len(unfinished)} unfinished here{named}"
    yield from _speeds(facts["measured"], facts["spillover"])


def _speeds(machine: Machine | None, version: str) -> Iterator[str]:
    """What was measured, and when."""
    if machine is None:
        yield "speeds    not measured yet; spill doctor --measure"
        return
    yield f"reading   memory {machine.memory.gbs:.1f} GB/s, {_drive(machine)}"
    for name, rates in machine.rates.items():
        yield (
            f"{name:9} products {rates.gflops:,.0f} GFLOP/s, passes {rates.passes_gflops:,.0f} GFLOP/s, "
            f"a token alone reads weights at {rates.alone_gbs:.1f} GB/s"
        )
    by = "" if machine.version == version else f" by spillover {machine.version}: estimates need it again"
    age = time.time() - machine.time
    yield (
        f"measured  {_age(age)} in {machine.seconds:.0f} s with {machine.threads} threads{by}; "
        "spill doctor --measure measures again"
    )


def _drive(machine: Machine) -> str:
    drive = machine.drive
    if drive is None:
        return f"drive not measured: {machine.without_drive}"
    how = "past the page cache" if drive.direct else "through the page cache"
    return f"drive {drive.rate / 1e9:.2f} GB/s {how} ({drive.source})"


def _age(seconds: float) -> str:
    for unit, size in AGES:
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit} ago"
    return "just now"


def _version(name: str) -> str | None:
    if util.find_spec(name) is None:
        return None
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
