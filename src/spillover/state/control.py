"""The control object: one small document that says who owns the work and what is current.

Every function here is pure. It takes the newest document, checks that the transition is allowed and
returns the next document, or raises. Nothing here reads a clock to decide anything; `Event.at` is for
people. Installing a document is `spillover.state.ownership`'s business, and succeeds only if nobody
installed another one since it was read.

    idle ──acquire──> running ──release──> idle
                      running ──complete─> completed          final, read-only for ever
                      running ──acquire──> running            takeover: generation + 1

The other statuses (``handoff``, ``transferred``, ``incoming``, ``bundled``) belong to moves between
places; work in one of them cannot be acquired.
"""

from __future__ import annotations

import secrets
import time
from typing import Any, Literal, TypeAlias

import msgspec
from msgspec.structs import replace

from spillover.errors import Corrupt, Mismatch, NotAllowed, Superseded

__all__ = [
    "Control",
    "Event",
    "Identity",
    "Owner",
    "Quiesce",
    "Reference",
    "Status",
    "acquired",
    "completed",
    "created",
    "decode",
    "encode",
    "published",
    "quiesced",
    "released",
    "renewed",
    "require_owner",
    "same_work",
]

SCHEMA = 1
HISTORY = 40

Status: TypeAlias = Literal["idle", "running", "completed", "handoff", "transferred", "incoming", "bundled"]
Identity: TypeAlias = dict[str, Any]
"""What the work is: field name to JSON value. Two documents with equal identities are the same work."""


class Owner(msgspec.Struct, frozen=True):
    """A process: random id, host name, process id on that host."""

    id: str
    host: str
    pid: int


class Reference(msgspec.Struct, frozen=True):
    """A payload: its folder, who wrote it, and the sha256 of its manifest.

    Args:
        folder: key of the payload's folder, without a trailing slash.
        kind: ``ckpt``, ``rows``, ...
        generation: fencing token of its writer.
        sequence: increases with every payload of this state.
        step: steps or rows that are done in it.
        bytes: size of its files together.
        commit: sha256 of its ``COMMIT``, which lists size and sha256 of every file.
    """

    folder: str
    kind: str
    generation: int
    sequence: int
    step: int
    bytes: int
    commit: str


class Event(msgspec.Struct, frozen=True):
    """One transition, as history remembers it; ``at`` is the writer's wall clock, for people only."""

    revision: int
    generation: int
    transition: str
    attempt: str
    host: str
    at: float


class Quiesce(msgspec.Struct, frozen=True):
    """Somebody's request that the owner stop at its next boundary."""

    by: str
    reason: str


class Control(msgspec.Struct, frozen=True):
    """The document at ``control.json``.

    ``revision`` grows with every transition, ``generation`` with every acquisition: it is the fencing
    token. ``attempt`` is random per write, so that a writer recognises its own document after a lost
    response. ``current`` maps a name to the payload that is current under it, ``previous`` to the one
    that it continued from.
    """

    identity: Identity
    lease_seconds: float
    attempt: str
    schema: int = SCHEMA
    revision: int = 0
    generation: int = 0
    owner: Owner | None = None
    status: Status = "idle"
    current: dict[str, Reference] = {}
    previous: dict[str, Reference] = {}
    progress: dict[str, Any] = {}
    quiesce: Quiesce | None = None
    handoff: dict[str, Any] | None = None
    history: tuple[Event, ...] = ()
    parent: dict[str, Any] | None = None

    @property
    def sequence(self) -> int:
        """The largest sequence of any current payload, 0 before the first."""
        return max((reference.sequence for reference in self.current.values()), default=0)

    def wrote(self, attempts: set[str]) -> bool:
        """Whether one of ``attempts`` led to this document or to one it came from."""
        return self.attempt in attempts or any(event.attempt in attempts for event in self.history)


def encode(control: Control) -> bytes:
    return msgspec.json.format(msgspec.json.encode(control), indent=1)


def decode(data: bytes, where: str) -> Control:
    """Parse a control object.

    Raises:
        Corrupt: not a control object, or one of a newer version.
    """
    try:
        schema = msgspec.json.decode(data, type=dict[str, Any]).get("schema")
        if isinstance(schema, int) and schema > SCHEMA:
            raise Corrupt(
                f"{where} was written by a newer spillover (schema {schema})", hint="upgrade spillover"
            )
        return msgspec.json.decode(data, type=Control)
    except msgspec.DecodeError as error:
        raise Corrupt(f"{where} is not a control object: {error}") from error


def created(
    identity: Identity, lease_seconds: float, host: str, parent: dict[str, Any] | None = None
) -> Control:
    """The first document: generation 0, idle."""
    start = Control(identity, lease_seconds, attempt="", revision=-1, parent=parent)
    return _next(start, "create", host)


