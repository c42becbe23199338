"""All commands of ``spill``, in the order in which ``--help`` lists them."""

from __future__ import annotations

from typing import Annotated

import typer

from spillover import __version__
from spillover.cli import catalog, inspect, jobs, machine, prepare

__all__ = ["app"]

app = typer.Typer(
    name="spill",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="LLM post-training work that no interruption can take away.",
    epilog="Running the same command again continues it. --debug shows tracebacks.",
)

app.command("run")(jobs.run)
app.command("tune")(jobs.tune)
app.command("resume")(jobs.resume)
app.command("status")(inspect.status)
app.command("tail")(inspect.tail)
app.command("runs")(inspect.runs)
app.command("models")(catalog.models)
app.command("adapters")(catalog.adapters)
app.command("check")(prepare.check)
app.command("example")(prepare.example)
app.command("doctor")(machine.doctor)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"spillover {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """LLM post-training work that no interruption can take away."""
