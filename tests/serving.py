"""Coordinators in processes of their own, over HTTP, to be killed, stopped and waited for.

Run as ``python tests/serving.py OPTIONS``, where ``OPTIONS`` is the JSON of `Options`. It prints ``waiting``
once it stands by and ``ready`` once it accepts connections.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from history import Recorder, record_answers
from spillover.errors import LockContended, SpillError, StoreError
from spillover.pool import Pool
from spillover.queue import Coordinator
from spillover.queue.inbox import MAX_WAITING, MAX_WAITING_BYTES
from spillover.queue.server import serve
from spillover.queue.standby import standby

SECONDS = 60.0
"""The longest that a test waits for anything of a server."""


class Options(msgspec.Struct, kw_only=True):
    """How a coordinator is to run.

    Attributes:
        standby: wait for the former coordinator's death.
        takeover: do not ask whether it is dead.
        maintain: seconds between two rounds of collection and compaction; 0 for none.
        pack_bytes: size at which compaction ends a pack.
        history: folder to record in what is answered.
        max_waiting: calls that may wait.
        max_waiting_bytes: of them.
    """

    pool: str
    port: int
    token: str | None = None
    lease_seconds: float = 300.0
    standby: bool = False
    takeover: bool = False
    maintain: float = 0.0
    pack_bytes: int = 1 << 20
    history: str | None = None
    max_waiting: int = MAX_WAITING
    max_waiting_bytes: int = MAX_WAITING_BYTES


class Server:
    """A coordinator's process as a test sees it. A context manager: leaving it kills the process."""

    def __init__(self, options: Options, environment: dict[str, str] | None = None) -> None:
        self.options = options
        self.process = subprocess.Popen(
            [sys.executable, __file__, msgspec.json.encode(options).decode()],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
        )
        self.said = b""

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.options.port}"

    def wait(self, word: str) -> Server:
        """Return once the process said ``word``; raise with its errors if it ends before."""
        end = time.monotonic() + SECONDS
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            while word.encode() not in self.said.split():
                left = end - time.monotonic()
                if left < 0 or not selector.select(left):
                    raise AssertionError(f"a server did not say {word!r} in {SECONDS:g} s: {self.said!r}")
                piece = os.read(self.process.stdout.fileno(), 4096)
                if not piece:
                    errors = self.process.stderr.read().decode()
                    raise AssertionError(f"a server ended ({self.process.wait()}): {self.said!r} {errors}")
                self.said += piece
        return self

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.wait(SECONDS)

    def stop(self) -> tuple[int, str, float]:
        """SIGTERM; returns its exit status, what it said on standard error, and the seconds it took."""
        begun = time.monotonic()
        self.process.terminate()
        _, errors = self.process.communicate(timeout=SECONDS)
        return self.process.returncode, errors.decode(), time.monotonic() - begun

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *exc: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait(SECONDS)
        self.process.stdout.close()
        self.process.stderr.close()


def free_port() -> int:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@contextlib.contextmanager
def serving(pool: Path, **options: object) -> Iterator[Server]:
    """A server that accepts connections."""
    with Server(Options(pool=str(pool), port=free_port(), **options)) as server:
        yield server.wait("ready")


def _coordinator(options: Options, pool: Pool) -> Coordinator:
    if not options.standby:
        return Coordinator(
            pool,
            lease_seconds=options.lease_seconds,
            takeover=options.takeover,
            max_waiting=options.max_waiting,
            max_waiting_bytes=options.max_waiting_bytes,
        )
    print("waiting", flush=True)
    return standby(pool, lease_seconds=options.lease_seconds)


def _maintain(coordinator: Coordinator, seconds: float, over: threading.Event) -> None:
    while not over.wait(seconds):
        try:
            coordinator.owners.collect()
            coordinator.owners.compact()
        except (LockContended, StoreError) as error:
            print(f"maintenance: {error}", file=sys.stderr, flush=True)


def main() -> None:
    options = msgspec.json.decode(sys.argv[1], type=Options)
    over = threading.Event()
    try:
        with (
            Pool.open(options.pool, create=True, pack_bytes=options.pack_bytes) as pool,
            _coordinator(options, pool) as coordinator,
        ):
            if options.history:
                record_answers(coordinator, Recorder(Path(options.history), "coordinator"))
            maintaining = threading.Thread(target=_maintain, args=(coordinator, options.maintain, over))
            if options.maintain:
                maintaining.start()
            serve(
                coordinator,
                host="127.0.0.1",
                port=options.port,
                token=options.token,
                ready=lambda port: print("ready", flush=True),
            )
            over.set()
            if options.maintain:
                maintaining.join()
    except SpillError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        sys.exit(3)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    main()
