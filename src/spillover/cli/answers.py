"""What a command that looks at something prints: one JSON document, or lines that a person reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

__all__ = ["answer"]


def answer(result: Any, json: bool, told: Callable[[], Iterable[str]]) -> None:
    """Print ``result`` as JSON, or as the lines of ``told``."""
    if json:
        import msgspec

        print(msgspec.json.encode(result).decode())
        return
    for line in told():
        print(line)
