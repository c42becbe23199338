"""When two texts say the same."""

from __future__ import annotations

import re
import string
import unicodedata
from decimal import Decimal, InvalidOperation
from functools import lru_cache
from typing import Any

import msgspec

__all__ = ["plain", "references", "same_text", "words"]

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


@lru_cache(4096)
def words(text: str) -> tuple[str, ...]:
    """The words that are compared, as SQuAD's evaluation script 1.1 has them.

    Lower case, without ASCII punctuation and without the articles a, an and the (Rajpurkar et al. 2016,
    arXiv 1606.05250; https://rajpurkar.github.io/SQuAD-explorer). Before that the text is brought to NFC, so
    that two spellings of one character are one. A text of which nothing would be left, such as ``+`` or
    ``The``, is compared as it is, in lower case: otherwise any two of them would be the same.
    """
    lowered = unicodedata.normalize("NFC", text).lower()
    bare = lowered.translate(_PUNCTUATION)
    # the choice "A." is "A", although nothing is left of either without articles
    return tuple(_ARTICLES.sub(" ", bare).split() or bare.split() or lowered.split())


def plain(text: str) -> str:
    """A text in NFC, without regard to case, each stretch of white space as one space."""
    return " ".join(unicodedata.normalize("NFC", text).casefold().split())


def same_text(one: str, other: str) -> bool:
    """Equal as `plain` has them, or the same number: ``1,200`` is ``1200.0``, and ``3.5`` is not ``35``."""
    one, other = plain(one), plain(other)
    if one == other:
        return True
    number = _number(one)
    return number is not None and number == _number(other)


def references(expected: Any) -> list[str]:
    """What a row expects as texts, any of which is right; empty if it is no text, number or list of them."""
    values = expected if isinstance(expected, list) else [expected]
    if any(value is None or isinstance(value, dict | list) for value in values):
        return []
    return [value if isinstance(value, str) else msgspec.json.encode(value).decode() for value in values]


def _number(text: str) -> Decimal | None:
    if not re.fullmatch(r"[-+]?(\d{1,3}(,\d{3})+|\d+)?(\.\d+)?(e[-+]?\d{1,4})?", text, re.ASCII):
        return None
    try:
        return Decimal(text.replace(",", ""))
    except InvalidOperation:
        return None
