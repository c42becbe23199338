"""A training file as token sequences on disk."""

from __future__ import annotations

import os
import tempfile
from array import array
from bisect import bisect_left
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

from spillover.engine.protocol import Likely
from spillover.errors import InputError, SpillError, StoreFull
from spillover.jobs.data.example import Example
from spillover.jobs.data.parse import Fault
from spillover.jobs.data.rows import read_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path
    from types import TracebackType
    from typing import IO, Any, Protocol, TypeAlias

    from numpy.typing import NDArray

    from spillover.jobs.data.conversation import Message
    from spillover.jobs.data.lines import Stamp
    from spillover.jobs.data.rows import Row

    Masked: TypeAlias = "tuple[list[int], list[bool]]"  # tokens, and which of them are targets

    class Tokenizer(Protocol):
        @property
        def stop_ids(self) -> frozenset[int]: ...

        def decode(self, ids: Iterable[int]) -> str: ...

        def prompt_ids(
            self, messages: Sequence[Message], *, tools: Sequence[Any] | None = None
        ) -> list[int]: ...

        def training(self, messages: Sequence[Message], *, tools: Sequence[Any] | None = None) -> Masked: ...


class TrainingSet:
    """The examples of a training file: tokens and the mask of those that the loss covers.

    An example is one row. A conversation of more than ``max_seq`` tokens loses its earliest whole exchanges
    (a user's message and everything up to the user's next one), never its system message and never a part of
    a reply. One that is too long with only its last exchange, or has no token left to learn, is skipped.
    A distilled completion that was cut at its limit of tokens does not teach its end.

    With `vocabulary`, the number of the model's tokens, the rows are distilled ones, and an example is the
    prompt and the teacher's own tokens, with what the teacher held of each.

    Tokens live in unnamed temporary files, 5 bytes each and 8 for each likely token of a target, which vanish
    with the process however it ends; 24 bytes a row stay in memory.

    Attributes:
        lengths: tokens of each example, int64 [N].
        rows: the row index of each example, int64 [N]; skipped rows are missing.
        targets: tokens that the loss covers, over all examples.
        shortened: examples that lost exchanges.
        dropped: exchanges that they lost.
        skipped: rows left out.
        cut: completions that were cut at their limit.
    """

    def __init__(self, max_seq: int, cache_dir: Path, *, vocabulary: int | None = None) -> None:
        self.max_seq = max_seq
        self.vocabulary = vocabulary
        self.targets = 0
        self.shortened = 0
        self.dropped = 0
        self.skipped = 0
        self.cut = 0
        self._offsets = array("q", [0])
        self._targets_before = array("q", [0])
        self._kept = 0  # likely tokens of each target, the same for all
        self._rows = array("q")
        self._cache_dir = cache_dir
        self._tokens: IO[bytes] = _scratch(cache_dir)
        self._mask: IO[bytes] = _scratch(cache_dir)
        self._likely: IO[bytes] = _scratch(cache_dir)

    @classmethod
    def build(
        cls,
        path: str | os.PathLike[str],
        tokenizer: Tokenizer,
        max_seq: int,
        cache_dir: Path,
        *,
        stamp: Stamp | None = None,
        vocabulary: int | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> TrainingSet:
        """Tokenize every row of a file. Close the set after use; it is a context manager.

        ``progress`` is called after each row with the number of rows done, and may raise to stop.

        Raises `InputError` with the file and line for a row that cannot be trained on, or when no example is
        left; the tokenizer's `ModelError`, with the line, for a row that the chat template refuses; and
        `StoreFull` when the tokens do not fit into ``cache_dir``.
        """
        cache_dir.mkdir(parents=True, exist_ok=True)
        examples = cls(max_seq, cache_dir, vocabulary=vocabulary)
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

    def example(self, index: int) -> Example:
        """The tokens and targets of one example."""
        start, stop = self._offsets[index], self._offsets[index + 1]
        tokens = os.pread(self._tokens.fileno(), (stop - start) * 4, start * 4)
        mask = os.pread(self._mask.fileno(), stop - start, start)
        likely = None if self.vocabulary is None else self._likely_of(index)
        return Example(np.frombuffer(tokens, np.int32), np.frombuffer(mask, np.bool_), likely)

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
        if self.cut:
            notes.append(f"{self.cut:,} completions were cut at their limit: where they end is not learned")
        return notes

    def close(self) -> None:
        for file in (self._tokens, self._mask, self._likely):
            with suppress(OSError):  # a full disk: what could not be written is not needed any more
                file.close()

    def __enter__(self) -> TrainingSet:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _add(self, row: Row, path: str | os.PathLike[str], tokenizer: Tokenizer) -> None:
        where = f"{os.fspath(path)}:{row.line}"
        try:
            if self.vocabulary is None:
                found = self._told(row, tokenizer)
            else:
                found = self._taught(row, tokenizer, self.vocabulary)
        except Fault as fault:
            raise InputError(f"{where}: {fault.message}", hint=fault.hint) from None
        except SpillError as error:  # the chat template refuses the conversation
            raise type(error)(f"{where}: {error}", hint=error.hint) from None
        if found is None:
            self.skipped += 1
            return
        example, dropped = found
        self._write(example)
        self._rows.append(row.index)
        self.targets += int(example.mask.sum())
        self.shortened += dropped > 0
        self.dropped += dropped
        self.cut += row.teacher is not None and row.teacher.was_cut

    def _told(self, row: Row, tokenizer: Tokenizer) -> tuple[Example, int] | None:
        """An example of what a row says, and the exchanges dropped; None if nothing to learn fits."""

        def render(messages: list[Message]) -> Masked:
            return tokenizer.training(messages, tools=row.tools)

        found = _fitting(row.conversation, render, self.max_seq)
        if found is None:
            return None
        tokens, mask, dropped = found
        learned = np.array(mask, np.bool_)
        if row.teacher is not None and row.teacher.was_cut:
            learned[np.flatnonzero(learned)[-1]] = False  # the end of the turn, which the teacher did not say
            if not learned.any():
                return None
        return Example(np.array(tokens, np.int32), learned), dropped

    def _taught(self, row: Row, tokenizer: Tokenizer, vocabulary: int) -> tuple[Example, int] | None:
        """The same of what the teacher said, token by token, and held likely."""
        if row.teacher is None:
            raise Fault("the row has no teacher", hint="spill distill TEACHER FILE writes rows for --loss kl")
        said = row.teacher.completion(row.reply, tokenizer, vocabulary)
        likely = row.teacher.likely(len(said), vocabulary)
        count = likely.tokens.shape[1]
        self._kept = self._kept or count
        if count < self._kept:
            raise Fault(f"the row has {count} likely tokens a place, earlier ones have {self._kept}")

        def render(messages: list[Message]) -> Masked:
            prompt = tokenizer.prompt_ids(messages, tools=row.tools)
            return [*prompt, *said], [False] * len(prompt) + [True] * len(said)

        found = _fitting(row.messages, render, self.max_seq)
        if found is None:
            return None
        tokens, mask, dropped = found
        kept = Likely(likely.tokens[:, : self._kept], likely.logprobs[:, : self._kept])
        return Example(np.array(tokens, np.int32), np.array(mask, np.bool_), kept), dropped

    def _write(self, example: Example) -> None:
        try:
            self._tokens.write(example.tokens.tobytes())
            self._mask.write(example.mask.tobytes())
            if example.likely is not None:
                self._likely.write(example.likely.tokens.astype(np.int32).tobytes())
                self._likely.write(example.likely.logprobs.tobytes())
        except OSError as error:
            raise self._full(error) from None
        self._offsets.append(self._offsets[-1] + len(example.tokens))
        self._targets_before.append(self._targets_before[-1] + int(example.mask.sum()))

    def _likely_of(self, index: int) -> Likely:
        """What the teacher held of the targets of one example: all token ids, then all logarithms."""
        start, stop = self._targets_before[index], self._targets_before[index + 1]
        count, shape = (stop - start) * self._kept, (stop - start, self._kept)
        content = os.pread(self._likely.fileno(), 8 * count, 8 * start * self._kept)
        tokens = np.frombuffer(content, np.int32, count).astype(np.int64)
        return Likely(
            tokens.reshape(shape), np.frombuffer(content, np.float32, count, 4 * count).reshape(shape)
        )

    def _finish(self, path: str | os.PathLike[str]) -> None:
        try:
            for file in (self._tokens, self._mask, self._likely):
                file.flush()
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


def _fitting(
    messages: list[Message], render: Callable[[list[Message]], Masked], max_seq: int
) -> tuple[list[int], list[bool], int] | None:
    """Tokens, mask and the fewest exchanges to drop, or None if even the last exchange is too long."""
    tokens, mask = render(messages)
    if len(tokens) <= max_seq:
        return (tokens, mask, 0) if any(mask) else None
    system, parts = exchanges(messages)

    def without(dropped: int) -> Masked:
        return render(system + [message for part in parts[dropped:] for message in part])

    # Fewer exchanges are fewer tokens, so that a long conversation takes few renders to cut.
    dropped = bisect_left(range(1, len(parts)), True, key=lambda n: len(without(n)[0]) <= max_seq) + 1
    if dropped >= len(parts):
        return None
    tokens, mask = without(dropped)
    return (tokens, mask, dropped) if any(mask) else None
