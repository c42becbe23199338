"""One owner at a time, fenced by a generation.

Guarantee: at most one generation can publish. Taking over never waits for the old owner's consent and
never trusts a clock: it installs a document with the next generation, and the old owner's next
transition, however late it comes, is compared with the newest document and refused.

Who may try:

- Where the store has locks (a local disk), an owner holds an flock on ``owners/<id>`` for its whole
  life. If a challenger can take that lock the owner is dead, and takeover is immediate.
- Where it has none (an object store), a challenger watches the document. If its revision stands still
  for ``lease_seconds`` of the challenger's own monotonic clock, the owner is silent. A live owner
  renews every third of that.
- ``takeover`` skips the question. That is safe, since fencing and not waiting protects the state.

A write whose answer was lost is settled by reading: the document, or its history, carries the random
``attempt`` of every recent write. Retrying replaces the same version, so that a delayed first write
and its retry can never both take effect.
"""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from spillover.errors import (
    LockContended,
    Lost,
    NotFound,
    Retry,
    SpillError,
    StoreError,
    Superseded,
    Unknown,
)
from spillover.state import control as transitions
from spillover.state.control import Control, Identity, Owner, Reference
from spillover.state.payload import Payload, PayloadWriter, continue_before, open_payload
from spillover.state.retention import Reach, sweep_orphans
from spillover.store import PROBE, Hold, Store, probe

__all__ = ["LEASE_SECONDS", "Owned", "State"]

CONTROL = "control.json"
OWNERS = "owners"
LEASE_SECONDS = 60.0
LOOK_SECONDS = 2.0
"""How often a challenger, and an owner without renewals, looks at the document."""

Waiting = Callable[[Owner, float], None]
"""Told at every look who owns the work and how many more seconds its silence will be watched.

May raise to give up waiting; nothing was changed then.
"""


class State:
    """The durable state of one piece of work, at the root of ``store``."""

    def __init__(self, store: Store, *, lease_seconds: float = LEASE_SECONDS) -> None:
        self.store = store
        self.lease_seconds = lease_seconds

    def read(self) -> Control | None:
        """The newest document, or None if no work was ever started here."""
        try:
            return transitions.decode(self.store.read(CONTROL).data, self._where)
        except NotFound:
            return None

    def acquire(self, identity: Identity, *, takeover: bool = False, waiting: Waiting | None = None) -> Owned:
        """Own the work described by ``identity``, creating the state if there is none.

        Raises:
            Mismatch: the state belongs to other work.
            LockContended: a live process owns it; the message names host and process.
            NotAllowed: the work is completed, or was moved elsewhere.
            StoreRefused: the location cannot hold owned state.
        """
        self.store.require_safe()
        self._create_if_absent(identity)
        me = Owner(secrets.token_hex(6), socket.gethostname(), os.getpid())
        hold = self.store.hold(_lock_key(me))
        try:
            return self._acquire(me, hold, identity, takeover, waiting)
        except BaseException:
            if hold is not None:
                hold.release()
            raise

    def quiesce(self, reason: str) -> None:
        """Ask the running owner to stop at its next boundary."""
        Writer(self.store).install(lambda now: transitions.quiesced(now, socket.gethostname(), reason))

    def open(self, reference: Reference) -> Payload:
        """Return the payload at ``reference`` after checking its manifest."""
        return open_payload(self.store, reference, self._remedy)

    def _remedy(self) -> str:
        """What to do about a damaged payload: work that is completed does not continue from an older one."""
        with contextlib.suppress(SpillError):
            document = self.read()
            if document is not None and document.status == "completed":
                return f"delete {self.store.uri} to have it computed again"
        return continue_before()

    @property
    def _where(self) -> str:
        return f"{self.store.uri}/{CONTROL}"

    def _create_if_absent(self, identity: Identity) -> None:
        recorded = self.read()
        if recorded is None:
            self._probe()
            recorded = self._create(identity)
        transitions.same_work(recorded.identity, identity)

    def _probe(self) -> None:
        """Test the store, unless somebody else has already begun there and may have swept the probe away."""
        try:
            probe(self.store)
        except StoreError:
            if self.read() is None:
                raise

    def _create(self, identity: Identity) -> Control:
        """Create the document, or return the one that somebody else just created."""
        document = transitions.created(identity, self.lease_seconds, socket.gethostname())
        for pause in _pauses(self.lease_seconds):
            try:
                self.store.create(CONTROL, transitions.encode(document))
            except (Lost, Retry, Unknown):
                recorded = self.read()
                if recorded is None:
                    time.sleep(pause)
                    continue
                return recorded
            return document
        raise StoreError(f"{self._where} could not be created", hint="check the store and try again")

    def _acquire(
        self, me: Owner, hold: Hold | None, identity: Identity, takeover: bool, waiting: Waiting | None
    ) -> Owned:
        writer = Writer(self.store)
        acquired = partial(transitions.acquired, me=me, lease_seconds=self.lease_seconds)
        while True:
            document = writer.read()
            transitions.same_work(document.identity, identity)
            silent = None
            if document.status == "running" and document.owner is not None and not takeover:
                silent = self._judge(document, document.owner, hold is not None, waiting)
            try:
                writer.install(partial(acquired, dead=document.owner, silent=silent))
            except Superseded:  # somebody else moved first: judge them
                continue
            return Owned(self.store, writer, me, hold, self.lease_seconds)

    def _judge(self, document: Control, owner: Owner, locks: bool, waiting: Waiting | None) -> int | None:
        """Return once ``owner`` may be replaced: None if it is dead, the revision it was silent at if not.

        Raises:
            LockContended: it is alive.
        """
        hint = "wait for it, stop it there, or pass --takeover to fence it off"
        alive = f"this work is owned by process {owner.pid} on {owner.host}, which is alive"
        if locks:
            try:
                if (hold := self.store.hold(_lock_key(owner))) is not None:
                    hold.release()
                return None
            except LockContended:
                raise LockContended(alive, hint=hint) from None
        since, pulse = time.monotonic(), 0
        while (silence := time.monotonic() - since) < document.lease_seconds:
            if waiting is not None:
                waiting(owner, document.lease_seconds - silence)
            time.sleep(min(LOOK_SECONDS, document.lease_seconds / 10))
            now = self.read()
            if now is None or now.owner != owner or now.status != "running":
                break  # it ended or changed hands: the caller looks again
            if now.revision != document.revision:
                # One change may be the last request of a dying owner, still on its way; two are a pulse.
                pulse += now.history[-1].transition != "quiesce"
                if pulse == 2:
                    raise LockContended(alive, hint=hint)
                document, since = now, time.monotonic()
        return document.revision


