"""Partners that keep one promise less than a filesystem must. Run as: ``python partners.py FAULT FOLDER``.

Each stands for a mount that really behaves so: one whose locks are local to a client, one that caches
attributes, pages, names or folders, one whose rename is a copy, one that acknowledges what it has not stored.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from spillover.pool.partner import Partner, content, serve


class LocksAlone(Partner):
    def lock(self, name: str) -> bool:
        return True


class LockOutlivesHolder(Partner):
    def lock(self, name: str) -> bool:
        taken = super().lock(name)
        if taken and name.startswith("killed"):
            subprocess.Popen(["sleep", "7"], pass_fds=[self._opened(name)])
        return taken


class CountsUnlocked(Partner):
    def count(self, name: str, rounds: int, seconds: float) -> int:
        file = self._opened(name)
        for _ in range(rounds):
            number = int(os.pread(file, 8, 0) or b"0")
            time.sleep(0.002)
            os.pwrite(file, b"%08d" % (number + 1), 0)
        return rounds


class CreatesAgain(Partner):
    def create(self, name: str, text: str) -> bool:
        super().create(name, text)
        return True


class LinksOver(Partner):
    def link(self, name: str, text: str) -> bool:
        self.create(f"{name}.{text}", text)
        os.rename(self.folder / f"{name}.{text}", self.folder / name)
        return True


class KeepsSizes(Partner):
    sizes: dict[str, int] = {}  # noqa: RUF012

    def read_open(self, name: str, offset: int, length: int) -> tuple[int, str]:
        size, text = super().read_open(name, offset, length)
        size = self.sizes.setdefault(name, size)
        return size, text[: max(0, size - offset)]


class ZeroTail(Partner):
    def read_anew(self, name: str, offset: int, length: int) -> tuple[int, str]:
        size, text = super().read_anew(name, offset, length)
        return size, text[: len(text) // 2].ljust(len(text), "\0")


class KeepsPages(Partner):
    pages: dict[tuple[str, int], str] = {}  # noqa: RUF012

    def read_open(self, name: str, offset: int, length: int) -> tuple[int, str]:
        size, text = super().read_open(name, offset, length)
        kept = self.pages.setdefault((name, offset // 4096), text[:16])[: len(text)]
        return size, kept + text[len(kept) :]


class RenameCopies(Partner):
    def replace(self, name: str, version: int) -> None:
        data = content(version)
        with (self.folder / name).open("wb", buffering=0) as file:
            file.write(data[:4096])
            time.sleep(0.002)
            file.write(data[4096:])


class RenameUnlinksFirst(Partner):
    def replace(self, name: str, version: int) -> None:
        (self.folder / name).unlink(missing_ok=True)
        time.sleep(0.002)
        super().replace(name, version)


class KeepsNames(Partner):
    found: dict[str, str | None] = {}  # noqa: RUF012

    def read(self, name: str) -> str | None:
        return self.found.setdefault(name, super().read(name)) if "replaced" in name else super().read(name)


class KeepsFolders(Partner):
    listed: list[str] = []  # noqa: RUF012

    def names(self) -> list[str]:
        self.listed = self.listed or super().names()
        return self.listed


class OpensRemoved(Partner):
    def read(self, name: str) -> str | None:
        return super().read(name) or ("" if "listed" in name else None)


class ZeroesRemoved(Partner):
    def read_open(self, name: str, offset: int, length: int) -> tuple[int, str]:
        size, text = super().read_open(name, offset, length)
        removed = os.fstat(self._opened(name)).st_nlink == 0
        return size, "\0" * len(text) if removed else text


class SharesDatabase(Partner):
    def open_database(self, name: str) -> bool:
        return super().open_database(name) or True


class LosesCommits(Partner):
    def insert(self, first: int, stop: int) -> None:
        super().insert(first, stop - 1)


class NeverAnswers(Partner):
    def names(self) -> list[str]:
        time.sleep(60)
        return []


class Ends(Partner):
    def names(self) -> list[str]:
        os._exit(1)


class DiskFails(Partner):
    def append(self, name: str, text: str) -> float:
        raise OSError(5, "Input/output error")


if __name__ == "__main__":
    serve(globals()[sys.argv[1]](Path(sys.argv[2])))
