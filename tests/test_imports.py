"""The order of the house: imports point downward, heavy libraries load late, modules stay small."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).resolve().parent.parent / "src"
MODULES = sorted((SRC / "spillover").rglob("*.py"))

BELOW = {
    "errors": set(),
    "sizes": {"errors"},
    "http": {"errors"},
    "examples": {"errors", "store", "state", "pool", "queue", "http"},
    "store": {"errors"},
    "state": {"errors", "store"},
    "pool": {"errors", "store", "state"},
    "queue": {"errors", "store", "state", "pool", "http"},
    "models": {"errors", "store"},
    "engine": {"errors", "store", "models"},
    "evaluate": {"errors"},
    "jobs": {"errors", "sizes", "store", "state", "models", "engine", "evaluate"},
    "export": {"errors", "sizes", "store", "state", "models", "engine", "evaluate", "jobs"},
    "serve": {"errors", "sizes", "http", "store", "state", "models", "engine", "evaluate", "jobs"},
    "report": {"errors", "sizes", "store", "state", "models", "engine", "evaluate", "jobs"},
    "cli": {
        *("errors", "sizes", "http", "store", "state", "pool", "queue", "models", "engine", "jobs"),
        *("export", "serve", "evaluate", "report"),
    },
}
"""What each part may import beside itself. A new part needs a line here."""

HEAVY = ("torch", "transformers", "peft", "numpy", "safetensors")


def part_of(module: str) -> str:
    """``store`` for ``spillover.store.base``; empty for ``spillover`` itself."""
    return module.removeprefix("spillover").removeprefix(".").partition(".")[0]


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__")


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and full name of everything a file imports, in functions and under TYPE_CHECKING too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import hides where it points"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def upward(module: str, path: Path) -> list[str]:
    """Imports of ``module`` that point at a part which is not below its own."""
    own = part_of(module)
    allowed = BELOW[own] | {own} if own else set()
    found = []
    for line, imported in imports(path):
        if imported.partition(".")[0] != "spillover" or imported == "spillover.__version__":
            continue
        if part_of(imported) not in allowed:
            found.append(f"{path}:{line}: {module} imports {imported}")
    return found


def test_imports_point_downward() -> None:
    assert len(MODULES) > 50
    assert [line for path in MODULES for line in upward(name_of(path), path)] == []


def test_every_part_has_its_place_in_the_order() -> None:
    assert {part_of(name_of(path)) for path in MODULES} - {""} == BELOW.keys()


def test_the_order_has_no_cycle() -> None:
    """Each part stands above everything that its parts stand above."""
    for part, below in BELOW.items():
        assert part not in below
        assert all(BELOW[lower] <= below for lower in below)


@pytest.mark.parametrize(
    "line",
    [
        "from spillover.jobs import tune",
        "import spillover.state.control",
        "from spillover import models",
        "if TYPE_CHECKING:\n    from spillover.cli.app import app",
        "def late():\n    import spillover.engine",
    ],
)
def test_the_check_sees_every_way_to_import(tmp_path: Path, line: str) -> None:
    path = tmp_path / "base.py"
    path.write_text(line)
    assert len(upward("spillover.store.base", path)) == 1


def test_stores_and_state_name_no_heavy_library() -> None:
    for path in MODULES:
        if part_of(name_of(path)) in ("errors", "store", "state", "queue"):
            assert [found for _, found in imports(path) if found.partition(".")[0] in HEAVY] == []


def test_what_the_tests_compare_with_is_not_used_by_the_package() -> None:
    for path in MODULES:
        assert [x for _, x in imports(path) if x.partition(".")[0] in ("transformers", "peft")] == []


@pytest.mark.parametrize(
    "module",
    [
        "spillover",
        "spillover.store",
        "spillover.state",
        "spillover.pool",
        "spillover.cli.app",
        "spillover.models",
    ],
)
def test_importing_loads_nothing_heavy(module: str) -> None:
    code = f"import sys, {module}; print(*sorted(set(sys.modules) & set({HEAVY!r})))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_modules_are_short() -> None:
    lengths = {name_of(path): len(path.read_text(encoding="utf-8").splitlines()) for path in MODULES}
    assert {name: length for name, length in lengths.items() if length >= 500} == {}
