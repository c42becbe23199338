"""An owner in a process of its own that does what it is told, a line at a time.

    python -m state.worker URI LEASE_SECONDS [takeover]

Prints ``owned GENERATION`` or an error, then answers ``publish N``, ``check``, ``asked`` and ``release``.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from spillover.errors import SpillError
from spillover.state import Owned, State
from spillover.store import open_store

IDENTITY = {"work": "worker"}


class Worker:
    """The parent's side of such a process."""

    def __init__(self, uri: str, lease: float, *, takeover: bool = False) -> None:
        command = [sys.executable, "-m", "state.worker", uri, str(lease), *(["takeover"] if takeover else [])]
        self.process = subprocess.Popen(
            command,
            cwd=Path(__file__).parent.parent,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def hear(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def ask(self, command: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        return self.hear()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


def serve(owned: Owned) -> None:
    print(f"owned {owned.generation}", flush=True)
    for line in sys.stdin:
        try:
            print(answer(owned, *line.split()), flush=True)
        except SpillError as error:
            print(f"{type(error).__name__}: {error}", flush=True)


def answer(owned: Owned, command: str, step: str = "0") -> str:
    if command == "publish":
        writer = owned.payload("ckpt", f"step-{int(step):09d}")
        writer.add("state.json", step.encode())
        owned.publish("ckpt", writer.commit(step=int(step)), {"step": int(step)})
    elif command == "check":
        owned.check()
    elif command == "asked":
        return owned.stop_requested or "no"
    elif command == "release":
        owned.release()
    return "ok"


def main(uri: str, lease: str, *flags: str) -> None:
    try:
        with State(open_store(uri), lease_seconds=float(lease)).acquire(
            IDENTITY, takeover="takeover" in flags
        ) as owned:
            serve(owned)
    except SpillError as error:
        print(f"{type(error).__name__}: {error} Try: {error.hint}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
