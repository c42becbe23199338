"""Processes that a benchmark talks to, and the peers' virtual environments.

An environment holds one peer alone: what else it needs, such as NumPy and torch, is that of the Python that
runs the benchmark, so that both sides use the same and no second torch is fetched.
"""

from __future__ import annotations

import json
import os
import site
import subprocess
import sysconfig
import venv
from pathlib import Path
from typing import Any

PACKAGE = "straw-queue"
VERSION = "0.1.6"


def cache() -> Path:
    """The folder of what benchmarks keep from run to run."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "spillover-peers"


def environment(package: str = PACKAGE, version: str = VERSION, *beside: str, note: str = "") -> Path:
    """The Python of a peer's environment, which is made from PyPI when it is not there.

    ``beside`` are requirements that the borrowed packages lack; ``note`` says what the installation takes.
    """
    folder = cache() / f"{package}-{version}-py{sysconfig.get_python_version()}"
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        print(f"installing {package} {version} into {folder}{note and f': {note}'}", flush=True)
        venv.create(folder, clear=True, with_pip=True)
        command = ["-m", "pip", "install", "--quiet", "--no-deps", f"{package}=={version}", *beside]
        subprocess.run([python, *command], check=True)
        (folder / "complete").touch()
    packages = sysconfig.get_path("purelib", scheme="venv", vars={"base": str(folder)})
    Path(packages, "borrowed.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    return python


class Process:
    """A Python script that answers one JSON request a line; a context manager."""

    def __init__(self, *command: str | Path, settings: dict[str, str] | None = None) -> None:
        variables = os.environ | {"OMP_NUM_THREADS": "1"} | (settings or {})
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, env=variables, text=True, stdin=pipe, stdout=pipe)

    def ask(self, call: str, **arguments: Any) -> Any:
        """The value that ``call`` returns there; ends the benchmark with its error when it raises one."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"call": call, **arguments}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        answer = json.loads(line) if line else {"error": "the process ended"}
        if "error" in answer:
            raise SystemExit(f"{call} in {' '.join(map(str, self._process.args))}: {answer['error']}")
        return answer["value"]

    def close(self) -> None:
        """End it: its input is over."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            self._process.communicate()

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
