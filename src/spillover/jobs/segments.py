"""Finished rows as a few sorted files, however many rows there are.

    rows/seg-000000123-g000003-91bc44d0/   results.jsonl   partials.json   COMMIT

Each segment holds result lines sorted by row number. A new one is written every few rows; whenever
`FANOUT` of the newest have reached the same size class, they are merged into one of the next class while
the new rows are written, so a million rows are a few dozen files and each line is rewritten only a few
times (the tiering of a log-structured merge tree, O'Neil et al. 1996). The newest segment names all
others that are still needed; the control object names the newest. Reading them all back is one merge of
sorted streams, in memory that does not depend on the number of rows.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator

import msgspec

from spillover.errors import Corrupt
from spillover.state import Owned, Payload, Reference

__all__ = ["KIND", "Cursor", "Line", "Segments"]

KIND = "rows"
RESULTS, PARTIALS = "results.jsonl", "partials.json"
FANOUT = 8
PIECE = 128 * 1024
"""Bytes read at a time from each segment: a few dozen are open at once."""


class Piece(msgspec.Struct, frozen=True):
    """A segment that is part of the results: where it is and how many lines it has."""

    reference: Reference
    lines: int


class Cursor(msgspec.Struct, frozen=True):
    """Where a row job stands. Kept in the newest segment's manifest.

    Args:
        next: rows of the input that were begun: every row before it is done or in ``open``.
        open: numbers of begun rows that are not done, ascending.
        lines: result lines in the newest segment itself.
        pieces: the other segments that make up the results.
        failed: rows among the results that have an error instead of an answer.
        expected, matched: rows that say what they expect, and those whose answer equals it.
        tokens: generated tokens so far.
    """

    next: int = 0
    open: tuple[int, ...] = ()
    lines: int = 0
    pieces: tuple[Piece, ...] = ()
    failed: int = 0
    expected: int = 0
    matched: int = 0
    tokens: int = 0


class Line(msgspec.Struct, frozen=True, order=True):
    """One result: the row's number in the input and its JSON line without the line feed."""

    row: int
    data: bytes


class Segments:
    """The results so far, as the newest segment ``reference`` describes them (None: no rows yet).

    ``open_payload`` is `State.open` or `Owned.open`.
    """

    def __init__(self, open_payload: Callable[[Reference], Payload], reference: Reference | None) -> None:
        self._open = open_payload
        self.newest = reference
        self.cursor = Cursor()
        self.partials: dict[str, list[int]] = {}
        if reference is not None:
            payload = self._open(reference)
            self.cursor = msgspec.convert(payload.manifest.cursor, Cursor)
            self.partials = msgspec.json.decode(payload.read(PARTIALS), type=dict[str, list[int]])

    @property
    def done(self) -> int:
        return self.newest.step if self.newest else 0

    def write(
        self, owned: Owned, fresh: list[Line], cursor: Cursor, partials: dict[str, list[int]]
    ) -> Reference:
        """Write ``fresh`` lines, merging small segments on the way; the result is ready to publish.

        The object stands for the results *with* them from here on. ``cursor`` says where the job stands;
        its ``lines`` and ``pieces`` are filled in here.
        """
        kept, merged = self._tiers(len(fresh))
        lines = len(fresh) + sum(piece.lines for piece in merged)
        cursor = msgspec.structs.replace(cursor, lines=lines, pieces=tuple(kept))
        fresh = sorted(fresh)

        def pieces() -> Iterator[bytes]:
            streams = [self._stream(piece.reference) for piece in merged]
            return _batched(heapq.merge(fresh, *streams))

        done = self.done + len(fresh)
        writer = owned.payload(KIND, f"seg-{done:09d}")
        writer.add(RESULTS, pieces)
        writer.add(PARTIALS, msgspec.json.encode(partials))
        reference = writer.commit(
            step=done,
            cursor=msgspec.to_builtins(cursor),
            names=tuple(piece.reference for piece in kept),
        )
        self.newest, self.cursor, self.partials = reference, cursor, partials
        return reference

    def lines(self) -> Iterator[bytes]:
        """Every result line, in the order of the input, each verified against its segment's checksum.

        Raises:
            Corrupt: a segment is damaged, or a row appears twice. A line of a damaged one may come before.
        """
        before = -1
        for line in heapq.merge(*(self._stream(piece.reference) for piece in self._all())):
            if line.row == before:
                raise Corrupt(f"row {line.row + 1} has two results")
            before = line.row
            yield line.data + b"\n"

    def _all(self) -> list[Piece]:
        if self.newest is None:
            return []
        return [*self.cursor.pieces, Piece(self.newest, self.cursor.lines)]

    def _tiers(self, fresh: int) -> tuple[list[Piece], list[Piece]]:
        """Split the segments into those that stay and the newest ones to merge with ``fresh`` lines.

        From the newest backwards, `FANOUT` - 1 segments of the size class of what is being written join
        it, which may lift it into the next class, and so on.
        """
        kept, lines = self._all(), fresh
        merged: list[Piece] = []
        while True:
            tail = kept[-(FANOUT - 1) :]
            if len(tail) < FANOUT - 1 or any(_tier(piece.lines) > _tier(lines) for piece in tail):
                empty = [piece for piece in kept if not piece.lines]
                return [piece for piece in kept if piece.lines], merged + empty
            merged = tail + merged
            kept = kept[: -(FANOUT - 1)]
            lines += sum(piece.lines for piece in tail)

    def _stream(self, reference: Reference) -> Iterator[Line]:
        return _split(self._open(reference))


def _tier(lines: int) -> int:
    """The size class: segments of one class differ by less than `FANOUT` times."""
    tier = 0
    while lines >= FANOUT:
        lines //= FANOUT
        tier += 1
    return tier


class _Numbered(msgspec.Struct):
    row: int


class _Result(msgspec.Struct):
    spillover: _Numbered


def _split(payload: Payload) -> Iterator[Line]:
    """The lines of a segment, read a piece at a time."""
    decode = msgspec.json.Decoder(_Result).decode
    rest = b""
    for piece in payload.chunks(RESULTS, PIECE):
        *whole, rest = (rest + piece).split(b"\n")
        for data in whole:
            try:
                number = decode(data).spillover.row
            except msgspec.DecodeError as error:  # met before the end, where the checksum is compared
                raise payload.damaged(RESULTS, f"has a line that is no result: {error}") from None
            yield Line(number, data)


def _batched(lines: Iterable[Line]) -> Iterator[bytes]:
    """Lines joined into pieces of about 1 MiB, so that each write is worth its call."""
    batch: list[bytes] = []
    size = 0
    for line in lines:
        batch.append(line.data + b"\n")
        size += len(line.data)
        if size > 1 << 20:
            yield b"".join(batch)
            batch, size = [], 0
    if batch:
        yield b"".join(batch)
