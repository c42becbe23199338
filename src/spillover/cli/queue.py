"""``spill queue``: serving a queue, looking at it, and dealing with what failed."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from spillover.cli import queue_lines as lines
from spillover.cli.answers import answer
from spillover.cli.progress import counting
from spillover.errors import InputError, LockContended

if TYPE_CHECKING:
    from spillover.queue import Client, Coordinator

__all__ = ["app"]

LEASE = 300.0
"""Seconds of a lease, where nothing else is said; as in `spillover.queue`."""
KEEP = 0
"""A bound that stays as it is."""
Target = Annotated[str, typer.Argument(metavar="POOL|URL", help="The pool's folder, or http://HOST:PORT.")]
Queue = Annotated[str, typer.Option("--queue", metavar="NAME", help="Which queue.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON document.")]

app = typer.Typer(
    rich_markup_mode=None,
    help="Serve durable tasks over a pool, and look at them.",
    epilog="The token of a served queue is read from SPILL_QUEUE_TOKEN.",
)


@app.callback(invoke_without_command=True)
def root(ctx: typer.Context) -> None:
    """Serve durable tasks over a pool, and look at them."""
    if ctx.invoked_subcommand is None:
        print(ctx.get_help())


@app.command()
def serve(
    pool: Annotated[Path, typer.Argument(metavar="POOL", help="The pool's folder; made if there is none.")],
    host: Annotated[str, typer.Option(metavar="ADDRESS")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one.")] = 7733,
    queue: Annotated[list[str] | None, typer.Option(metavar="NAME", help="Make this queue.")] = None,
    lease: Annotated[float, typer.Option(metavar="SECONDS", help="How long a lease lasts.")] = 300.0,
    standby: Annotated[bool, typer.Option("--standby", help="Wait until the present one dies.")] = False,
    gc: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Collect and compact the pool this often.")
    ] = None,
    max_unfinished: Annotated[
        str | None, typer.Option(metavar="N|none", help="Most tasks pending or leased in these queues.")
    ] = None,
    max_undelivered: Annotated[
        str | None, typer.Option(metavar="N|none", help="Most results that no consumer acknowledged yet.")
    ] = None,
    max_waiting: Annotated[int, typer.Option(metavar="N", help="Most calls that may wait.")] = 1024,
) -> None:
    """Coordinate the queues of a pool over HTTP, until SIGTERM."""
    bounds = (_bound("--max-unfinished", max_unfinished), _bound("--max-undelivered", max_undelivered))
    if max_waiting < 1:
        raise InputError(f"--max-waiting {max_waiting} lets nobody in", hint="--max-waiting 1024")
    with contextlib.suppress(ImportError):
        import uvicorn  # noqa: F401
    if "uvicorn" not in sys.modules:
        raise InputError("serving needs two more packages", hint='pip install "spillover[serve]"')
    if host not in ("127.0.0.1", "localhost", "::1") and not os.environ.get("SPILL_QUEUE_TOKEN"):
        raise InputError(f"{host} is open to others", hint="set SPILL_QUEUE_TOKEN first")
    from spillover.queue import Client
    from spillover.queue.server import serve as run

    with (
        _coordinating(pool, lease, standby=standby, max_waiting=max_waiting) as coordinator,
        _collecting(coordinator, gc),
    ):
        for name in queue or ["default"]:
            client = Client(coordinator, name)
            client.create()
            _limit(client, *bounds)
        generation = coordinator.owners.generation
        run(
            coordinator,
            host=host,
            port=port,
            token=os.environ.get("SPILL_QUEUE_TOKEN"),
            ready=lambda taken: print(
                f"serving {pool} at http://{host}:{taken}, generation {generation}", flush=True
            ),
        )


@app.command()
def stats(target: Target, queue: Queue = "default", json: Json = False) -> None:
    """Say how many tasks are pending, leased, completed, dead and cancelled."""
    with _client(target, queue) as client:
        found = client.stats()
    answer(found, json, lambda: lines.of_stats(found))


@app.command("ls")
def list_(
    target: Target,
    queue: Queue = "default",
    status: Annotated[str | None, typer.Option(metavar="STATUS", help="Only tasks of this status.")] = None,
    limit: Annotated[int, typer.Option(help="At most so many.")] = 100,
    json: Json = False,
) -> None:
    """List tasks, oldest first."""
    with _client(target, queue) as client:
        found = client.tasks(status, limit=limit)
    answer(found, json, lambda: lines.of_tasks(found, limit))


@app.command()
def show(
    target: Target,
    task: Annotated[str, typer.Argument(metavar="TASK")],
    queue: Queue = "default",
    json: Json = False,
) -> None:
    """Say everything about one task."""
    with _client(target, queue) as client:
        found = client.task(task)
    if found is None:
        raise InputError(
            f"queue {queue!r} has no task {task!r}", hint=f"spill queue ls {target} --queue {queue}"
        )
    answer(found, json, lambda: lines.of_task(found))


@app.command()
def limit(
    target: Target,
    queue: Queue = "default",
    unfinished: Annotated[
        str | None, typer.Option(metavar="N|none", help="Most tasks pending or leased.")
    ] = None,
    undelivered: Annotated[
        str | None, typer.Option(metavar="N|none", help="Most results that no consumer acknowledged yet.")
    ] = None,
    json: Json = False,
) -> None:
    """Bound how much a queue may hold. Submissions beyond it are refused, or no more tasks handed out."""
    bounds = (_bound("--unfinished", unfinished), _bound("--undelivered", undelivered))
    if bounds == (KEEP, KEEP):
        raise InputError("say which bound", hint="spill queue limit --help")
    with _client(target, queue) as client:
        _limit(client, *bounds)
        found = client.stats()
    answer(found, json, lambda: lines.of_stats(found))


@app.command()
def dead(target: Target, queue: Queue = "default", json: Json = False) -> None:
    """List the tasks that failed for good, and why."""
    with _client(target, queue) as client:
        found = client.tasks("dead", limit=1000)
    answer(found, json, lambda: lines.of_dead(found, target, queue))


@app.command()
def retry(
    target: Target,
    tasks: Annotated[list[str] | None, typer.Argument(metavar="[TASK]...")] = None,
    queue: Queue = "default",
    every: Annotated[bool, typer.Option("--all", help="All dead tasks.")] = False,
    json: Json = False,
) -> None:
    """Make dead tasks pending again."""
    if bool(tasks) == every:
        raise InputError("name the tasks, or say --all", hint="spill queue retry --help")
    with _client(target, queue) as client:
        count = 0
        if tasks:
            count = client.retry(tasks)
        while every and (page := client.tasks("dead", limit=1000)):
            count += client.retry([task.id for task in page])
    answer({"retried": count}, json, lambda: [f"{count} tasks are pending again"])


@app.command()
def top(
    target: Target,
    queue: Queue = "default",
    seconds: Annotated[float, typer.Option(metavar="SECONDS", help="Look this often.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Look twice, print and end.")] = False,
) -> None:
    """Watch a queue: what is pending, leased and accepted, and how fast."""
    with _client(target, queue) as client:
        shown = lines.Top()
        shown.look(client.stats(), time.monotonic())
        if once or not sys.stdout.isatty():
            time.sleep(seconds)
            shown.look(client.stats(), time.monotonic())
            print("\n".join(shown.text()))
            return
        from rich.live import Live
        from rich.text import Text

        with contextlib.suppress(KeyboardInterrupt), Live(auto_refresh=False, screen=False) as live:
            while True:
                live.update(Text("\n".join(shown.text())), refresh=True)
                time.sleep(seconds)
                shown.look(client.stats(), time.monotonic())


@app.command()
def verify(
    pool: Annotated[Path, typer.Argument(metavar="POOL", help="The pool's folder.")], json: Json = False
) -> int:
    """Check that the tables of all queues agree and every payload is there. Exits 1 if not."""
    from spillover.queue.audit import audit

    with (
        _coordinating(pool, LEASE, create=False) as coordinator,
        counting("verify", "payloads", silent=json) as report,
    ):
        found = audit(coordinator, lambda done, total: report(done, total, ""))
    answer(found, json, lambda: lines.of_audit(found))
    return 1 if found.problems else 0


@app.command()
def export(
    target: Target,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A new file, JSON lines.")],
    queue: Queue = "default",
    json: Json = False,
) -> None:
    """Write all tasks of a queue, and its accepted log, as JSON lines."""
    import msgspec

    if file.exists():
        raise InputError(f"{file} exists", hint="choose another name, or delete it")
    count, partial = 0, file.with_name(f".{file.name}.part")
    try:
        with _client(target, queue) as client, partial.open("wb") as out:
            for kind, entry in _everything(client):
                out.write(msgspec.json.encode({"kind": kind} | msgspec.to_builtins(entry)) + b"\n")
                count += 1
            out.flush()
            os.fsync(out.fileno())
        partial.rename(file)
    finally:
        partial.unlink(missing_ok=True)
    answer({"lines": count, "file": str(file)}, json, lambda: [f"{count} lines written to {file}"])


def _everything(client: Client) -> Iterator[tuple[str, Any]]:
    after = 0
    while page := client.tasks(after=after, limit=1000):
        yield from (("task", task) for task in page)
        after = page[-1].number
    start = 0
    while receipts := client.log(start, 1000):
        yield from (("accepted", receipt) for receipt in receipts)
        start = receipts[-1].position + 1


def _bound(option: str, text: str | None) -> int | None:
    """A bound as it was typed; None for none, `KEEP` where nothing was.

    Raises:
        InputError: it is no bound.
    """
    if text is None:
        return KEEP
    if text.lower() == "none":
        return None
    if not text.isdecimal() or not 0 < int(text) < 1 << 63:
        raise InputError(f"{option} {text} is no bound", hint=f"{option} 10000, or {option} none")
    return int(text)


def _limit(client: Client, unfinished: int | None, undelivered: int | None) -> None:
    """Set the bounds of a queue that are not to be kept."""
    now = client.stats()
    wanted = (
        now.max_unfinished if unfinished == KEEP else unfinished,
        now.max_undelivered if undelivered == KEEP else undelivered,
    )
    if wanted != (now.max_unfinished, now.max_undelivered):
        client.limit(unfinished=wanted[0], undelivered=wanted[1])


@contextlib.contextmanager
def _client(target: str, queue: str) -> Iterator[Client]:
    """A client of a served queue, or of a pool that nobody serves at the moment."""
    from spillover.queue import Client

    if target.startswith("http://"):
        with Client(target, queue, token=os.environ.get("SPILL_QUEUE_TOKEN"), timeout=10) as client:
            yield client
        return
    with _coordinating(Path(target), LEASE, create=False) as coordinator:
        yield Client(coordinator, queue)


@contextlib.contextmanager
def _coordinating(
    path: Path, lease: float, *, standby: bool = False, create: bool = True, max_waiting: int = 1024
) -> Iterator[Coordinator]:
    from spillover.pool import Pool
    from spillover.queue import Coordinator

    with Pool.open(path, create=create) as pool:
        if standby:
            from spillover.queue.standby import standby as wait

            coordinator = wait(pool, lease_seconds=lease, max_waiting=max_waiting)
        else:
            try:
                coordinator = Coordinator(pool, lease_seconds=lease, max_waiting=max_waiting)
            except LockContended as error:
                raise LockContended(
                    str(error), hint="name its address, http://HOST:PORT, or wait with serve --standby"
                ) from None
        with coordinator:
            yield coordinator


@contextlib.contextmanager
def _collecting(coordinator: Coordinator, seconds: float | None) -> Iterator[None]:
    """Collect and compact every so often while the block runs. What fails ends the process."""
    over = threading.Event()

    def collect() -> None:
        while seconds is not None and not over.wait(seconds):
            try:
                coordinator.owners.collect()
                coordinator.owners.compact()
            except Exception as error:
                print(f"spill: collection failed: {error}", file=sys.stderr, flush=True)
                os.kill(os.getpid(), signal.SIGTERM)
                return

    thread = threading.Thread(target=collect, name="collection", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
