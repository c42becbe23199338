"""``spill doctor``: what this machine is, what works on it, and why not what does not."""

from __future__ import annotations

import os
import platform
import shutil
from importlib import metadata, util
from typing import Annotated

import typer

__all__ = ["doctor"]


def doctor(
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure how fast the engine multiplies.")
    ] = False,
) -> None:
    """Describe this machine: memory, disk, engines, models, unfinished runs."""
    from spillover import __version__
    from spillover.jobs.runs import hardware, list_runs
    from spillover.models import home

    disk = shutil.disk_usage(next(path for path in (home(), *home().parents) if path.exists()))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    print(f"spillover {__version__}, Python {platform.python_version()}")
    print(f"machine   {hardware()}, {memory / 1e9:.1f} GB memory")
    print(f"home      {home()}, {disk.free / 1e9:,.0f} GB free of {disk.total / 1e9:,.0f} GB")
    print(f"torch     {_torch(measure)}")
    for name, why in (("gguf", "the demo model"), ("obstore", "s3://, gs:// and az://")):
        print(f"{name:9} {_version(name)} ({why})")
    unfinished = [run.id for run in list_runs() if (m := run.manifest()) and m.status != "completed"]
    print(
        f"runs      {len(unfinished)} unfinished here{': ' + ', '.join(unfinished[:5]) if unfinished else ''}"
    )


def _torch(measure: bool) -> str:
    if util.find_spec("torch") is None:
        return 'not installed; pip install "spillover"'
    if not measure:
        return f"{metadata.version('torch')}; --measure says how fast"
    from spillover.engine.torch.device import default_numerics, pick_device

    device = pick_device(None)
    numerics, why = default_numerics(device)
    return f"{metadata.version('torch')} on {device}, {numerics} by default: {why}"


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return f'not installed; pip install "spillover[{"demo" if name == "gguf" else "cloud"}]"'
