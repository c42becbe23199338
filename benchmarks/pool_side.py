"""One side of `pool_vs_straw.py`, in a process of its own: ours, the peer, or bare system calls.

It answers one JSON request a line, ``{"call": name, ...arguments}``, with ``{"value": ...}`` or
``{"error": text}``. All sides run the same loops on the same bytes; what differs is the few lines that call
a store. A side is imported only when it is asked for: the peer needs nothing of ours, and ours nothing of it.
"""

from __future__ import annotations

import base64
import itertools
import json
import math
import multiprocessing
import os
import pickle
import shutil
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

Handle = str
ROWS = (8192, 48, 8)
"""Shape of the tensor that rows are read from: routed experts, [tokens, layers, top k], int32, 12.6 MB."""


class Ours:
    """`spillover.pool`: one open pool and, once asked for, one read session."""

    def __init__(self, folder: str, online: bool) -> None:
        from spillover.pool import Pool, Publication, Record

        self._publication, self._record = Publication, Record
        self.pool = Pool.open(folder, create=True)

    def publish(self, payload: bytes, submission: str) -> object:
        return self.pool.publish([self._record("sample", payload)], submission=submission)

    def publish_many(self, payloads: list[bytes], submission: str) -> list:
        each = [self._publication([self._record("sample", payload)]) for payload in payloads]
        return list(self.pool.publish_many(each, submission=submission))

    def publish_records(self, payloads: list[bytes], submission: str) -> object:
        records = [self._record(str(number), payload) for number, payload in enumerate(payloads)]
        return self.pool.publish(records, submission=submission)

    def publish_tensors(self, tensors: dict[str, torch.Tensor], submission: str) -> list[Handle]:
        return [str(ref) for ref in self.pool.publish_tensors(tensors, submission=submission).values()]

    def load(self, handle: Handle) -> torch.Tensor:
        return self.pool.tensor(self._ref(handle)).torch()

    def load_into(self, handle: Handle, buffer: torch.Tensor) -> None:
        self.pool.tensor(self._ref(handle)).read_into(buffer)

    def load_all(self, handles: list[Handle]) -> list[torch.Tensor]:
        refs = [self._ref(handle) for handle in handles]
        with self.pool.reader() as reader:
            return [reader.tensor(ref).torch() for ref in refs]

    def rows(self, handle: Handle) -> Callable[[int], object]:
        tensor = self.pool.tensor(self._ref(handle))
        return lambda row: tensor[row : row + 1]

    def keep(self, live: list, published: list) -> None:
        """Nothing but ``live`` is owned, and nothing more will be written."""
        with self.pool.owners() as owners:
            owners.retain("live", live)
        self.pool.close()

    def collect(self) -> None:
        with self.pool.owners() as owners:
            owners.collect()
            owners.compact()

    def _ref(self, handle: Handle):
        from spillover.pool import Ref

        return Ref.parse(handle)

    def close(self) -> None:
        self.pool.close()


class Peer:
    """`straw.SharedFilesystemStore` with the codecs its tensors need."""

    def __init__(self, folder: str, online: bool) -> None:
        import straw

        self._straw = straw
        codecs = ("bytes.v1", "json.v1", "tensor.v1")
        self.store = straw.SharedFilesystemStore(folder, "benchmark", codecs=codecs, online_gc=online)

    def publish(self, payload: bytes, submission: str) -> object:
        return self.store.publish([self._straw.Record("sample", payload)], submission_id=submission)

    def publish_many(self, payloads: list[bytes], submission: str) -> list:
        records = [self._straw.Record(str(number), payload) for number, payload in enumerate(payloads)]
        each = [self._straw.Publication((record,)) for record in records]
        return list(self.store.publish_many(each, submission_id=submission))

    def publish_records(self, payloads: list[bytes], submission: str) -> object:
        records = [self._straw.Record(str(number), payload) for number, payload in enumerate(payloads)]
        return self.store.publish(records, submission_id=submission)

    def publish_tensors(self, tensors: dict[str, torch.Tensor], submission: str) -> list[Handle]:
        from straw.tensor import publish_tensors

        refs = publish_tensors(self.store, tensors, submission_id=submission)
        return [base64.b64encode(pickle.dumps(ref)).decode() for ref in refs]

    def load(self, handle: Handle) -> torch.Tensor:
        return pickle.loads(base64.b64decode(handle)).load()

    def load_all(self, handles: list[Handle]) -> list[torch.Tensor]:
        refs = [pickle.loads(base64.b64decode(handle)) for handle in handles]
        with self.store.read_session() as reader:
            return [ref.load(reader=reader) for ref in refs]

    def rows(self, handle: Handle) -> Callable[[int], object]:
        tensor = pickle.loads(base64.b64decode(handle))
        return lambda row: tensor[row : row + 1]

    def keep(self, live: list, published: list) -> None:
        self.store.retain("live", live)
        self.store.release_publications(published)
        self.store.seal()

    def collect(self) -> None:
        self.store.collect_garbage()

    def close(self) -> None:
        self.store.close()


