"""The documentation is true: links resolve, examples run, and the format tables name what the code has."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import get_args

import msgspec
import pytest

from spillover.jobs.events import Events, Kind
from spillover.jobs.interrupts import Ending
from spillover.store.filesystem import LOCAL

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = [page for page in (ROOT / "README.md", *sorted(DOCS.rglob("*.md"))) if page.exists()]
FORMATS = (DOCS / "formats.md").read_text(encoding="utf-8")

FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")
TABLE = re.compile(r"<!-- (?P<label>[^>]+?) -->\n\n(?P<rows>(?:\|.*\n)+)")
STRUCTS = (
    "spillover.state.control.Control",
    "spillover.state.payload.Commit",
    "spillover.jobs.checkpoint.TuneRecord",
    "spillover.jobs.segments.Cursor",
    "spillover.jobs.kept.Answered",
    "spillover.jobs.report.Report",
    "spillover.jobs.runs.JobFile",
    "spillover.jobs.runs.Manifest",
    "spillover.models.pins.Pin",
    "spillover.export.export.Record",
    "spillover.pool.folder.Identity",
    "spillover.pool.gate.Resident",
    *(f"spillover.queue.messages.{name}" for name in "Task Submitted Acquired Completion Receipt".split()),
    *(f"spillover.queue.messages.{name}" for name in "Yielded Failure Consumer Batch".split()),
    *(f"spillover.queue.messages.{name}" for name in "CheckpointInfo Stats TaskInfo".split()),
    "spillover.queue.transport.Told",
    "spillover.serve.files.File",
    "spillover.serve.batches.Batch",
    "spillover.store.filesystem.Declaration",
)
"""Documents that are read or written; the structs inside them are found from these."""


def tables() -> dict[str, list[str]]:
    """Label of a table to the first cell of each of its rows, without backquotes."""
    found = {}
    for match in TABLE.finditer(FORMATS):
        rows = match["rows"].splitlines()[2:]
        found[match["label"]] = [row.split("|")[1].strip().strip("`") for row in rows]
    return found


def structs(kind: type) -> Iterator[type]:
    """``kind`` and every struct that its fields hold."""
    yield kind
    for field in msgspec.structs.fields(kind):
        parts = [field.type]
        while parts:
            part = parts.pop()
            parts += get_args(part)
            if isinstance(part, type) and issubclass(part, msgspec.Struct):
                yield from structs(part)


def load(name: str) -> type:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def anchor(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def broken_links(page: Path, text: str) -> list[str]:
    """Relative links of a page that lead nowhere: no such file, or no such heading in it."""
    broken = []
    for target in LINK.findall(FENCED.sub("", text)):
        if "://" in target or target.startswith("mailto:"):
            continue
        name, _, wanted = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        if not path.exists():
            broken.append(target)
        elif wanted:
            headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
            if wanted not in map(anchor, headings):
                broken.append(target)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_resolve(page: Path) -> None:
    assert broken_links(page, page.read_text(encoding="utf-8")) == []


def test_a_broken_link_is_noticed() -> None:
    text = "[a](nowhere.md) [b](formats.md#no-such-heading) [c](formats.md#pins) [d](https://example.org/x)"
    assert broken_links(DOCS / "page.md", text) == ["nowhere.md", "formats.md#no-such-heading"]


EXAMPLES = [
    pytest.param(code, id=f"{page.stem}-{number}")
    for page in PAGES
    for number, (language, code) in enumerate(FENCED.findall(page.read_text(encoding="utf-8")))
    if language == "python"
]


@pytest.mark.parametrize("code", EXAMPLES)
def test_examples_run(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SPILL_HOME", str(tmp_path / "home"))
    exec(compile(code, "example", "exec"), {"__name__": "example"})


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 3


@pytest.mark.parametrize("label", [label for label in tables() if label.startswith("struct: ")])
def test_tables_have_exactly_the_fields_of_the_code(label: str) -> None:
    kind = load(label.removeprefix("struct: "))
    assert sorted(tables()[label]) == sorted(field.encode_name for field in msgspec.structs.fields(kind))


def test_every_struct_of_a_document_has_a_table() -> None:
    needed = {f"{kind.__module__}.{kind.__name__}" for name in STRUCTS for kind in structs(load(name))}
    documented = {label.removeprefix("struct: ") for label in tables() if label.startswith("struct: ")}
    assert documented == needed


def test_event_tables_have_exactly_the_kinds_and_common_fields() -> None:
    heard: list[dict[str, object]] = []
    Events("run", heard.append).emit("start")
    assert tables()["events: common"] == [*heard[0]]
    assert tables()["events: kinds"] == [*get_args(Kind)]


def test_environment_variables_are_those_the_code_reads() -> None:
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    read = set(re.findall(r"environ(?:\.get\(|\[)\"(SPILL_\w+)\"", source))
    assert set(tables()["environment"]) == read


def test_exit_codes_are_those_of_the_endings() -> None:
    codes = {int(code) for code in tables()["exit codes"]}
    assert codes == {ending.code for ending in Ending} | {1}


def test_the_local_filesystems_are_those_of_the_code() -> None:
    section = FORMATS.partition("## Storage declaration")[2].partition(". When")[0]
    assert set(re.findall(r"`(\w+)`", section)) == LOCAL


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", DOCS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_command_page_is_fresh() -> None:
    assert (DOCS / "cli.md").read_text(encoding="utf-8") == generator().page(), "python docs/generate.py"


def test_the_command_page_does_not_depend_on_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    before = generator().page()
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert generator().page() == before
    assert "\x1b" not in before


def test_the_command_page_is_what_the_command_prints() -> None:
    command = [str(Path(sys.executable).with_name("spill")), "tune", "--help"]
    environment = {**os.environ, "COLUMNS": "80"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    printed = "\n".join(line.rstrip() for line in done.stdout.rstrip().splitlines())
    assert f"```text\n{printed}\n```" in (DOCS / "cli.md").read_text(encoding="utf-8")
