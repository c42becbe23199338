"""The promises that two mounts of one filesystem must keep, each as a check of two processes.

A check returns what it saw, in a line, or raises `Failed` with the first contradiction.
"""

from __future__ import annotations

import os
import secrets
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial

from spillover.pool.partner import Failed, Process, Refused, content
from spillover.store.filesystem import Profile, mount

__all__ = ["APPENDS", "CHECKS", "EXCLUDES", "PLACES", "RELEASED", "SAME", "Pair"]

BLOCK = "spillover"
LAST = 99_999_999


class Pair:
    """The two processes, and how hard to try them."""

    def __init__(
        self, near: Process, far: Process, *, profile: Profile, rounds: int, patience: float
    ) -> None:
        self.near = near
        self.far = far
        self.profile = profile
        self.rounds = rounds
        self.patience = patience

    def orders(self, name: str) -> Iterator[tuple[Process, Process, str]]:
        """Both orders, because a client may be wrong in one role only, each with a file name of its own."""
        yield self.near, self.far, f"{name}-near"
        yield self.far, self.near, f"{name}-far"

    def race(self, first: tuple[object, ...], second: tuple[object, ...], turn: int) -> tuple[int, int]:
        """Ask both at once, one of them a little earlier by turns; the answers of near and far."""
        requests = [(self.near, first), (self.far, second)]
        for process, request in requests if turn % 2 else reversed(requests):
            process.send(*request)
        return self.near.answer(), self.far.answer()

    def becomes(self, wanted: object, process: Process, *request: object) -> bool:
        """Whether the answer to a request that is repeated was ``wanted`` before patience ended."""
        end = time.monotonic() + self.patience
        while process.ask(*request) != wanted:
            if time.monotonic() > end:
                return False
            time.sleep(0.001)
        return True


def _same_place(pair: Pair) -> str:
    pair.near.ask("make")
    for writer, reader, name in pair.orders("token"):
        token = secrets.token_hex(16)
        writer.ask("create", name, token)
        if not pair.becomes(token, reader, "read", name):
            raise Failed(
                f"a file created in {writer.folder.parent} does not appear in {reader.folder.parent}"
            )
    return "files created in one folder appear in the other, both ways"


def _two_clients(pair: Pair) -> str:
    near, far = pair.near.folder.parent, pair.far.folder.parent
    if os.stat(near).st_dev != os.stat(far).st_dev:
        return "two clients, each with a mount of its own"
    one = mount(near) == mount(far)
    seen = "one mount" if one else "two mounts of one device"
    if pair.profile != "local":
        raise Failed(
            f"{seen}: this proves one client only; mount {pair.profile} a second time, by another client"
        )
    return f"{seen}: one client, and a local disk has no other"