class Raw:
    """The same bytes by system calls: one write at the end of one file and one fdatasync a call."""

    def __init__(self, folder: str, online: bool) -> None:
        os.makedirs(folder, exist_ok=True)
        self._file = os.open(f"{folder}/{os.getpid()}", os.O_CREAT | os.O_RDWR | os.O_APPEND)

    def publish(self, payload: bytes | memoryview, submission: str) -> None:
        left = memoryview(payload)
        while left:
            left = left[os.write(self._file, left) :]
        os.fdatasync(self._file)

    def publish_many(self, payloads: list[bytes], submission: str) -> None:
        self.publish(b"".join(payloads), submission)

    publish_records = publish_many

    def publish_tensors(self, tensors: dict[str, torch.Tensor], submission: str) -> None:
        for tensor in tensors.values():
            self.publish(memoryview(tensor.numpy()).cast("B"), submission)

    def close(self) -> None:
        os.close(self._file)


class Grouped(Raw):
    """Raw for many threads: those that wait while one syncs share the next write and sync.

    One lock a call, no answers, no errors, no interruptions: about the least that a group commit can cost in
    CPython, and so what the machine allows.
    """

    def __init__(self, folder: str, online: bool) -> None:
        super().__init__(folder, online)
        self._lock = threading.Lock()
        self._waiting: list[Waiting] = []
        self._busy = False

    def publish(self, payload: bytes | memoryview, submission: str) -> None:
        mine = Waiting(payload)
        with self._lock:
            lead, self._busy = not self._busy, True
            if not lead:
                self._waiting.append(mine)
        if not lead:
            mine.woken.acquire()
            if mine.following is not None:
                mine.following.woken.release()
        if lead or mine.leads:
            self._lead(mine)

    def _lead(self, mine: Waiting) -> None:
        with self._lock:
            group, self._waiting = self._waiting, []
        super().publish(b"".join([mine.payload, *(each.payload for each in group)]), "")
        with self._lock:
            self._busy = bool(self._waiting)
            if self._busy:
                following = self._waiting.pop(0)
                following.leads = True
                following.woken.release()
        for each, after in itertools.pairwise(group):
            each.following = after
        if group:
            group[0].woken.release()


class Waiting:
    """A call of `Grouped`, whom it wakes after itself, and whether it is to write the next group."""

    __slots__ = ("following", "leads", "payload", "woken")

    def __init__(self, payload: bytes | memoryview) -> None:
        self.payload, self.leads = payload, False
        self.following: Waiting | None = None
        self.woken = threading.Lock()
        self.woken.acquire()


SIDES = {"ours": Ours, "peer": Peer, "raw": Raw, "grouped": Grouped}


