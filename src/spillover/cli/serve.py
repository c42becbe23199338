"""``spill serve``: a model behind the OpenAI API."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from socket import socket
from typing import TYPE_CHECKING, Annotated

import typer

from spillover.cli.jobs import (
    Device,
    EngineName,
    Headless,
    Memory,
    NumericsName,
    PlacementName,
    Quiet,
    Weights,
    is_headless,
)
from spillover.errors import InputError, SpillError

if TYPE_CHECKING:
    from spillover.jobs.events import Event
    from spillover.jobs.job import JobOptions
    from spillover.serve.service import ServeSettings

__all__ = ["serve"]

LOCAL = ("127.0.0.1", "localhost", "::1")


def serve(
    model: Annotated[
        str, typer.Argument(help="A tag, org/name[@revision] or a folder; +NAME adds an adapter.")
    ],
    host: Annotated[str, typer.Option(metavar="ADDRESS")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one.")] = 8000,
    token: Annotated[str | None, typer.Option(help="What clients must show; or in SPILL_TOKEN.")] = None,
    token_file: Annotated[Path | None, typer.Option(help="Read the token from here.")] = None,
    batch: Annotated[int, typer.Option(help="Most rows at a time; memory may allow fewer.")] = 64,
    queue: Annotated[int, typer.Option(help="Most rows that may wait.")] = 256,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of an answer, unless the request says.")] = 256,
    context: Annotated[int, typer.Option(help="Most tokens of a prompt and its answer.")] = 4096,
    grace: Annotated[float, typer.Option(help="Seconds to finish in after SIGTERM.")] = 30.0,
    state: Annotated[Path | None, typer.Option(help="Folder of files and batches.", metavar="FOLDER")] = None,
    weights: Weights = None,
    engine: EngineName = "torch",
    device: Device = None,
    numerics: NumericsName = None,
    memory: Memory = None,
    placement: PlacementName = None,
    headless: Headless = None,
    quiet: Quiet = False,
) -> None:
    """Answer over the OpenAI API: chat completions, completions, files and batches, until SIGTERM.

    The model and each adapter are served by name, as MODEL and MODEL+NAME, in the same passes. A batch that
    was accepted continues when the server is started again on the same folder.
    """
    with contextlib.suppress(ImportError):
        import python_multipart  # noqa: F401
        import uvicorn  # noqa: F401
    if "uvicorn" not in sys.modules:
        raise InputError("serving needs a few more packages", hint='pip install "spillover[serve]"')
    secret = _token(token, token_file)
    if host not in LOCAL and secret is None:
        raise InputError(f"{host} is open to others", hint="set SPILL_TOKEN first")
    from spillover.http.serving import bind
    from spillover.jobs.job import JobOptions
    from spillover.models import home
    from spillover.serve.server import alone
    from spillover.serve.service import ServeSettings, state_folder

    settings = ServeSettings(model, batch, queue, max_tokens, context, grace)
    options = JobOptions(
        weights=weights,
        engine=engine,
        device=device,
        numerics=numerics,
        memory=memory,
        placement=placement,
    )
    told = (is_headless(headless), quiet)
    folder = state or state_folder(home(), model)
    with bind(host, port) as bound, alone(folder):  # before anything takes long
        _serve(settings, options, bound, host, folder, secret, *told)


def _serve(
    settings: ServeSettings,
    options: JobOptions,
    bound: socket,
    host: str,
    folder: Path,
    token: str | None,
    headless: bool,
    quiet: bool,
) -> None:
    from spillover.cli.terminal import Headless as Lines
    from spillover.cli.terminal import display
    from spillover.jobs.events import Events
    from spillover.serve.server import serve as run
    from spillover.serve.service import open_service

    with display("serve", headless=headless, quiet=quiet) as shown:  # a model may have to be fetched
        service = open_service(settings, options, Events("serve", shown.show))
    lines = Lines(quiet)
    events = Events("serve", lines.show if headless else _say)
    events.engine = service.plan.engine

    def ready(port: int) -> None:
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"
        message = service.line(url, str(folder))
        events.emit("start", message=message, url=url, state=str(folder), models=[*service.names])

    try:
        run(service, folder, bound, token=token, ready=ready)
    except SpillError as error:
        events.emit("error", message=str(error), hint=error.hint)
        raise
    message = f"done: {sum(service.requests.values()):,} requests answered"
    events.emit("done", message=message, complete=True, seconds=events.seconds)


def _say(event: Event) -> None:
    if event["event"] in ("start", "done"):
        print(event["message"], flush=True)


def _token(token: str | None, file: Path | None) -> str | None:
    """What clients must show: as given, from a file, or from the environment.

    Raises:
        InputError: the file cannot be read, or there is nothing in it.
    """
    if file is None:
        return token or os.environ.get("SPILL_TOKEN") or None
    try:
        found = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise InputError(f"{file}: {reason}", hint="--token-file FILE") from None
    if token is not None or not found:
        what = "--token and --token-file are both given" if token is not None else f"{file} is empty"
        raise InputError(what, hint="spill serve --help")
    return found
