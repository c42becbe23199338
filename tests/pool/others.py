"""Another process of a pool, mounts of one's own, and refusals to look at."""

from __future__ import annotations

import errno
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from spillover.errors import SpillError

TESTS = Path(__file__).resolve().parents[1]
WRITER = """
import sys
from pool.content import records
from spillover.errors import SpillError
from spillover.pool import Pool

pool = Pool.open(sys.argv[1])
for line in sys.stdin:
    word, ident = line.split()
    try:
        print(pool.publish(records(ident)) if word == "publish" else pool.owners().names(), flush=True)
    except SpillError as error:
        print(f"{type(error).__name__}: {error} | {error.hint}", flush=True)
"""


class Other:
    """Another process that publishes when it is told to."""

    def __init__(self, folder: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(folder)],
            cwd=TESTS,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self._process.pid

    def send(self, word: str, ident: str = "-") -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{word} {ident}\n")
        self._process.stdin.flush()

    def hear(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def publish(self, ident: str) -> str:
        self.send("publish", ident)
        return self.hear()

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()


@contextmanager
def mounted(folder: Path, *options: str) -> Iterator[Path]:
    folder.mkdir(exist_ok=True)
    done = subprocess.run(["mount", *options, str(folder)], capture_output=True, text=True)
    assert done.returncode == 0, f"these tests must be allowed to mount: {done.stderr.strip()}"
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextmanager
def filled(folder: Path, leaving: int) -> Iterator[None]:
    """A filesystem with only ``leaving`` bytes free."""
    ballast = folder / "ballast"
    with ballast.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError as error:
            assert error.errno == errno.ENOSPC
        file.truncate(max(0, file.tell() - leaving))
    yield
    ballast.unlink()


@contextmanager
def refused(kind: type[SpillError], *words: str) -> Iterator[None]:
    with pytest.raises(kind) as caught:
        yield
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in f"{caught.value} | {caught.value.hint}", str(caught.value)
