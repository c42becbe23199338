"""Sizes as people write them."""

from __future__ import annotations

import re

from spillover.errors import InputError

__all__ = ["parse_size"]

_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?(?:([kmgt])(i?))?b?", re.IGNORECASE)


def parse_size(text: str, examples: str = "20GB, 512MiB or 1000000") -> int:
    """``20GB`` and the like in bytes; k, M, G and T are powers of 1000, with an i of 1024.

    Raises:
        InputError: not a size; the hint gives `examples`.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise InputError(f"{text!r} is no size", hint=examples)
    base = 1024 if match[3] else 1000
    return int(float(match[1]) * base ** " kmgt".index((match[2] or " ").lower()))
