"""What is served: a model with its adapters, the loop that computes, and who may ask for how much."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias

from spillover.engine import Completion, Engine, Plan, Request, TokenLogprob, engine
from spillover.errors import InputError, SpillError
from spillover.jobs.events import Events
from spillover.jobs.job import JobOptions, reporter
from spillover.models import Adapter, LoraConfig, Model, StreamDecoder, Tokenizer, resolve
from spillover.models import adapters as adapter_folders
from spillover.serve.loop import EngineLoop
from spillover.serve.refusals import Refused

__all__ = ["News", "ServeSettings", "Service", "open_service", "state_folder"]

BODIES_BYTES = 128 << 20
"""Of the bodies of all requests that are being read or taken apart."""

BASE = -1
"""The adapter index of rows that wear none."""


@dataclass(frozen=True)
class ServeSettings:
    """What to serve and how much of it at once.

    Args:
        batch: most rows at a time; memory may allow fewer.
        queue: most rows that may wait for a slot.
        max_tokens: most tokens of an answer, unless the request says.
        context: most tokens of a prompt and its answer; the model may allow fewer.
        grace: seconds that requests under way have to end in.
    """

    model: str
    batch: int = 64
    queue: int = 256
    max_tokens: int = 256
    context: int = 4096
    grace: float = 30.0

    def __post_init__(self) -> None:
        limits = {
            "--batch": (self.batch, self.batch >= 1),
            "--queue": (self.queue, self.queue >= 0),
            "--max-tokens": (self.max_tokens, self.max_tokens >= 1),
            "--context": (self.context, self.context >= 2),
            "--grace": (self.grace, self.grace >= 0),
        }
        for flag, (value, allowed) in limits.items():
            if not allowed:
                raise InputError(f"{flag} {value} makes no sense", hint="spill serve --help")


Event: TypeAlias = "tuple[int, TokenLogprob | None] | Completion | SpillError"
News: TypeAlias = "tuple[int, Event]"
"""Of which row of a call, and what: a token with its likelihood, the whole, or why there is none."""


class Outbox:
    """Hands what the loop's thread has to say to the tasks that wait for it, one call a pass."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._news: list[tuple[asyncio.Queue[News], News]] = []

    def attach(self) -> None:
        """Deliver in the running event loop from now on."""
        self._loop = asyncio.get_running_loop()

    def put(self, queue: asyncio.Queue[News], news: News) -> None:
        self._news.append((queue, news))

    def flush(self) -> None:
        if self._news and self._loop is not None:
            news, self._news = self._news, []
            with contextlib.suppress(RuntimeError):  # the event loop has ended, and whoever waited in it
                self._loop.call_soon_threadsafe(_deliver, news)


def _deliver(news: list[tuple[asyncio.Queue[News], News]]) -> None:
    for queue, one in news:
        queue.put_nowait(one)


@dataclass
class _Row:
    """A row of a call as the loop tells of it. Tokens are passed on only to a call that streams."""

    place: int
    queue: asyncio.Queue[News]
    outbox: Outbox
    streams: bool

    def token(self, token: int, logprob: TokenLogprob | None) -> None:
        if self.streams:
            self.outbox.put(self.queue, (self.place, (token, logprob)))

    def done(self, completion: Completion) -> None:
        self.outbox.put(self.queue, (self.place, completion))

    def failed(self, error: SpillError) -> None:
        self.outbox.put(self.queue, (self.place, error))


