"""The scripts that write measured pages, as modules."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

DOCS = Path(__file__).parents[3] / "docs"


def script(name: str) -> ModuleType:
    """``docs/<name>.py``."""
    spec = importlib.util.spec_from_file_location(f"docs_{name}", DOCS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look for their module there
    spec.loader.exec_module(module)
    return module
