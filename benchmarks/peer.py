"""Processes that a benchmark talks to, and the peer's virtual environment.

The environment holds the peer alone, 3 MB without its dependencies: NumPy and torch are those of the Python
that runs the benchmark, so that both sides use the same ones and no second torch is fetched.
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


def environment() -> Path:
    """The Python of the peer's environment, which is made when it is not there."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "spillover-peers" / f"{PACKAGE}-{VERSION}-py{sysconfig.get_python_version()}"
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        print(f"installing {PACKAGE} {VERSION} into {folder}", flush=True)
        venv.create(folder, clear=True, with_pip=True)
        command = ["-m", "pip", "install", "--quiet", "--no-deps", f"{PACKAGE}=={VERSION}"]
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

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()