@dataclass
class Service:
    """A model that answers. ``names`` are those it goes by, with the adapter of each."""

    settings: ServeSettings
    model: Model
    adapters: tuple[Adapter, ...]
    names: dict[str, int]
    tokenizer: Tokenizer
    engine: Engine
    plan: Plan
    outbox: Outbox = field(default_factory=Outbox)
    draining: bool = False
    rows: int = 0
    requests: dict[tuple[str, int], int] = field(default_factory=dict)
    """How many were answered, by path and status."""

    def __post_init__(self) -> None:
        self._body_bytes = 0
        loaded = self.engine.load(self.model, self.plan, self.adapters)
        self.loop = EngineLoop(loaded, stream=lambda: StreamDecoder(self.tokenizer), flush=self.outbox.flush)

    @property
    def base(self) -> str:
        """The name of the model without adapters."""
        return next(iter(self.names))

    def line(self, url: str, state: str) -> str:
        """The line before the work: what, how, where, how much at once."""
        parts = [
            f"serve {self.model.ref.spec} ({self.model.bytes / 1e6:,.0f} MB), {self.plan.why}",
            f"{self.plan.batch} rows at a time of up to {self.plan.sequence:,} tokens",
            f"at {url}",
            f"state at {state}",
        ]
        return "; ".join(parts)

    @property
    def context(self) -> int:
        """Most tokens of a prompt and its answer."""
        return self.plan.sequence

    def adapter_of(self, name: str) -> Adapter | None:
        """The adapter behind a name that is served."""
        number = self.names[name]
        return None if number == BASE else self.adapters[number]

    @contextlib.asynccontextmanager
    async def answering(
        self, requests: Sequence[Request], *, streams: bool
    ) -> AsyncIterator[asyncio.Queue[News]]:
        """Have rows answered while the block runs; those that are not done at its end are given up.

        Raises:
            Refused: too many wait.
        """
        self.outbox.attach()
        self.require_room(len(requests))
        self.rows += len(requests)
        queue: asyncio.Queue[News] = asyncio.Queue()
        numbers: set[str] = set()
        try:
            for place, request in enumerate(requests):
                numbers.add(self.loop.submit(request, _Row(place, queue, self.outbox, streams)))
            yield queue
        finally:
            self.rows -= len(requests)
            self.loop.cancel(numbers)

    def require_open(self) -> None:
        """Return if something may still be begun.

        Raises:
            Refused: the server is ending.
        """
        if self.draining:
            raise Refused(503, "the server is ending", code="shutting_down")

    def require_room(self, rows: int) -> None:
        """Return if so many answers may be begun.

        Raises:
            Refused: too many at once, or too many wait, or the server is ending.
        """
        self.require_open()
        most = self.loop.slots + self.settings.queue
        if rows > most:
            raise Refused(400, f"{rows} answers are asked for at once; at most {most} can be", param="n")
        if self.rows + rows > most:
            raise Refused(429, f"{self.rows} answers are under way or wait; try again", code="queue_full")

    @contextlib.contextmanager
    def bodies(self) -> Iterator[Callable[[int], None]]:
        """What to tell the size of each piece of a body, which counts until the block ends.

        Raises:
            Refused: the bodies of all requests together are too large.
        """
        held = 0

        def admit(size: int) -> None:
            nonlocal held
            held += size
            self._body_bytes += size
            if self._body_bytes > BODIES_BYTES:
                raise Refused(429, "bodies under way are too large together", code="queue_full")

        try:
            yield admit
        finally:
            self._body_bytes -= held


def open_service(settings: ServeSettings, options: JobOptions, events: Events) -> Service:
    """Resolve and plan what is to be served; the weights are read when its loop starts.

    Raises:
        InputError, ModelError, EngineError: something given cannot be used.
    """
    model = resolve(settings.model, weights=options.weights, report=reporter(events))
    names = model.ref.adapters
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise InputError(f"{settings.model} names {twice} twice", hint="name each adapter once")
    adapters = []
    for name in names:
        adapter = adapter_folders.load(name)
        adapter.check(model.config, fingerprint=model.fingerprint, name=name)
        adapters.append(adapter)
    served = {model.ref.base: BASE} | {f"{model.ref.base}+{name}": n for n, name in enumerate(names)}
    context = min(settings.context, model.config.max_positions)
    computing = engine(options.engine)
    work = options.asking("generate", settings.batch, context, _together(adapters))
    plan = computing.plan(model, work)
    events.engine = plan.engine
    return Service(settings, model, tuple(adapters), served, model.tokenizer(), computing, plan)


def _together(adapters: Sequence[Adapter]) -> LoraConfig | None:
    """An adapter as large as all of these, for the plan."""
    if not adapters:
        return None
    targets = dict.fromkeys(target for one in adapters for target in one.config.targets)
    return replace(adapters[0].config, rank=sum(one.config.rank for one in adapters), targets=tuple(targets))


def state_folder(home: Path, model: str) -> Path:
    """Where files and batches of a model are kept, unless ``--state`` says otherwise."""
    return home / "serve" / "".join(c if c.isalnum() or c in "._-" else "-" for c in model).strip("-.")
