"""Every error that spillover raises on purpose.

::

    SpillError
    ├── InputError             a file, flag or row that the user gave is wrong
    ├── ModelError             a model or adapter is missing, damaged or unsupported
    ├── EngineError            the engine cannot do what was asked on this machine
    ├── StoreError             a store call failed
    │   ├── NotFound           the key does not exist
    │   ├── Lost               a conditional write found another version: somebody else won
    │   ├── Retry              the store asks to read again and retry (HTTP 409)
    │   ├── Unknown            no answer: the write may or may not have happened, or may happen later
    │   ├── StoreFull          no space or quota left
    │   └── StoreRefused       the location cannot hold owned state safely
    └── StateError             a transition of durable state was refused
        ├── LockContended      another live process owns the state
        ├── Superseded         a newer generation owns the state: this process must stop
        ├── NotAllowed         the state's status forbids the transition
        ├── Corrupt            bytes at rest do not match their manifest
        ├── Mismatch           the state belongs to different work
        ├── Conflict           a request was repeated with other content
        ├── Stale              an attempt at a task is not its current one any more
        ├── Collected          a payload is gone: nobody owned it
        ├── Full               a queue holds as many unfinished tasks as it may: try again later
        └── Busy               a coordinator has more calls waiting than it takes: try again

``str(error)`` is one line. ``hint`` is what the user can type or do next; the command line prints it
after ``Try:``. Anything that is not a `SpillError` is a bug and is not caught.
"""

from __future__ import annotations

__all__ = [
    "Busy",
    "Collected",
    "Conflict",
    "Corrupt",
    "EngineError",
    "Full",
    "InputError",
    "LockContended",
    "Lost",
    "Mismatch",
    "ModelError",
    "NotAllowed",
    "NotFound",
    "Retry",
    "SpillError",
    "Stale",
    "StateError",
    "StoreError",
    "StoreFull",
    "StoreRefused",
    "Superseded",
    "Unknown",
]


class SpillError(Exception):
    """Base of every error that a user or a caller can meet and act on."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(" ".join(message.split()))
        self.hint = hint


class InputError(SpillError):
    """Raised when a file, a row, a flag or an argument that the user gave cannot be used."""


class ModelError(SpillError):
    """Raised when a model or adapter cannot be found, is damaged, or is of an unsupported kind."""


class EngineError(SpillError):
    """Raised when the engine cannot do what was asked on this machine (no device, not enough memory)."""


class StoreError(SpillError):
    """Raised when a store call fails and nothing more precise is known."""


class NotFound(StoreError):
    """Raised when a key does not exist."""


class Lost(StoreError):
    """Raised when a conditional write was refused because another writer got there first."""


class Retry(StoreError):
    """Raised when a conditional write met a concurrent one and may succeed after reading again."""


class Unknown(StoreError):
    """Raised when a write got no answer: it may have happened, may not have, or may happen later."""


class StoreFull(StoreError):
    """Raised when the disk or the quota behind a store has no room for a write."""


class StoreRefused(StoreError):
    """Raised when a location cannot keep the promises that owned state needs."""


class StateError(SpillError):
    """Raised when durable state refuses a transition."""


class LockContended(StateError):
    """Raised when the state is owned by a process that is alive, or not yet known to be dead."""


class Superseded(StateError):
    """Raised to a former owner: a newer generation owns the state and nothing more can be published."""


class NotAllowed(StateError):
    """Raised when the state's status forbids the transition (completed work is read-only, say)."""


class Corrupt(StateError):
    """Raised when stored bytes do not match the size or checksum in their manifest."""


class Mismatch(StateError):
    """Raised when state belongs to different work; the message names the first difference."""


class Conflict(StateError):
    """Raised when a request that was already answered is repeated with other content."""


class Stale(StateError):
    """Raised when an attempt at a task is not its current one: the lease ran out, or the task ended."""


class Collected(StateError):
    """Raised when a payload was deleted because nobody owned it any more."""


class Full(StateError):
    """Raised when a queue holds as many unfinished tasks as it may; it has room again as they finish."""


class Busy(StateError):
    """Raised when a coordinator has as many calls waiting as it takes; the call changed nothing."""
