"""``spill status``, ``spill runs`` and ``spill tail``: looking at work without touching it."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from spillover.errors import InputError, SpillError

if TYPE_CHECKING:
    from spillover.jobs.runs import Manifest
    from spillover.state import Control

__all__ = ["runs", "status", "stop", "tail"]

POLL_SECONDS = 0.5


def status(
    what: Annotated[
        str | None, typer.Argument(metavar="RUN|URI", help="A run or a state; the newest run.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="The control object as it is.")] = False,
) -> None:
    """Say where some work stands: who owns it, how far it is, what is durable."""
    from spillover.state import State
    from spillover.store import open_store

    uri, run = _state_uri(what)
    document = State(open_store(uri)).read()
    if document is None:
        raise InputError(f"nothing was ever started at {uri}", hint="spill runs")
    if json:
        from spillover.state.control import encode

        print(encode(document).decode())
        return
    for line in _status_lines(document, uri):
        print(line)
    if run is not None:
        print(f"next: spill report {run}")


def stop(
    what: Annotated[
        str | None, typer.Argument(metavar="RUN|URI", help="A run or a state; the newest run.")
    ] = None,
    reason: Annotated[str, typer.Option(help="Shown to the owner.")] = "asked to stop",
) -> None:
    """Ask whoever works on something to stop at the next boundary, with everything durable."""
    from spillover.state import State
    from spillover.store import open_store

    uri, _ = _state_uri(what)
    State(open_store(uri)).quiesce(reason)
    print(f"asked: the owner of {uri} stops after its present step or row")


def runs(limit: Annotated[int, typer.Option(help="How many, newest first.")] = 20) -> None:
    """List the runs of this folder."""
    from spillover.jobs.runs import list_runs

    found = list_runs()
    if not found:
        print("no runs here yet\nnext: spill run demo sample")
    for run in found[:limit]:
        if (manifest := run.manifest()) is not None:
            print(f"{run.id:44} {_state_of(manifest):10} {_when(manifest.started)}  {_progress_of(manifest)}")
    if found and sys.stdout.isatty():
        print("next: spill report RUN")


def tail(
    run: Annotated[
        str | None, typer.Argument(metavar="RUN", help="A run; the newest when not given.")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Wait for more until the run ends.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", help="How many events to begin with.")] = 10,
) -> None:
    """Show the last events of a run, and follow it."""
    from spillover.jobs.runs import find_run

    found = find_run(run)
    events = [*found.events()]
    for event in events[-lines:]:
        print(_event_line(event))
    seen = len(events)
    while follow and not (events and events[-1]["event"] in ("done", "preempted", "error")):
        time.sleep(POLL_SECONDS)
        events = [*found.events()]
        for event in events[seen:]:
            print(_event_line(event), flush=True)
        seen = len(events)


def _state_uri(what: str | None) -> tuple[str, str | None]:
    """The state that a run's name, a path or a URI stands for, and the run if it is one's to report on."""
    from spillover.jobs.runs import find_run

    if what is not None and ("://" in what or (Path(what) / "control.json").exists()):
        return what, None
    run = find_run(what)
    manifest = run.manifest()
    if manifest is None:
        raise InputError(
            f"{run.folder}/manifest.json cannot be read", hint="name the state: spill status URI"
        )
    return manifest.state, run.id if run.has_course else None


def _status_lines(document: Control, uri: str) -> list[str]:
    progress = ", ".join(f"{key} {_shown(value)}" for key, value in document.progress.items())
    lines = [
        f"{document.identity.get('command', 'work')} at {uri}: {document.status}, "
        f"generation {document.generation}, revision {document.revision}",
        f"progress: {progress or 'nothing is durable yet'}",
    ]
    if document.owner is not None:
        lines.append(f"owner: process {document.owner.pid} on {document.owner.host}")
    if document.quiesce is not None:
        lines.append(f"asked to stop by {document.quiesce.by}: {document.quiesce.reason}")
    for name, reference in document.current.items():
        lines.append(f"current {name}: {reference.folder}, {reference.bytes / 1e6:,.1f} MB")
    last = document.history[-1]
    lines.append(f"last change: {last.transition} from {last.host}, {_when(last.at)}")
    return lines


def _state_of(manifest: Manifest) -> str:
    """The status on record; a run whose process died still says running, which the state knows better."""
    from spillover.state import State
    from spillover.store import open_store

    if manifest.status != "running":
        return manifest.status
    try:
        document = State(open_store(manifest.state)).read()
    except SpillError:  # out of reach or damaged: one run must not hide the others
        return manifest.status
    return document.status if document else "empty"


def _progress_of(manifest: Manifest) -> str:
    facts = manifest.facts
    return f"{facts.get('model', '')}, {facts.get('rows', 0):,} rows"


def _event_line(event: dict[str, Any]) -> str:
    clock = time.strftime("%H:%M:%S", time.localtime(event["time"]))
    kind = event["event"]
    if kind == "step":
        loss = "-" if event["loss"] is None else f"{event['loss']:.4f}"
        rest = f"step {event['step']} of {event['total']}  loss {loss}  lr {event['lr']:.2e}"
    elif kind == "row":
        rest = f"row {event['step']} of {event['total']}  {event['custom_id']}  {event['finish']}"
    else:
        rest = event.get("message") or ""
    return f"{clock} {kind:10} {rest}"


def _when(moment: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))


def _shown(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)