class Calls:
    """What the benchmark may ask. Rates are per second; ``seconds`` is how long to go on."""

    def __init__(self, side: str) -> None:
        self._make = SIDES[side]
        self._numbers = itertools.count()
        self._buffer: torch.Tensor | None = None

    def open(self, folder: str, online: bool = True) -> None:
        self._store = self._make(folder, online)
        self._store.publish(bytes(16), self._submission())  # whatever is made once is made now

    def close(self) -> None:
        self._store.close()

    def publish(self, seconds: float, size: int) -> float:
        payload = os.urandom(size)
        return _rate(lambda: self._store.publish(payload, self._submission()), seconds)

    def publish_many(self, seconds: float, size: int, count: int) -> float:
        payloads = [os.urandom(size) for _ in range(count)]
        return count * _rate(lambda: self._store.publish_many(payloads, self._submission()), seconds)

    def publish_records(self, seconds: float, size: int, count: int) -> float:
        payloads = [os.urandom(size) for _ in range(count)]
        return count * _rate(lambda: self._store.publish_records(payloads, self._submission()), seconds)

    def publish_in_threads(self, seconds: float, size: int, threads: int) -> float:
        payload, counts = os.urandom(size), [0] * threads
        together = threading.Barrier(threads + 1)

        def work(number: int) -> None:
            together.wait()
            stop = time.perf_counter() + seconds
            while time.perf_counter() < stop:
                self._store.publish(payload, self._submission())
                counts[number] += 1

        with ThreadPoolExecutor(threads) as pool:
            workers = [pool.submit(work, number) for number in range(threads)]
            together.wait()
            start = time.perf_counter()
            for worker in workers:
                worker.result()
        return sum(counts) / (time.perf_counter() - start)

    def publish_in_processes(self, folder: str, seconds: float, size: int, processes: int) -> float:
        """Publications a second of ``processes`` writers, from when all of them have written once."""
        fork = multiprocessing.get_context("fork")
        together, counts = fork.Barrier(processes + 1), fork.Array("q", processes)
        first = fork.Process(target=self.open, args=(folder,))
        first.start()
        first.join()

        def work(number: int) -> None:
            self.open(folder)
            payload = os.urandom(size)
            together.wait()
            stop = time.perf_counter() + seconds
            while time.perf_counter() < stop:
                self._store.publish(payload, self._submission())
                counts[number] += 1

        workers = [fork.Process(target=work, args=(number,)) for number in range(processes)]
        for worker in workers:
            worker.start()
        together.wait(timeout=60)
        start = time.perf_counter()
        for worker in workers:
            worker.join()
        return sum(counts) / (time.perf_counter() - start)

    def publish_tensor(self, folder: str, count: int, size: int) -> float:
        """GB/s of ``count`` tensors of ``size`` bytes, one a call, in a new store that is removed again."""
        tensors, store = {"w": _random(size)}, self._make(folder, True)
        store.publish_tensors(tensors, self._submission())
        start = time.perf_counter()
        for _ in range(count):
            store.publish_tensors(tensors, self._submission())
        taken = time.perf_counter() - start
        store.close()
        shutil.rmtree(folder)
        return count * size / taken / 1e9

    def keep_tensors(self, count: int, size: int) -> list[Handle]:
        """Handles of ``count`` tensors of ``size`` bytes, published in one call."""
        tensors = {str(number): _random(size) for number in range(count)}
        return self._store.publish_tensors(tensors, self._submission())

    def keep_rows(self) -> Handle:
        import torch

        experts = _random(4 * math.prod(ROWS)).view(torch.int32).reshape(ROWS)
        return self._store.publish_tensors({"experts": experts}, self._submission())[0]

    def load(self, handle: Handle) -> float:
        """Seconds to load a tensor into memory of its own."""
        return _seconds(lambda: self._store.load(handle))

    def load_into(self, handle: Handle, size: int) -> float:
        """Seconds to load a tensor into a buffer that was used before."""
        if self._buffer is None:
            self._buffer = _random(size)
        buffer = self._buffer
        return _seconds(lambda: self._store.load_into(handle, buffer))

    def load_each(self, handles: list[Handle]) -> float:
        return _seconds(lambda: [self._store.load(handle) for handle in handles])

    def load_all(self, handles: list[Handle]) -> float:
        return _seconds(lambda: self._store.load_all(handles))

    def peak(self, handle: Handle, size: int, reuse: bool) -> float:
        """How far resident memory rises while a tensor is loaded, buffer included, by the tensor's size."""
        import torch  # noqa: F401  before it is measured

        before = _peak_memory(reset=True)
        self.load_into(handle, size) if reuse else self._store.load(handle)
        return (_peak_memory(reset=False) - before) / size

    def rows(self, handle: Handle, seconds: float) -> float:
        """Seconds to read one row, another one each time."""
        read = self._store.rows(handle)
        numbers = itertools.cycle(range(0, ROWS[0], 61))
        read(1)
        return 1 / _rate(lambda: read(next(numbers)), seconds)

    def space(self, folder: str, groups: int, size: int, batched: bool) -> list[float]:
        """Bytes on disk by live bytes, one record of 16 live, before and after all that frees space."""
        live, published = [], []
        for _ in range(groups):
            payloads = [os.urandom(size) for _ in range(16)]
            if batched:
                refs = self._store.publish_many(payloads, self._submission())
            else:
                refs = [self._store.publish(payload, self._submission()) for payload in payloads]
            live.append(refs[0])
            published += refs
        self._store.keep(live, published)
        before = _disk(folder)
        self._store.collect()
        return [before / (groups * size), _disk(folder) / (groups * size)]

    def _submission(self) -> str:
        return f"{os.getpid()}-{next(self._numbers)}"


def _random(size: int) -> torch.Tensor:
    import torch

    return torch.randint(256, (size,), dtype=torch.uint8)


def _rate(operation: Callable[[], object], seconds: float) -> float:
    start = now = time.perf_counter()
    for count in itertools.count(1):
        operation()
        now = time.perf_counter()
        if now - start >= seconds:
            return count / (now - start)
    raise AssertionError("endless")


def _seconds(operation: Callable[[], object]) -> float:
    start = time.perf_counter()
    kept = operation()
    taken = time.perf_counter() - start
    del kept
    return taken


def _peak_memory(reset: bool) -> int:
    """The highest resident size of this process in bytes, since it was last reset."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def _disk(folder: str) -> int:
    return sum(path.stat().st_blocks * 512 for path in Path(folder).rglob("*") if path.is_file())


def main() -> None:
    answers, calls = os.fdopen(os.dup(1), "w"), Calls(sys.argv[1])
    os.dup2(2, 1)  # whatever a store prints is not an answer
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"value": getattr(calls, request.pop("call"))(**request)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
