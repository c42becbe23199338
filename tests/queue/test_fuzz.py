"""Calls that nobody would make, built from the types of all calls, against a server process.

Whatever is sent, the answer is an answer or a refusal: 2xx, 4xx, or 503 where nobody serves. Nothing hangs,
and afterwards the queue is sound. ``SPILL_FUZZ_SECONDS`` says for how long, ``SPILL_FUZZ_SEED`` with what.
"""

from __future__ import annotations

import functools
import http.client
import operator
import os
import random
import time
from collections import Counter, deque
from pathlib import Path
from typing import Any

import msgspec
from msgspec import inspect

from serving import serving
from spillover.errors import SpillError
from spillover.pool import Pool, Record, Ref
from spillover.queue import Client, Coordinator, Task
from spillover.queue import messages as m
from spillover.queue.audit import audit
from spillover.queue.coordinator import HANDLERS, VIEWS
from spillover.queue.transport import decode_call

SECONDS = float(os.environ.get("SPILL_FUZZ_SECONDS", "10"))
SEED = int(os.environ.get("SPILL_FUZZ_SEED", "20261130"))
CALLS = (*HANDLERS, *VIEWS)
ANY: Any = functools.reduce(operator.or_, CALLS)
KINDS = {kind.tag: kind for kind in inspect.type_info(ANY).types}
TAGS = [*KINDS]
OFTEN = {
    "Submit": 8,
    "Acquire": 4,
    "Complete": 6,
    "OpenConsumer": 3,
    "Ack": 4,
    "PlanBatch": 4,
    "BatchReady": 3,
}
WEIGHTS = [{**OFTEN, "Seal": 0.05, "Retire": 0.2, "Restore": 0.5, "Limit": 0.5}.get(tag, 2) for tag in TAGS]
EDGES = (
    0,
    1,
    -1,
    2,
    7,
    100,
    1 << 31,
    1 << 32,
    (1 << 53) + 1,
    (1 << 63) - 1,
    1 << 63,
    (1 << 64) - 1,
    -(1 << 63),
)
TEXTS = (
    "",
    "a",
    "work",
    "other",
    "w0",
    "c0",
    "\x00",
    "a\x00b",
    "Ünï",
    "\U0001f600",
    "'; --",
    "%",
    "x" * 5000,
)
PLAIN = (
    None,
    True,
    False,
    0.0,
    -0.0,
    1.5,
    float("nan"),
    float("inf"),
    b"",
    b"\xff\x00",
    [],
    {},
    [[]],
    {"a": 1},
)


class Generator:
    """Values of the types that calls are made of, most of them right."""

    def __init__(self, seed: int, refs: list[Ref]) -> None:
        self.random = random.Random(seed)
        self.refs = refs
        self.leases: deque[tuple[int, int]] = deque([(1, 1)], maxlen=20)
        self.wild = 0.0

    def call(self) -> dict[str, Any]:
        self.wild = self.random.choice((0.0, 0.0, 0.01, 0.1, 0.5))
        found = self.value(KINDS[self.random.choices(TAGS, WEIGHTS)[0]])
        if isinstance(found, dict) and self.random.random() < 0.9:
            found["queue"] = self.random.choice(("work", "work", "other", "b0", "b1"))
        return found

    def value(self, kind: inspect.Type) -> Any:
        if self.random.random() < self.wild:
            return self.anything()
        match kind:
            case inspect.IntType():
                return self.number()
            case inspect.StrType():
                return self.text()
            case inspect.BoolType():
                return self.random.random() < 0.5
            case inspect.NoneType():
                return None
            case inspect.AnyType():
                return self.anything(3)
            case inspect.ListType():
                return [self.value(kind.item_type) for _ in range(self.length())]
            case inspect.TupleType() if self.random.random() < 0.7:
                return self.random.choice(self.leases)
            case inspect.TupleType():
                return [self.value(item) for item in kind.item_types]
            case inspect.UnionType():
                return self.value(self.random.choice(kind.types))
            case inspect.StructType() if kind.cls is Ref:
                return msgspec.to_builtins(self.ref())
            case inspect.StructType():
                return self.struct(kind)
        raise AssertionError(f"calls hold a {kind} by now: tell the generator")

    def struct(self, kind: inspect.StructType) -> dict[str, Any]:
        found = {
            field.encode_name: self.value(field.type)
            for field in kind.fields
            if (field.required and self.random.random() > self.wild / 4) or self.random.random() < 0.4
        }
        if {"number", "attempt"} <= {*found} and self.random.random() < 0.7:
            found["number"], found["attempt"] = self.random.choice(self.leases)
        if kind.tag is not None:
            found[kind.tag_field] = kind.tag
        if self.random.random() < self.wild:
            found[self.text()] = self.anything()
        return found

    def ref(self) -> Ref:
        ref = self.random.choice(self.refs)
        if self.random.random() < 0.3:
            name = self.random.choice(("pool", "pack", "offset", "length", "check", "ordinal"))
            ref = msgspec.structs.replace(ref, **{name: self.random.choice((*EDGES, getattr(ref, name)))})
        if self.random.random() < 0.2:
            ref = msgspec.structs.replace(ref, linked=not ref.linked)
        return ref

    def number(self) -> int:
        if self.random.random() < 0.6:
            return self.random.randrange(0, 12)
        return self.random.choice(EDGES)

    def text(self) -> str:
        if self.random.random() < 0.7:
            return f"{self.random.choice('twcb')}{self.random.randrange(4)}"
        return self.random.choice(TEXTS)

    def length(self) -> int:
        return self.random.choice((0, 1, 1, 1, 2, 3, 8))

    def anything(self, depth: int = 2) -> Any:
        choice = self.random.random()
        if choice < 0.2:
            return self.random.choice(EDGES)
        if choice < 0.4:
            return self.random.choice(TEXTS)
        if choice < 0.7 or depth == 0:
            return self.random.choice(PLAIN)
        if choice < 0.75:
            return functools.reduce(lambda inner, _: [inner], range(self.random.choice((50, 500, 990))), [])
        if choice < 0.8:
            return msgspec.msgpack.Ext(self.random.choice((-1, 0, 5)), self.random.randbytes(8))
        if choice < 0.9:
            return [self.anything(depth - 1) for _ in range(self.length())]
        keys = [self.random.choice((*TEXTS, 1, -5, b"k", None, True, 1.5)) for _ in range(self.length())]
        return {key: self.anything(depth - 1) for key in keys}

    def body(self) -> tuple[bytes, str]:
        """An encoded call, some of them damaged, and what it is said to be."""
        call = self.call()
        try:
            json = self.random.random() < 0.4
            body = msgspec.json.encode(call) if json else msgspec.msgpack.encode(call)
        except (TypeError, ValueError, OverflowError, RecursionError):
            json, body = False, self.random.randbytes(50)
        if self.random.random() < 0.15:
            body = self.damaged(body)
        kind = "application/json" if json != (self.random.random() < 0.02) else "application/msgpack"
        return body, kind

    def damaged(self, body: bytes) -> bytes:
        place = self.random.randrange(len(body) + 1)
        return self.random.choice(
            (
                body[:place],
                body[:place] + self.random.randbytes(3) + body[place:],
                body[:place] + bytes([self.random.randrange(256)]) + body[place + 1 :],
                body * 2,
            )
        )


