"""Answers that a model gave before, so that no row is computed twice.

    <answers>/<model>/<work>/control.json ...

Every piece of work, one model on one file with one decoding, has durable state of its own. What another one
of the same model has finished is taken over where the key is the same (`spillover.jobs.kept`). Published
segments never change and are verified as they are read, so no lock is needed: not while another process
works there, and not against a kill, for nothing is kept beside the states themselves. What cannot be read, or
goes while it is read, is computed again.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from typing import IO, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from spillover.engine import Completion
from spillover.errors import SpillError, StoreFull
from spillover.jobs.data import Row, read_rows
from spillover.jobs.kept import Answered, KeptCompletion, Key, answer_key
from spillover.jobs.run import Inputs
from spillover.jobs.segments import KIND, Segments
from spillover.state import State
from spillover.store import Store, open_store

__all__ = ["Recalled", "place_of", "recalling", "store_of"]

Report = Callable[[str], None]


def place_of(inputs: Inputs) -> tuple[str, str]:
    """Names of the folder of a model and of its work in it."""
    identity = inputs.identity
    maker = [str(identity["weights"]).rpartition(":")[2][:12], (identity["adapter"] or "base")[:12]]
    data = msgspec.json.encode(identity, order="sorted")
    return "-".join(maker), hashlib.sha256(data).hexdigest()[:12]


def store_of(root: str, inputs: Inputs) -> Store:
    """Where the answers of some work are durable, below ``root``."""
    return open_store("/".join([root.rstrip("/"), *place_of(inputs)]))


class Recalled:
    """The answers of earlier work that a file's rows have again.

    ``rows`` counts the different rows that have any. Memory is some 30 bytes a row of the file.
    """

    def __init__(self, key: Key, hashes: NDArray[np.uint64], spool: IO[bytes]) -> None:
        self._key = key
        self._hashes = hashes  # sorted
        self._spool = spool
        self._end = 0
        self._starts = np.zeros(len(hashes), np.int64)
        self._sizes = np.zeros(len(hashes), np.int64)
        self._samples = np.zeros(len(hashes), np.int32)

    @property
    def rows(self) -> int:
        return int((self._samples > 0).sum())

    def __call__(self, row: Row, decoding: dict[str, Any]) -> dict[int, Completion]:
        """The samples of a row that are known, by number."""
        key = self._key(row, decoding)
        place = self._place(key)
        if place is None or not self._samples[place]:
            return {}
        data = os.pread(self._spool.fileno(), int(self._sizes[place]), int(self._starts[place]))
        line = msgspec.json.decode(data, type=Answered)
        if line.spillover.key != key:  # another row's, by a chance of one in 10^19
            return {}
        return {
            number: KeptCompletion(
                id=row.id if number == 0 else f"{row.id}\0{number}",
                tokens=one.token_ids,
                finish="stop" if one.finish_reason == "stop" else "length",
                logprobs=None,
                prompt_tokens=line.prompt_tokens,
                seconds=0.0,
                by=one.by,
            )
            for number, one in enumerate(line.answers)
        }

    def take(self, segments: Segments) -> None:
        """Keep every line of ``segments`` that a row has the key of; nothing if one of them is damaged."""
        starts, sizes, samples = self._starts.copy(), self._sizes.copy(), self._samples.copy()
        for data in segments.lines():
            line = msgspec.json.decode(data, type=Answered)
            place = self._place(line.spillover.key) if line.answers else None
            if place is None or samples[place] >= len(line.answers):
                continue
            starts[place], sizes[place], samples[place] = self._end, len(data), len(line.answers)
            self._spool.write(data)
            self._end += len(data)
        self._spool.flush()
        self._starts, self._sizes, self._samples = starts, sizes, samples

    def _place(self, key: str) -> int | None:
        wanted = _hash(key)
        place = int(np.searchsorted(self._hashes, wanted))
        return place if place < len(self._hashes) and self._hashes[place] == wanted else None


@contextlib.contextmanager
def recalling(root: str, inputs: Inputs, report: Report) -> Iterator[Recalled]:
    """While the block runs: what other work of the same model has answered of this work's rows.

    Raises:
        StoreFull: there is no room for it.
    """
    key = answer_key(inputs)
    others = [*_others(root, inputs)]
    hashes = _hashes(inputs, key) if others else np.zeros(0, np.uint64)
    with tempfile.TemporaryFile() as spool:
        recalled = Recalled(key, hashes, spool)
        for store, segments in others:
            try:
                recalled.take(segments)
            except (SpillError, msgspec.DecodeError) as error:
                report(f"answers at {store.uri} cannot be used again: {error}")
            except OSError as error:
                with contextlib.suppress(OSError):  # what could not be written is not needed any more
                    spool.close()
                message = f"{tempfile.gettempdir()}: no room for earlier answers: {error.strerror}"
                raise StoreFull(message, hint="set TMPDIR") from None
        yield recalled


def _others(root: str, inputs: Inputs) -> Iterator[tuple[Store, Segments]]:
    """The results of other work of the same model that has any."""
    model, own = place_of(inputs)
    folder = f"{root.rstrip('/')}/{model}"
    keys = [entry.key.split("/") for entry in open_store(folder).list()]
    for name in sorted({key[0] for key in keys if key[1:] == ["control.json"]} - {own}):
        store = open_store(f"{folder}/{name}")
        try:
            document = State(store).read()
            if document is None or (reference := document.current.get(KIND)) is None:
                continue
            if all(document.identity.get(each) == inputs.identity[each] for each in ("weights", "adapter")):
                yield store, Segments(State(store).open, reference)
        except (SpillError, msgspec.DecodeError, msgspec.ValidationError):
            continue


def _hashes(inputs: Inputs, key: Key) -> NDArray[np.uint64]:
    settings = inputs.settings
    rows = read_rows(settings.data, settings.purpose, stamp=inputs.summary.stamp)
    found = np.fromiter((_hash(key(row, settings.decoding(row))) for row in rows), np.uint64)
    return np.unique(found)


def _hash(key: str) -> np.uint64:
    return np.uint64(int(key[:16], 16))
