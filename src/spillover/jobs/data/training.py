"""A training file as token sequences on disk."""

from __future__ import annotations

import os
import tempfile
from array import array
from bisect import bisect_left
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

from spillover.errors import InputError, SpillError, StoreFull
from spillover.jobs.data.rows import read_rows

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from types import TracebackType
    from typing import IO, Any, Protocol

    from numpy.typing import NDArray

    from spillover.jobs.data.conversation import Message
    from spillover.jobs.data.lines import Stamp
    from spillover.jobs.data.rows import Row

    class Tokenizer(Protocol):
        def training(
            self, messages: list[Message], *, tools: list[dict[str, Any]] | None = None
        ) -> tuple[list[int], list[bool]]: ...


class TrainingSet:
    """The examples of a training file: tokens and the mask of those that the loss covers.

    An example is one row. A conversation of more than ``max_seq`` tokens loses its earliest whole exchanges
    (a user's message and everything up to the user's next one), never its system message and never a part of
    a reply. One that is too long with only its last exchange, or has no token left to learn, is skipped.

    Tokens live in unnamed temporary files, 5 bytes each, which vanish with the process however it ends; 16
    bytes a row stay in memory.

    Attributes:
        lengths: tokens of each example, int64 [N].
        rows: the row index of each example, int64 [N]; skipped rows are missing.
        targets: tokens that the loss covers, over all examples.
        shortened: examples that lost exchanges.
        dropped: exchanges that they lost.
        skipped: rows left out.
    """

    def __init__(self, max_seq: int, cache_dir: Path) -> None:
        self.max_seq = max_seq
        self.targets = 0
        self.shortened = 0
        self.dropped = 0
        self.skipped = 0
        self._offsets = array("q", [0])
        self._rows = array("q")
        self._cache_dir = cache_dir
        self._tokens: IO[bytes] = _scratch(cache_dir)
        self._mask: IO[bytes] = _scratch(cache_dir)

    @classmethod
    def build(
        cls,
        path: str | os.PathLike[str],
        tokenizer: Tokenizer,
        max_seq: int,
        cache_dir: Path,
        *,
        stamp: Stamp | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> TrainingSet:
        """Tokenize every row of a file. Close the set after use; it is a context manager.

        ``progress`` is called after each row with the number of rows done, and may raise to stop.

        Raises `InputError` with the file and line for a row that cannot be trained on, or when no example is
        left; the tokenizer's `ModelError`, with the line, for a row that the chat template refuses; and
        `StoreFull` when the tokens do not fit into ``cache_dir``.
        """
        cache_dir.mkdir(parents=True, exist_ok=True)
        examples = cls(max_seq, cache_dir)
        try:
            for row in read_rows(path, "train", stamp=stamp):
                examples._add(row, path, tokenizer)
                if progress is not None:
                    progress(row.index + 1)
            examples._finish(path)
        except BaseException:
            examples.close()
            raise
        return examples

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def lengths(self) -> NDArray[np.int64]:
        offsets = np.frombuffer(self._offsets, np.int64)
        return offsets[1:] - offsets[:-1]

    @property
    def rows(self) -> NDArray[np.int64]:
        return np.frombuffer(self._rows, np.int64)

    @property
    def tokens(self) -> int:
        """Tokens of all examples."""
        return self._offsets[-1]

    def example(self, index: int) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Token ids and loss mask of one example, both [T]; the mask is True where a token is a target."""
        start, stop = self._offsets[index], self._offsets[index + 1]
        tokens = os.pread(self._tokens.fileno(), (stop - start) * 4, start * 4)
        mask = os.pread(self._mask.fileno(), stop - start, start)
        return np.frombuffer(tokens, np.int32), np.frombuffer(mask, np.bool_)

    def notes(self) -> list[str]:
        """What was left out, a sentence each, for the user to see."""
        notes = []
        if self.shortened:
            notes.append(
                f"{self.shortened:,} of {len(self):,} examples lost {self.dropped:,} early exchanges"
                f" to fit {self.max_seq:,} tokens"
            )
        if self.skipped:
            notes.append(f"{self.skipped:,} rows skipped: nothing to learn fits {self.max_seq:,} tokens")
        return notes

    def close(self) -> None:
        for file in (self._tokens, self._mask):
            with suppress(OSError):  # a full disk: what could not be written is not needed any more
                file.close()

    def __enter__(self) -> TrainingSet:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _add(self, row: Row, path: str | os.PathLike[str], tokenizer: Tokenizer) -> None:
        try:
            found = _fitting(row, tokenizer, self.max_seq)
        except SpillError as error:  # the chat template refuses the conversation
            raise type(error)(f"{os.fspath(path)}:{row.line}: {error}", hint=error.hint) from None
        if found is None:
            self.skipped += 1
            return
        tokens, mask, dropped = found
        try:
            self._tokens.write(np.array(tokens, np.int32).tobytes())
            self._mask.write(bytes(mask))
        except OSError as error:
            raise self._full(error) from None
        self._offsets.append(self._offsets[-1] + len(tokens))
        self._rows.append(row.index)
        self.targets += sum(mask)
        self.shortened += dropped > 0
        self.dropped += dropped

    def _finish(self, path: str | os.PathLike[str]) -> None:
        try:
            self._tokens.flush()
            self._mask.flush()
        except OSError as error:
            raise self._full(error) from None
        if not len(self):
            raise InputError(
                f"{os.fspath(path)}: no row fits {self.max_seq:,} tokens",
                hint=f"--max-seq {2 * self.max_seq}",
            )

    def _full(self, error: OSError) -> StoreFull:
        return StoreFull(f"{self._cache_dir}: no room for the tokenized rows: {error.strerror}")


def _scratch(folder: Path) -> IO[bytes]:
    return tempfile.TemporaryFile(dir=folder)


def exchanges(messages: list[Message]) -> tuple[list[Message], list[list[Message]]]:
    """The leading system messages, and the rest cut before each user message that follows another role."""
    head = next((i for i, m in enumerate(messages) if m["role"] != "system"), len(messages))
    parts: list[list[Message]] = []
    previous = None
    for message in messages[head:]:
        if not parts or (message["role"] == "user" and previous != "user"):
            parts.append([])
        parts[-1].append(message)
        previous = message["role"]
    return messages[:head], parts


def _fitting(row: Row, tokenizer: Tokenizer, max_seq: int) -> tuple[list[int], list[bool], int] | None:
    """Tokens, mask and the fewest exchanges to drop, or None if even the last exchange is too long."""
    messages = row.conversation
    tokens, mask = tokenizer.training(messages, tools=row.tools)
    if len(tokens) <= max_seq:
        return (tokens, mask, 0) if any(mask) else None
    system, parts = exchanges(messages)

    def without(dropped: int) -> tuple[list[int], list[bool]]:
        kept = [message for part in parts[dropped:] for message in part]
        return tokenizer.training(system + kept, tools=row.tools)

    # Fewer exchanges are fewer tokens, so that a long conversation takes few renders to cut.
    dropped = bisect_left(range(1, len(parts)), True, key=lambda n: len(without(n)[0]) <= max_seq) + 1
    if dropped >= len(parts):
        return None
    tokens, mask = without(dropped)
    return (tokens, mask, dropped) if any(mask) else None
