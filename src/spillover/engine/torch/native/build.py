"""Compile the CPU kernels once per machine, for the very processor they run on.

The library lies under ``$XDG_CACHE_HOME/spillover/kernels`` (``~/.cache`` where that is not set), named by
what it was made from: sources, compiler, flags and processor. ``SPILL_NATIVE=0`` turns the kernels off.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCES = Path(__file__).with_name("source")
FLAGS = ("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-pthread", "-fno-math-errno")
_COMPILERS = ("c++", "g++", "clang++")


class CannotBuild(Exception):
    """Why there are no kernels, in a few words for the plan's line."""


def build() -> Path:
    """The compiled library, made now if this machine has none; `CannotBuild` says why not."""
    if os.environ.get("SPILL_NATIVE") == "0":
        raise CannotBuild("SPILL_NATIVE=0")
    compiler = _compiler()
    path = _folder() / f"{_key(compiler)}.so"
    if not path.exists():
        _compile(compiler, path)
    return path


def _compiler() -> str:
    for name in (os.environ.get("CXX"), *_COMPILERS):
        found = shutil.which(name) if name else None
        if found:
            return found
    raise CannotBuild("no C++ compiler was found")


def _folder() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    folder = cache / "spillover" / "kernels"
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    return _scratch()


@functools.cache
def _scratch() -> Path:
    """Where nothing can be kept, the library lives as long as the process."""
    return Path(tempfile.mkdtemp(prefix="spillover-kernels-"))


def _key(compiler: str) -> str:
    parts = [path.read_bytes() for path in sorted(SOURCES.iterdir())]
    parts += [" ".join((compiler, *FLAGS)).encode(), _output([compiler, "--version"]), _processor()]
    return hashlib.blake2b(b"\0".join(parts), digest_size=12).hexdigest()


def _processor() -> bytes:
    """The instruction sets that ``-march=native`` looks at."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_bytes().splitlines():
            if line.startswith((b"flags", b"Features")):
                return line
    return f"{platform.machine()} {platform.processor()}".encode()


def _output(command: list[str]) -> bytes:
    try:
        return subprocess.run(command, capture_output=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        raise CannotBuild(f"{command[0]} does not run") from None


def _compile(compiler: str, path: Path) -> None:
    """Two processes may do this at once: each puts a whole file in place."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        command = [compiler, *FLAGS, *map(str, sorted(SOURCES.glob("*.cpp"))), "-o", str(made)]
        done = subprocess.run(command, capture_output=True, timeout=600, check=False)
        if done.returncode == 0:
            made.replace(path)
            return
    reason = done.stderr.decode(errors="replace").strip().splitlines()
    raise CannotBuild(f"{compiler} failed: {reason[0] if reason else done.returncode}")
