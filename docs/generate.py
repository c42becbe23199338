"""Write ``docs/cli.md``: the help of every command, as the command itself prints it.

The width is fixed and there is no colour, so the page depends on nothing but the commands.

    python docs/generate.py            writes the page
    python docs/generate.py --check    exits 1 if it is stale
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from spillover.cli.app import app

PAGE = Path(__file__).parent / "cli.md"
WIDTH = 78  # what a terminal of 80 columns shows
HEAD = """\
# Commands

This page is what `spill COMMAND --help` prints, written by `python docs/generate.py`. Exit codes, files and
environment variables are in [formats.md](formats.md).
"""


def page() -> str:
    """The whole page."""
    sections = [f"\n## `{name}`\n\n```text\n{text}\n```\n" for name, text in helps()]
    return HEAD + "".join(sections)


def helps() -> Iterator[tuple[str, str]]:
    """``spill`` and its commands in the order of its help, each with its help; groups go first."""
    root: Any = typer.main.get_command(app)
    context = root.context_class(root, info_name="spill", terminal_width=WIDTH)
    yield from _helps("spill", root, context)


def _helps(name: str, command: Any, context: Any) -> Iterator[tuple[str, str]]:
    yield name, _help(command, context)
    for part in command.list_commands(context) if hasattr(command, "list_commands") else ():
        below = command.get_command(context, part)
        settings = {"info_name": part, "parent": context, "terminal_width": WIDTH}
        yield from _helps(f"{name} {part}", below, below.context_class(below, **settings))


def _help(command: Any, context: Any) -> str:
    text: str = command.get_help(context)
    return "\n".join(line.rstrip() for line in text.rstrip().splitlines())


def main() -> None:
    text = page()
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(text, encoding="utf-8")
    elif not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text:
        raise SystemExit("docs/cli.md is stale: python docs/generate.py")


if __name__ == "__main__":
    main()
