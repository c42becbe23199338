"""Where tests and benchmarks find the public data sets that are not part of the repository."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def shared(*parts: str) -> Path:
    """A path below the shared data folder: ``SPILL_SHARED``, or ``shared`` beside the checkout."""
    base = Path(os.environ.get("SPILL_SHARED", ROOT.parent / "shared"))
    path = base.joinpath("data", *parts)
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing; set SPILL_SHARED to the folder that holds data/")
    return path