def acquired(
    control: Control, me: Owner, dead: Owner | None, silent: int | None, lease_seconds: float
) -> Control:
    """Make ``me`` the owner under a new generation.

    Args:
        control: the newest document.
        me: the new owner.
        dead: the owner that is known to be dead or was silent, if one is on record.
        silent: the revision it was silent at; None when it is known to be dead.
        lease_seconds: how long ``me`` may be silent; challengers go by what is recorded.

    Raises:
        NotAllowed: the status forbids it.
        Superseded: another process acquired, or the owner moved, since ``dead`` was judged.
    """
    if control.status not in ("idle", "running"):
        raise NotAllowed(
            f"this work is {control.status} and cannot be continued here", hint="name another --state"
        )
    moved = silent is not None and control.revision != silent
    if control.status == "running" and (control.owner != dead or moved):
        raise Superseded("another process acquired the work first")
    return _next(
        control,
        "acquire",
        me.host,
        generation=control.generation + 1,
        owner=me,
        lease_seconds=lease_seconds,
        status="running",
        quiesce=None,
    )


def renewed(control: Control, me: Owner, generation: int) -> Control:
    """Show that the owner is alive."""
    require_owner(control, me, generation)
    return _next(control, "renew", me.host)


def published(
    control: Control,
    me: Owner,
    generation: int,
    name: str,
    reference: Reference,
    basis: Reference | None,
    progress: dict[str, Any],
) -> Control:
    """Make ``reference``, which continues from ``basis``, current under ``name``.

    Raises:
        Superseded: ``me`` is not the owner any more.
        NotAllowed: the payload is of another generation, or not newer than what is current.
    """
    require_owner(control, me, generation)
    current = control.current.get(name)
    if reference.generation != generation:
        raise NotAllowed(f"{reference.folder} was written under another generation")
    if current is not None and reference.sequence <= current.sequence:
        raise NotAllowed(f"{reference.folder} is not newer than {current.folder}")
    return _next(
        control,
        f"publish {name}",
        me.host,
        current={**control.current, name: reference},
        previous={**control.previous, name: basis} if basis else control.previous,
        progress={**control.progress, **progress},
    )


def released(control: Control, me: Owner, generation: int) -> Control:
    """Give the work up for somebody else to continue."""
    require_owner(control, me, generation)
    return _next(control, "release", me.host, owner=None, status="idle", quiesce=None)


def completed(control: Control, me: Owner, generation: int, progress: dict[str, Any]) -> Control:
    """End the work: read-only for ever."""
    require_owner(control, me, generation)
    return _next(
        control,
        "complete",
        me.host,
        owner=None,
        status="completed",
        quiesce=None,
        progress={**control.progress, **progress},
    )


def quiesced(control: Control, host: str, reason: str) -> Control:
    """Ask a running owner to stop at its next boundary; anybody may."""
    if control.status != "running":
        raise NotAllowed(f"nothing is running here: the work is {control.status}", hint="spill status")
    return _next(control, "quiesce", host, quiesce=Quiesce(host, reason))


def same_work(recorded: Identity, asked: Identity) -> None:
    """Refuse to continue work that differs.

    Raises:
        Mismatch: names the first field that differs and both values.
    """
    for field in [*asked, *(field for field in recorded if field not in asked)]:
        before, now = recorded.get(field), asked.get(field)
        if before != now:
            raise Mismatch(
                f"this state belongs to other work: {field.replace('_', ' ')} was {_shown(before)}, "
                f"now {_shown(now)}",
                hint="use the settings it was started with, or another --state",
            )


def require_owner(control: Control, me: Owner, generation: int) -> None:
    """Raise `Superseded` unless ``me`` owns the work under ``generation``."""
    if control.owner == me and control.generation == generation and control.status == "running":
        return
    by = (
        f"{control.owner.host} (process {control.owner.pid})"
        if control.owner
        else f"nobody ({control.status})"
    )
    raise Superseded(
        f"generation {generation} lost the work: generation {control.generation} is owned by {by}"
    )


def _next(control: Control, transition: str, host: str, **changes: Any) -> Control:
    """The document after ``transition``. Consecutive renewals share one place in the history."""
    after = replace(control, revision=control.revision + 1, attempt=secrets.token_hex(8), **changes)
    event = Event(after.revision, after.generation, transition, after.attempt, host, round(time.time(), 3))
    past = control.history
    if transition == "renew" and past and past[-1].transition == "renew":
        past = past[:-1]
    return replace(after, history=(*past, event)[-HISTORY:])


def _shown(value: Any) -> str:
    text = "unset" if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:28]}...{text[-12:]}"