class Writer:
    """Installs transitions of one control object, one at a time, and settles lost answers."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.document: Control | None = None
        self._version = ""
        self._lock = threading.RLock()

    def read(self) -> Control:
        """Read the newest document."""
        with self._lock:
            blob = self.store.read(CONTROL)
            self.document = transitions.decode(blob.data, f"{self.store.uri}/{CONTROL}")
            self._version = blob.version
            return self.document

    def install(self, change: Callable[[Control], Control], *, deadline: float = LEASE_SECONDS) -> Control:
        """Apply ``change`` to the newest document and install the result.

        ``change`` runs again on every newer document that is met, so that it never overwrites what
        somebody else decided meanwhile.

        Raises:
            StateError: ``change`` refused the newest document.
            StoreError: no clear answer within ``deadline`` seconds.
        """
        attempts: set[str] = set()
        with self._lock:
            document = self.document or self.read()
            for pause in _pauses(deadline):
                following = change(document)
                attempts.add(following.attempt)
                try:
                    self._version = self.store.replace(CONTROL, transitions.encode(following), self._version)
                    self.document = following
                    return following
                except Lost:
                    pass
                except (Retry, Unknown):
                    time.sleep(pause)
                document = self._read_again(document)
                if document.wrote(attempts):
                    return document
        raise StoreError(f"{self.store.uri}/{CONTROL} gave no clear answer for {deadline:.0f} s")

    def _read_again(self, before: Control) -> Control:
        try:
            return self.read()
        except StoreError:  # the store is still troubled: the loop's next try pauses and reads again
            return before


class Owned:
    """The work, owned by this process. A context manager: leaving it releases the work.

    Attributes:
        generation: this owner's fencing token.
    """

    def __init__(
        self, store: Store, writer: Writer, me: Owner, hold: Hold | None, lease_seconds: float
    ) -> None:
        self.store = store
        self.me = me
        self._writer = writer
        self._hold = hold
        self._lease = lease_seconds
        self.generation = self.document.generation
        self._sequence = self.document.sequence
        self._reach = Reach(store)
        self._lost: Superseded | None = None
        self._renewed = self._looked = time.monotonic()
        self._over = threading.Event()
        with contextlib.suppress(StoreError):  # leftovers are not worth failing for
            store.sweep()
            sweep_orphans(store, self.document, self.generation)
            _sweep_locks(store)
            for entry in store.list(PROBE):  # of a process that died while it tested the store
                store.delete(entry.key)
        if hold is None:
            threading.Thread(target=self._keep_renewing, name="lease", daemon=True).start()

    @property
    def document(self) -> Control:
        """The newest document that this owner has seen."""
        return self._writer.document or self._writer.read()

    def open(self, reference: Reference) -> Payload:
        """Return the payload at ``reference`` after checking its manifest."""
        return open_payload(self.store, reference)

    def payload(self, kind: str, label: str) -> PayloadWriter:
        """Begin a payload that only this generation can publish."""
        self._sequence += 1
        return PayloadWriter(self.store, kind, label, self.generation, self._sequence)

    def publish(
        self, name: str, reference: Reference, progress: dict[str, Any], *, basis: Reference | None = None
    ) -> None:
        """Make a committed payload current, then drop what fell out of reach.

        Args:
            basis: the payload that it continues from, kept beside it; None means what is current now.

        Raises:
            Superseded: a newer generation owns the work; nothing changed.
        """
        before = self.document
        basis = basis or before.current.get(name)
        change = partial(
            transitions.published,
            me=self.me,
            generation=self.generation,
            name=name,
            reference=reference,
            basis=basis,
            progress=progress,
        )
        after = self._install(change)
        with contextlib.suppress(StoreError):  # a leftover is swept by the next owner
            self._reach.drop(before, after)

    def check(self) -> None:
        """Return if this process may go on computing.

        An owner that woke from a long pause first shows that nobody took over.

        Raises:
            Superseded: a newer generation owns the work, or nothing was heard for a whole lease.
        """
        if self._lost is not None:
            raise self._lost
        self._look()
        transitions.require_owner(self.document, self.me, self.generation)
        if self._hold is None and time.monotonic() - self._renewed > self._lease:
            try:
                self._renew()
            except StoreError as error:
                raise Superseded(
                    f"ownership could not be renewed for {self._lease:.0f} s: {error}"
                ) from error

    @property
    def stop_requested(self) -> str | None:
        """Why somebody asked this owner to stop at its next boundary, if somebody did."""
        self._look()
        quiesce = self.document.quiesce
        return f"{quiesce.reason} (asked from {quiesce.by})" if quiesce else None

    def complete(self, progress: dict[str, Any] | None = None) -> None:
        """End the work: it is read-only from here."""
        self._install(lambda now: transitions.completed(now, self.me, self.generation, progress or {}))
        self._end()

    def release(self) -> None:
        """Give the work up so that anybody can continue at once; safe to call twice."""
        if not self._over.is_set():
            with contextlib.suppress(Superseded, StoreError):  # then somebody else has it, or will in a lease
                self._install(lambda now: transitions.released(now, self.me, self.generation))
            self._end()

    def __enter__(self) -> Owned:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()

    def _end(self) -> None:
        self._over.set()
        if self._hold is not None:
            self._hold.release()

    def _install(self, change: Callable[[Control], Control]) -> Control:
        before = time.monotonic()
        document = self._writer.install(change, deadline=self._lease)
        self._renewed = before
        return document

    def _renew(self) -> None:
        self._install(lambda now: transitions.renewed(now, self.me, self.generation))

    def _look(self) -> None:
        """Now and then read the document, where no renewal does: somebody may have fenced us off."""
        if self._hold is not None and time.monotonic() - self._looked > LOOK_SECONDS:
            self._looked = time.monotonic()
            with contextlib.suppress(StoreError):
                self._writer.read()

    def _keep_renewing(self) -> None:
        """Renew every third of the lease until the work ends or is lost."""
        pause = self._lease / 3
        while not self._over.wait(pause):
            try:
                self._renew()
                pause = self._lease / 3
            except Superseded as error:
                self._lost = error
                return
            except StoreError:
                pause = min(1.0, self._lease / 10)


def _lock_key(owner: Owner) -> str:
    return f"{OWNERS}/{owner.id}"


def _sweep_locks(store: Store) -> None:
    """Remove lock files of dead processes: those whose lock can be taken."""
    for entry in store.list(f"{OWNERS}/"):
        with contextlib.suppress(LockContended):
            if (hold := store.hold(entry.key)) is not None:
                hold.release()


def _pauses(deadline: float) -> Iterator[float]:
    """Yield growing, jittered pauses in seconds until ``deadline`` seconds have passed."""
    end = time.monotonic() + deadline
    pause = 0.02
    while True:
        yield pause * (0.5 + random.random())
        if time.monotonic() > end:
            return
        pause = min(2.0, pause * 2)
