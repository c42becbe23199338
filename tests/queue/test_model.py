"""The coordinator against a plain model of it: any calls, in any order, with anything in between."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from queue_model import Model
from queued import SECONDS, Place
from spillover.errors import Collected, SpillError
from spillover.pool import Ref
from spillover.queue import Completion, Failure, Lease, Task, Yielded
from spillover.queue import messages as m
from spillover.queue.schema import STATUS

FAST = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
queues = st.sampled_from(["work", "work", "work", "other", "fork"])
keys = st.sampled_from([None, None, None, "a", "b"])
names = st.sampled_from([f"{kind}{n}" for kind in ("task", "prompt:") for n in range(4)])
workers = st.sampled_from(["me", "you", "they"])
consumers = st.sampled_from(["trainer", "archive"])
batches = st.sampled_from(["batch", "other batch"])
checkpoints = st.sampled_from(["then", "later"])
positions = st.lists(st.integers(0, 6), max_size=4)
metadata = st.sampled_from([None, 0, {"a": [1, None], "b": "ü"}])
stages = st.sampled_from([m.DELIVERY, m.PARTIAL, m.FRESH])
ranks = st.sampled_from([m.UNRANKED, 0, -5])
lanes = st.sampled_from(["", "", "", "lane"])
payloads = st.sampled_from(["none", "none", "new", "linked", "old"])
which = st.integers(0, 9)
FIELDS = """status stage rank attempt failures position input metadata worker failure""".split()


class Queues(RuleBasedStateMachine):
    """Every call goes to both, and both must answer the same or refuse for the same reason."""

    @initialize()
    def open(self) -> None:
        self.folder = Path(tempfile.mkdtemp(dir=FAST))
        self.place = Place(self.folder / "pool", pack_bytes=1)  # a pack each: what is not needed can go
        self.model = Model(SECONDS)
        self.model.now = self.place.clock.now
        self.leases: list[Lease] = []
        self.asked: list[m.Call] = []
        self.refs: list[Ref] = []
        for name in ("work", "other"):
            self.do(m.Create(queue=name))

    def do(self, call: m.Call) -> Any:
        try:
            wanted = self.model.call(call)
        except SpillError as refused:
            with pytest.raises(SpillError) as caught:
                self.place.coordinator.call(call)
            assert type(caught.value) is type(refused), call
            return None
        answer = self.place.coordinator.call(call)
        if call.key is not None:
            self.asked.append(call)
        if isinstance(answer, m.Acquired):
            assert _unnumbered(answer) == _unnumbered(wanted), call
            self.bind(call.queue, answer.leases)
        else:
            assert answer == wanted, call
        return answer

    def bind(self, queue: str, leases: list[Lease]) -> None:
        """Tell the model the numbers; a repeated answer may speak of tasks that are not there any more."""
        for lease in leases:
            row = self.model.queues[queue].rows.get(lease.task)
            current = row is not None and (row.status, row.attempt) == ("leased", lease.attempt)
            if row is not None and current and row.number is None:
                self.model.bind(queue, [lease])
        self.leases += leases

    def payload(self, kind: str) -> Ref | None:
        if kind == "none":
            return None
        if kind == "old" and self.refs:
            return self.refs[-1 - len(self.refs) // 2]
        below = next((ref for ref in reversed(self.refs) if ref not in self.model.gone), None)
        if kind == "linked" and below is not None:
            ref = self.place.publish(f"payload {len(self.refs)}", below)
            self.model.links[ref] = below
        else:
            ref = self.place.publish(f"payload {len(self.refs)}")
        self.refs.append(ref)
        return ref

    def lease(self, number: int) -> tuple[int, int]:
        """One of the latest leases, which may long be over; sometimes one that never was."""
        if number >= len(self.leases) or number == 9:
            return (number * 1000 + 1, 1)
        lease = self.leases[-1 - number]
        return (lease.number, lease.attempt)

    @rule(
        queue=queues,
        key=keys,
        ids=st.lists(names, max_size=4),
        kind=payloads,
        metadata=metadata,
        stage=stages,
        rank=ranks,
        lane=lanes,
        attempts=st.sampled_from([1, 2, 3]),
        producer=st.sampled_from([None, "p"]),
        again=st.booleans(),
    )
    def submit(
        self, queue: str, key: str | None, ids: list[str], kind: str, again: bool, **given: Any
    ) -> None:
        attempts, producer = given.pop("attempts"), given.pop("producer")
        rows = self.model.queues[queue].rows if queue in self.model.queues else {}
        ref = self.payload(kind)
        tasks = [Task(name, input=ref, max_attempts=attempts, **given) for name in ids]
        tasks = [rows[task.id].task if again and task.id in rows else task for task in tasks]
        cursor = len(self.refs)
        self.do(m.Submit(queue=queue, key=key, tasks=tasks, producer=producer, cursor=cursor))

    @rule(
        queue=queues,
        key=keys,
        worker=workers,
        limit=st.integers(0, 5),
        lane=lanes,
        prefix=st.sampled_from(["", "", "prompt:"]),
        ids=st.none() | st.lists(names, max_size=3),
    )
    def acquire(self, queue: str, key: str | None, ids: list[str] | None, **given: Any) -> None:
        self.do(m.Acquire(queue=queue, key=key, tasks=ids, **given))

    @rule(queue=queues, numbers=st.lists(which, max_size=3))
    def renew(self, queue: str, numbers: list[int]) -> None:
        self.do(m.Renew(queue=queue, leases=[self.lease(n) for n in numbers]))

    @rule(queue=queues, key=keys, numbers=st.lists(which, max_size=3), kind=payloads, metadata=metadata)
    def complete(self, queue: str, key: str | None, numbers: list[int], kind: str, metadata: Any) -> None:
        ref = self.payload(kind)
        done = [Completion(*self.lease(n), ref, metadata) for n in numbers]
        self.do(m.Complete(queue=queue, key=key, results=done))

    @rule(
        queue=queues,
        key=keys,
        numbers=st.lists(which, max_size=2),
        kind=payloads,
        metadata=metadata,
        stage=stages,
        rank=ranks,
    )
    def yield_tasks(self, queue: str, key: str | None, numbers: list[int], kind: str, **given: Any) -> None:
        ref = self.payload(kind)
        tasks = [Yielded(*self.lease(n), ref, **given) for n in numbers]
        self.do(m.Yield(queue=queue, key=key, tasks=tasks))

    @rule(queue=queues, key=keys, numbers=st.lists(which, max_size=3))
    def release(self, queue: str, key: str | None, numbers: list[int]) -> None:
        self.do(m.Release(queue=queue, key=key, leases=[self.lease(n) for n in numbers]))

    @rule(queue=queues, key=keys, numbers=st.lists(which, max_size=2), retryable=st.booleans())
    def fail(self, queue: str, key: str | None, numbers: list[int], retryable: bool) -> None:
        failures = [Failure(*self.lease(n), f"reason {n}", retryable) for n in numbers]
        self.do(m.Fail(queue=queue, key=key, failures=failures))

    @rule(queue=queues, key=keys, kind=st.sampled_from([m.Cancel, m.Retry]), ids=st.lists(names, max_size=3))
    def cancel_or_retry(self, queue: str, key: str | None, kind: Any, ids: list[str]) -> None:
        self.do(kind(queue=queue, key=key, tasks=ids))

    @rule(queue=st.sampled_from(["other", "fork"]), kind=st.sampled_from([m.Seal, m.Create]))
    def seal_or_create(self, queue: str, kind: Any) -> None:
        self.do(kind(queue=queue))

    @rule(
        queue=queues,
        key=keys,
        unfinished=st.none() | st.integers(0, 6),
        undelivered=st.none() | st.integers(0, 6),
    )
    def limit(self, queue: str, key: str | None, unfinished: int | None, undelivered: int | None) -> None:
        self.do(m.Limit(queue=queue, key=key, unfinished=unfinished, undelivered=undelivered))

    @rule(queue=queues, key=keys, worker=st.sampled_from(["they", "nobody"]))
    def retire(self, queue: str, key: str | None, worker: str) -> None:
        self.do(m.Retire(queue=queue, key=key, worker=worker))

    @rule(queue=queues, key=keys, consumer=consumers, start=st.none() | st.integers(0, 3))
    def open_consumer(self, queue: str, key: str | None, consumer: str, start: int | None) -> None:
        self.do(m.OpenConsumer(queue=queue, key=key, consumer=consumer, start=start))

    @rule(queue=queues, key=keys, consumer=consumers, positions=positions, save=st.booleans(), kind=payloads)
    def ack(self, queue: str, key: str | None, consumer: str, positions: list[int], **given: Any) -> None:
        call = m.Ack(queue=queue, key=key, consumer=consumer, positions=positions)
        if given["save"]:
            ref = self.payload(given["kind"])
            call = msgspec.structs.replace(call, save=True, state=positions, state_ref=ref)
        self.do(call)

    @rule(queue=queues, key=keys, consumer=consumers, position=st.integers(0, 4))
    def rewind(self, queue: str, key: str | None, consumer: str, position: int) -> None:
        self.do(m.Rewind(queue=queue, key=key, consumer=consumer, position=position))

    @rule(queue=queues, batch=batches, consumer=consumers, positions=positions, kind=payloads)
    def plan(self, queue: str, batch: str, consumer: str, positions: list[int], kind: str) -> None:
        ref = self.payload(kind)
        self.do(m.PlanBatch(queue=queue, batch=batch, consumer=consumer, positions=positions, plan=ref))

    @rule(queue=queues, batch=batches, kind=payloads, finish=st.booleans())
    def ready(self, queue: str, batch: str, kind: str, finish: bool) -> None:
        self.do(m.BatchReady(queue=queue, batch=batch, ready=self.payload(kind)))
        if finish:
            self.do(m.FinishBatch(queue=queue, batch=batch))

    @rule(
        queue=queues,
        key=keys,
        checkpoint=checkpoints,
        kind=st.sampled_from([m.Snapshot, m.Snapshot, m.Fork, m.Restore, m.DropCheckpoint]),
    )
    def checkpoint(self, queue: str, key: str | None, checkpoint: str, kind: Any) -> None:
        self.do(kind(queue=queue, key=key, checkpoint=checkpoint))

    @rule(queue=queues, position=st.integers(0, 5))
    def trim(self, queue: str, position: int) -> None:
        self.do(m.Trim(queue=queue, position=position))

    @precondition(lambda self: self.asked)
    @rule(number=which)
    def repeat(self, number: int) -> None:
        self.do(self.asked[-1 - number % len(self.asked)])

    @rule(seconds=st.sampled_from([0.0, 1.0, SECONDS / 2, SECONDS, SECONDS + 1]))
    def wait(self, seconds: float) -> None:
        self.place.clock.pass_(seconds)
        self.model.now += seconds

    @rule()
    def restart(self) -> None:
        self.place.restart()
        self.model.now = self.place.clock.now
        self.model.restart()

    @rule(compact=st.booleans())
    def collect(self, compact: bool) -> None:
        self.place.pool.seal()
        self.place.pool.settle(self.refs)
        assert not self.place.coordinator.owners.collect().damaged
        if compact:
            self.place.coordinator.owners.compact(min_owned=1.0)
        needed = self.model.needed()
        self.model.gone |= {*self.refs} - needed
        for number, ref in enumerate(self.refs):
            if ref in self.model.gone:
                with pytest.raises(Collected):
                    self.place.read(ref)
            else:
                assert self.place.read(ref) == f"payload {number}"

    @invariant()
    def alike(self) -> None:
        if not hasattr(self, "place"):
            return
        self.place.account()
        self.model.expire()
        call = self.place.coordinator.call
        for name, queue in self.model.queues.items():
            stats = call(m.ReadStats(queue=name))
            assert [getattr(stats, status) for status in STATUS] == [len(queue.of(s)) for s in STATUS]
            assert (stats.positions, stats.sealed) == (queue.positions, queue.sealed)
            bounds = (stats.undelivered, stats.max_unfinished, stats.max_undelivered)
            assert bounds == (len(queue.held), queue.unfinished, queue.undelivered)
            found = {task.id: task for task in call(m.ListTasks(queue=name))}
            assert found.keys() == queue.rows.keys()
            for row in queue.rows.values():
                task = found[row.task.id]
                for field in (
                    "status",
                    "stage",
                    "rank",
                    "attempt",
                    "failures",
                    "position",
                    "input",
                    "metadata",
                ):
                    assert getattr(task, field) == getattr(row, field), (task, row)
                assert (task.worker, task.failure) == (row.worker, row.failure), (task, row)
            assert call(m.ReadLog(queue=name)) == [queue.log[position] for position in sorted(queue.log)]
            for consumer in queue.consumers:
                query = m.ReadConsumer(queue=name, consumer=consumer)
                assert call(query) == self.model.consumer(queue, consumer)
            for batch in queue.batches.values():
                assert call(m.ReadBatch(queue=name, batch=batch.id)) == batch
            assert call(m.ReadProducer(queue=name, producer="p")) == queue.cursors.get("p")
            infos = [
                self.model.info(c) for c, (parent, _) in self.model.checkpoints.items() if parent == name
            ]
            assert call(m.ReadCheckpoints(queue=name)) == infos

    def teardown(self) -> None:
        if hasattr(self, "place"):
            self.place.close()
            shutil.rmtree(self.folder)


def _unnumbered(answer: m.Acquired) -> m.Acquired:
    leases = [msgspec.structs.replace(lease, number=0) for lease in answer.leases]
    return m.Acquired(leases, answer.status)


QUIET = [HealthCheck.too_slow, HealthCheck.filter_too_much]
TestSome = Queues.TestCase
TestSome.settings = settings(
    max_examples=30, stateful_step_count=40, deadline=None, suppress_health_check=QUIET
)


@pytest.mark.slow
class TestMany(Queues.TestCase):
    settings = settings(
        max_examples=300,
        stateful_step_count=60,
        deadline=None,
        suppress_health_check=QUIET,
        print_blob=True,
    )