def _flock_excludes(pair: Pair) -> str:
    taken, released = list[float](), list[float]()
    for first, second, name in pair.orders("lock"):
        for turn in range(max(2, pair.rounds // 2)):
            holder, other = (first, second) if turn % 2 else (second, first)
            start = time.perf_counter()
            if not holder.ask("lock", name):
                raise Failed(f"round {turn}: a lock that the other had released was refused")
            taken.append(time.perf_counter() - start)
            if other.ask("lock", name):
                raise Failed(f"round {turn}: both hold the lock, {holder.folder.parent} first")
            start = time.perf_counter()
            holder.ask("unlock", name)
            released.append(time.perf_counter() - start)
    return (
        f"flock excluded in {len(taken)} rounds, both ways, taken in {_median(taken)}, released in "
        f"{_median(released)}"
    )


def _flock_ends_with_its_holder(pair: Pair) -> str:
    delays = []
    for holder, other, name in pair.orders("killed"):
        if not holder.ask("lock", name) or other.ask("lock", name):
            raise Failed("the lock did not exclude in the first place")
        start = time.perf_counter()
        holder.kill()
        if not pair.becomes(True, other, "lock", name):
            raise Failed(f"the lock of a process killed in {holder.folder.parent} was held on")
        delays.append(time.perf_counter() - start)
        holder.start()
    return f"free {delays[0] * 1e3:.0f} and {delays[1] * 1e3:.0f} ms after SIGKILL of the holder"


def _flock_orders_writes(pair: Pair) -> str:
    request = ("count", "number", pair.rounds, pair.patience / 2)
    turns = pair.race(request, request, 0)
    if not all(turns):
        raise Failed(f"{turns[0]} and {turns[1]} turns with the lock in {pair.patience / 2:g} s")
    done = sum(turns)
    number = pair.near.ask("read", "number")
    if number != f"{done:08d}":
        raise Failed(
            f"{done} additions under the lock made {number}: two were inside, or one read an old number"
        )
    return f"{done} additions under the lock by two processes at once made {done}"


def _exclusive(pair: Pair, operation: str) -> str:
    wins = [0, 0]
    for turn in range(pair.rounds):
        name = f"{operation}-{turn}"
        won = pair.race((operation, name, "near"), (operation, name, "far"), turn)
        _one_winner(pair, turn, name, won)
        wins[won[1]] += 1
    return f"one winner in {pair.rounds} races, {wins[0]} near and {wins[1]} far"


def _one_winner(pair: Pair, turn: int, name: str, won: tuple[int, int]) -> None:
    if sum(won) != 1:
        raise Failed(f"round {turn}: {sum(won)} winners")
    winner = "far" if won[1] else "near"
    for process in (pair.near, pair.far):
        if (text := process.ask("read", name)) != winner:
            raise Failed(f"round {turn}: {winner} won, and {process.folder.parent} reads {text!r}")


def _appends(pair: Pair, read: str) -> str:
    syncs = []
    for writer, reader, name in pair.orders(read):
        size = 0
        writer.ask("append", name, "")
        reader.ask(read, name, 0, 1)
        for turn in range(pair.rounds):
            text = _text(turn, 1 + turn * 977 % 9000)
            syncs.append(writer.ask("append", name, text))
            _compare(text, size, size + len(text), reader.ask(read, name, size, len(text)), turn)
            size += len(text)
    return f"{len(syncs)} appends were read at once, fsync answered in {_median(syncs)}"


def _writes_at_offsets(pair: Pair) -> str:
    for writer, reader, name in pair.orders("offsets"):
        size = 0
        for turn in range(pair.rounds):
            text, offset = _text(turn, 1 + turn * 331 % 5000), turn * 7919 % 40000
            writer.ask("write_at", name, offset, text)
            size = max(size, offset + len(text))
            for read in ("read_open", "read_anew"):
                _compare(text, offset, size, reader.ask(read, name, offset, len(text)), turn)
    return f"{2 * pair.rounds} overwrites were read at once"


def _compare(text: str, offset: int, size: int, found: tuple[int, str], turn: int) -> None:
    if found[0] != size:
        raise Failed(f"write {turn} made the file {size} bytes, the reader sees {found[0]}")
    if found[1] == text:
        return
    if len(found[1]) < len(text):
        raise Failed(f"write {turn}: {len(found[1])} of {len(text)} bytes at {offset}, in a file of {size}")
    wrong = next(place for place, pair in enumerate(zip(text, found[1], strict=True)) if pair[0] != pair[1])
    what = "zeros" if not found[1][wrong:].strip("\0") else "other bytes"
    raise Failed(f"write {turn}: {what} from {offset + wrong} on, in a file of {size}")


def _rename_atomic(pair: Pair) -> str:
    total, replaced = 0, 0
    for writer, reader, name in pair.orders("watched"):
        writer.ask("replace", name, 0)
        if not pair.becomes(content(0).decode(), reader, "read", name):
            raise Failed("a renamed file did not appear")
        reader.send("watch", name, LAST, 0.8 * pair.patience)
        end = time.monotonic() + pair.patience / 2
        for version in range(1, pair.rounds):
            if time.monotonic() > end:  # slow is not wrong
                break
            writer.ask("replace", name, version)
            replaced += 1
        writer.ask("replace", name, LAST)
        reads, wrong = reader.answer()
        if wrong:
            raise Failed(wrong[0])
        total += reads
    return f"{total} reads during {replaced} replacements: each one whole, none older than before"


def _rename_visible(pair: Pair) -> str:
    for writer, reader, name in pair.orders("replaced"):
        if reader.ask("read", name) is not None:
            raise Failed("a file that nobody made is there")
        for version in range(pair.rounds):
            writer.ask("replace", name, version)
            text = reader.ask("read", name)
            if text is None:
                raise Failed(f"replacement {version}: no file")
            if text[:8] != f"{version:08d}":
                raise Failed(f"replacement {version}: version {text[:8]} is still there")
    return f"{2 * pair.rounds} replacements were seen at once, the first where no file was"


def _names_visible(pair: Pair) -> str:
    for writer, reader, name in pair.orders("listed"):
        for turn in range(pair.rounds):
            writer.ask("create", name, "")
            if name not in reader.ask("names"):
                raise Failed(f"round {turn}: the new name is not listed")
            writer.ask("unlink", name)
            if name in reader.ask("names"):
                raise Failed(f"round {turn}: the removed name is still listed")
            if reader.ask("read", name) is not None:
                raise Failed(f"round {turn}: the removed file can still be opened")
    return f"{2 * pair.rounds} names came and went at once"


def _unlinked_while_open(pair: Pair) -> str:
    seen = set[str]()
    for writer, reader, name in pair.orders("unlinked"):
        text = _text(0, 1 << 20)
        writer.ask("append", name, text)
        reader.ask("read_open", name, 0, 4096)
        writer.ask("unlink", name)
        try:
            _, found = reader.ask("read_open", name, 0, len(text))
        except Refused as failure:
            seen.add(f"an open reader gets an error ({str(failure).rpartition(': ')[2]})")
            continue
        if found != text:
            raise Failed(f"an open reader gets {len(found)} bytes that are not those of the removed file")
        seen.add("an open reader reads on")
    return "; ".join(sorted(seen))


def _database(pair: Pair) -> str:
    delays = []
    stop = max(10, pair.rounds // 4)
    for first, second, name in pair.orders("database"):
        if not first.ask("open_database", name):
            raise Failed("a new database is locked")
        first.ask("insert", 0, stop)
        if second.ask("open_database", name):
            raise Failed(f"both own the database, {first.folder.parent} first")
        first.ask("insert_without_commit", stop)
        start = time.perf_counter()
        first.kill()
        if not pair.becomes(True, second, "open_database", name):
            raise Failed(f"the database of a process killed in {first.folder.parent} stayed locked")
        delays.append(time.perf_counter() - start)
        rows = second.ask("rows")
        if rows != [*range(stop)]:
            raise Failed(
                f"{stop} rows were committed, {len(rows)} are there, up to {max(rows, default=None)}"
            )
        second.ask("insert", stop, stop + 1)
        first.start()
    return (
        f"SQLite (WAL, exclusive) excluded; open {delays[0] * 1e3:.0f} and {delays[1] * 1e3:.0f} ms after "
        f"SIGKILL, with all {stop} rows"
    )


def _text(turn: int, length: int) -> str:
    """Text of a length, without zeros, other than that of the turn before."""
    unit = f"{BLOCK}-{turn:06d}-"
    return (unit * (length // len(unit) + 1))[:length]


def _median(seconds: list[float]) -> str:
    return f"{statistics.median(seconds) * 1e3:.2f} ms"


SAME = "one folder"
PLACES = "two clients"
EXCLUDES = "flock excludes"
RELEASED = "flock ends with its holder"
APPENDS = "appends reach an open reader"
CHECKS: tuple[tuple[str, Callable[[Pair], str]], ...] = (
    (SAME, _same_place),
    (PLACES, _two_clients),
    (EXCLUDES, _flock_excludes),
    (RELEASED, _flock_ends_with_its_holder),
    ("flock orders writes", _flock_orders_writes),
    ("exclusive create", partial(_exclusive, operation="create")),
    ("exclusive link", partial(_exclusive, operation="link")),
    (APPENDS, partial(_appends, read="read_open")),
    ("appends reach a new reader", partial(_appends, read="read_anew")),
    ("overwrites are seen", _writes_at_offsets),
    ("rename is atomic", _rename_atomic),
    ("rename is seen", _rename_visible),
    ("names are seen", _names_visible),
    ("unlink under a reader", _unlinked_while_open),
    ("SQLite changes hands", _database),
)
"""Names and checks, in the order of need: the first two make the others mean something."""
