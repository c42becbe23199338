"""All commands of ``spill``, in the order in which ``--help`` lists them."""

from __future__ import annotations

from typing import Annotated

import typer

from spillover import __version__
from spillover.cli import catalog, export, inspect, jobs, machine, pool, prepare, queue, report, serve
from spillover.errors import InputError

__all__ = ["app", "usage_error"]

app = typer.Typer(
    name="spill",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="LLM post-training work that no interruption can take away.",
    epilog="Running the same command again continues it. --debug shows tracebacks.",
)

app.command("run")(jobs.run)
app.command("distill")(jobs.distill)
app.command("tune")(jobs.tune)
app.command("eval")(jobs.evaluate)
app.command("export")(export.export)
app.command("serve")(serve.serve)
app.command("resume")(jobs.resume)
app.command("stop")(inspect.stop)
app.command("status")(inspect.status)
app.command("tail")(inspect.tail)
app.command("runs")(inspect.runs)
app.command("report")(report.report)
app.command("models")(catalog.models)
app.command("adapters")(catalog.adapters)
app.command("check")(prepare.check)
app.command("example")(prepare.example)
app.command("doctor")(machine.doctor)
app.add_typer(pool.app, name="pool")
app.add_typer(queue.app, name="queue")


def usage_error(error: typer.TyperException) -> InputError:
    """The parser's complaint as an error like all others, with the help to read."""
    context: typer.Context | None = getattr(error, "ctx", None)
    message = error.format_message() if hasattr(error, "format_message") else str(error)
    return InputError(message, hint=f"{context.command_path if context else 'spill'} --help")


def _version(wanted: bool) -> None:
    if wanted:
        print(f"spillover {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def root(
    ctx: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """LLM post-training work that no interruption can take away."""
    if ctx.invoked_subcommand is None:
        print(ctx.get_help())