def test_nothing_that_is_sent_breaks_it(tmp_path: Path) -> None:
    statuses: Counter[int] = Counter()
    answered: Counter[str] = Counter()
    slowest = 0.0
    with serving(tmp_path / "pool") as server, Pool.open(tmp_path / "pool") as pool:
        ref = pool.publish([Record("one", b"1")])
        generator = Generator(SEED, [ref, ref.at(0), pool.publish([Record("two", b"2")], dependencies=[ref])])
        with Client(server.address, "work") as client:
            client.create()
        connection = http.client.HTTPConnection("127.0.0.1", server.options.port, timeout=60)
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            body, kind = generator.body()
            begun = time.monotonic()
            connection.request("POST", "/call", body, {"Content-Type": kind})
            response = connection.getresponse()
            answer = response.read()
            slowest = max(slowest, time.monotonic() - begun)
            statuses[response.status] += 1
            if response.status == 200:
                call = decode_call(body, json=kind.endswith("json"))
                answered[type(call).__name__] += 1
                if isinstance(call, m.Acquire) and kind.endswith("msgpack"):
                    found = msgspec.msgpack.decode(answer, type=m.Acquired)
                    generator.leases.extend((lease.number, lease.attempt) for lease in found.leases)
            if response.status >= 500 and response.status != 503:
                raise AssertionError(f"seed {SEED}: {body!r} as {kind}: {answer!r} {server.stop()[1]}")
            if sum(statuses.values()) % 500 == 0:
                _good_call(server.address)
        connection.close()
        _good_call(server.address)
        status, errors, _ = server.stop()
        assert (status, errors) == (0, "")
    print(f"{statuses}, slowest {slowest:.3f} s, {answered}")
    assert slowest < 60
    assert statuses[200] > 100 and statuses[400] > 100 and statuses[409] > 10, statuses
    assert len({*answered} & {*KINDS}) > len(KINDS) * 2 // 3, answered
    _sound(tmp_path / "pool")


def _good_call(address: str) -> None:
    with Client(address, "good", timeout=60) as client:
        client.create()
        name = f"good {time.monotonic_ns()}"
        assert client.submit([Task(name, metadata={"n": 1})]).added == 1
        (lease,) = client.acquire("me", tasks=[name]).leases
        assert client.complete(lease).task == name


def _sound(path: Path) -> None:
    """Reopened, every queue lists its tasks and its log."""
    with Pool.open(path) as pool, Coordinator(pool) as coordinator:
        found = audit(coordinator)
        assert not found.problems
        for stats in coordinator.queues():
            client = Client(coordinator, stats.queue)
            log = client.log(limit=100_000)
            assert [receipt.position for receipt in log] == sorted(receipt.position for receipt in log)
            assert len(client.tasks(limit=100_000)) == sum(
                (stats.pending, stats.leased, stats.completed, stats.dead, stats.cancelled)
            )
            client.limit()
            try:
                client.submit([Task("after everything")])
            except SpillError as error:
                assert "sealed" in str(error) or "content" in str(error)
