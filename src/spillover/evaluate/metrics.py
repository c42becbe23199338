"""Metrics: what makes an answer right, from 0 to 1.

====================  ================================================================================
``exact_match``       the words of `expected`, and no others (`spillover.evaluate.text.words`)
``contains``          `expected` is somewhere in the answer, without regard to case and white space
``f1``                harmonic mean of the precision and recall of words, repeated words counted
``regex:PATTERN``     Python's ``re.search`` finds PATTERN; with a group, what the first one matched is
                      `expected`, as text or as a number
``json_field:PATH``   the answer is JSON and its value at PATH (``a.b.0``) is the one of `expected` at PATH,
                      or `expected` itself if that is no object; ``json_field:PATH=VALUE`` names the value
``json_schema``       the answer is JSON that the row's ``schema``, or the one in ``json_schema:FILE``, allows
``judge``             another model decides (`spillover.evaluate.judge`)
``script:FILE.py``    a program decides (`spillover.evaluate.script`)
====================  ================================================================================

A list in `expected` names several right answers: the best one counts. An answer may stand in a Markdown code
fence where JSON is wanted. What is no JSON scores 0.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from spillover.errors import InputError
from spillover.evaluate import schemas
from spillover.evaluate.text import plain, references, same_text, words
from spillover.evaluate.timing import TooSlow, time_limit

__all__ = ["KINDS", "Metric", "Question", "Unfit", "parse_metric"]

PATTERN_SECONDS = 1.0
"""Processor time that a pattern or a schema may take for one answer."""

_FENCED = re.compile(r"```[\w-]*[ \t]*\n(.*?)```", re.DOTALL)
_MISSING = object()


@dataclass(frozen=True)
class Question:
    """What a row knows of its right answer."""

    expected: Any = None
    schema: Any = None


class Unfit(Exception):
    """Raised for a row or an answer that a metric cannot be used on; not yet knowing the file and line."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


@dataclass(frozen=True)
class Metric:
    """One way to score.

    Attributes:
        spec: as it was written: ``regex:^yes``.
        kind: the part before the colon.
        argument: the part after it, empty without one.
        check: raises `Unfit` for a question that it cannot be used on.
        score: the score of an answer; None for ``judge`` and ``script``, which score elsewhere.
    """

    spec: str
    kind: str
    argument: str
    check: Callable[[Question], None]
    score: Callable[[str, Question], float] | None = None


def parse_metric(spec: str) -> Metric:
    """The metric that ``spec`` names.

    Raises:
        InputError: there is none, or its pattern, path, schema or file cannot be used.
    """
    kind, colon, argument = spec.partition(":")
    if kind not in KINDS:
        raise InputError(f"there is no metric {spec!r}", hint=f"use one of {', '.join(KINDS)}")
    if bool(argument) < bool(colon) or (argument and kind in WITHOUT_ARGUMENT):
        raise InputError(f"metric {spec!r}: {kind} takes no argument", hint=kind)
    if not argument and kind in WITH_ARGUMENT:
        raise InputError(f"metric {kind} needs an argument", hint=WITH_ARGUMENT[kind])
    return KINDS[kind](spec, argument)


def _exact_match(spec: str, argument: str) -> Metric:
    def score(answer: str, question: Question) -> float:
        given = words(answer)
        return float(any(given == words(one) for one in references(question.expected)))

    return Metric(spec, "exact_match", "", _comparable, score)


def _contains(spec: str, argument: str) -> Metric:
    def check(question: Question) -> None:
        _comparable(question)
        if not all(plain(one) for one in references(question.expected)):
            raise Unfit("'expected' is empty: every answer contains it")

    def score(answer: str, question: Question) -> float:
        given = plain(answer)
        return float(any(plain(one) in given for one in references(question.expected)))

    return Metric(spec, "contains", "", check, score)


def _f1(spec: str, argument: str) -> Metric:
    def score(answer: str, question: Question) -> float:
        given = words(answer)
        return max(_overlap(given, words(one)) for one in references(question.expected))

    return Metric(spec, "f1", "", _comparable, score)


def _overlap(given: tuple[str, ...], right: tuple[str, ...]) -> float:
    if not given or not right:
        return float(given == right)
    same = sum((Counter(given) & Counter(right)).values())
    return 2 * same / (len(given) + len(right))  # the harmonic mean of same / given and same / right


def _regex(spec: str, argument: str) -> Metric:
    try:
        pattern = re.compile(argument)
    except (re.error, OverflowError, RecursionError) as error:
        raise InputError(f"metric {spec!r}: the pattern is wrong: {error}", hint="regex:^yes") from None

    def check(question: Question) -> None:
        if pattern.groups:
            _comparable(question)

    def score(answer: str, question: Question) -> float:
        try:
            with time_limit(PATTERN_SECONDS):
                found = pattern.search(answer)
        except TooSlow:
            message = f"the pattern {argument!r} takes more than {PATTERN_SECONDS:g} s on the answer"
            raise Unfit(message, hint="write it without nested repetition") from None
        if found is None or not pattern.groups:
            return float(found is not None)
        return float(any(same_text(found[1] or "", one) for one in references(question.expected)))

    return Metric(spec, "regex", argument, check, score)


def _json_field(spec: str, argument: str) -> Metric:
    path, equals, text = argument.partition("=")
    names = path.split(".")
    if not all(names):
        raise InputError(f"metric {spec!r}: {path!r} is no path", hint="json_field:a.b.0")
    value = _literal(text) if equals else _MISSING

    def wanted(question: Question) -> Any:
        if value is not _MISSING:
            return value
        expected = question.expected
        return _at(expected, names) if isinstance(expected, dict) else expected

    def check(question: Question) -> None:
        if value is _MISSING and question.expected is None:
            raise Unfit(NOTHING, hint=f"add 'expected' to the row, or write {spec}=VALUE")
        if wanted(question) is _MISSING:
            raise Unfit(f"'expected' has nothing at {path!r}", hint="add it, or change the path")

    def score(answer: str, question: Question) -> float:
        return float(_same(_at(_json(answer), names), wanted(question)))

    return Metric(spec, "json_field", argument, check, score)


def _json_schema(spec: str, argument: str) -> Metric:
    given = schemas.read(Path(argument)) if argument else None

    def check(question: Question) -> None:
        if given is None and question.schema is None:
            raise Unfit("the row has no 'schema'", hint="add one, or --metric json_schema:FILE")
        if given is None:
            try:
                schemas.validator(msgspec.json.encode(question.schema))
            except InputError as error:
                raise Unfit(f"its schema is none: {error}", hint=error.hint) from None

    def score(answer: str, question: Question) -> float:
        value = _json(answer)
        if value is _MISSING:
            return 0.0
        try:
            with time_limit(PATTERN_SECONDS):
                return float(schemas.allows(given or msgspec.json.encode(question.schema), value))
        except TooSlow:
            message = f"the schema takes more than {PATTERN_SECONDS:g} s on the answer"
            raise Unfit(message, hint="write its patterns without nested repetition") from None
        except InputError as error:
            raise Unfit(str(error), hint=error.hint) from None

    return Metric(spec, "json_schema", argument, check, score)


def _judge(spec: str, argument: str) -> Metric:
    return Metric(spec, "judge", "", lambda question: None)


def _script(spec: str, argument: str) -> Metric:
    if not Path(argument).is_file():
        raise InputError(f"metric {spec!r}: {argument}: no such file", hint="script:FILE.py")
    return Metric(spec, "script", argument, lambda question: None)


KINDS: dict[str, Callable[[str, str], Metric]] = {
    "exact_match": _exact_match,
    "contains": _contains,
    "f1": _f1,
    "regex": _regex,
    "json_field": _json_field,
    "json_schema": _json_schema,
    "judge": _judge,
    "script": _script,
}
WITHOUT_ARGUMENT = ("exact_match", "contains", "f1", "judge")
WITH_ARGUMENT = {"regex": "regex:^yes", "json_field": "json_field:a.b", "script": "script:FILE.py"}
NOTHING = "there is nothing to compare the answer with"


def _comparable(question: Question) -> None:
    if question.expected is None or question.expected == []:
        raise Unfit(NOTHING, hint="add 'expected' to the row")
    if not references(question.expected):
        raise Unfit(
            "'expected' must be a text, a number or a list of them", hint="json_field:PATH compares objects"
        )


def _json(answer: str) -> Any:
    """The JSON value that an answer is, in a code fence or without; `_MISSING` if it is none."""
    fenced = _FENCED.search(answer)
    try:
        return msgspec.json.decode((fenced[1] if fenced else answer).strip())
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return _MISSING


def _at(value: Any, names: list[str]) -> Any:
    """The value at a path of keys and list positions, `_MISSING` where it leads nowhere."""
    for name in names:
        if isinstance(value, dict):
            value = value.get(name, _MISSING)
        elif isinstance(value, list) and re.fullmatch(r"\d{1,9}", name, re.ASCII) and int(name) < len(value):
            value = value[int(name)]
        else:
            return _MISSING
    return value


def _same(given: Any, wanted: Any) -> bool:
    """Equal JSON values; a text and a number are compared as texts."""
    if given is _MISSING:
        return False
    if isinstance(given, bool) or isinstance(wanted, bool):  # to Python, True is 1
        return given is wanted
    if isinstance(given, str | int | float) and isinstance(wanted, str | int | float):
        return same_text(*(references(one)[0] for one in (given, wanted)))
    if isinstance(given, list) and isinstance(wanted, list):
        return len(given) == len(wanted) and all(map(_same, given, wanted))
    if isinstance(given, dict) and isinstance(wanted, dict):
        return given.keys() == wanted.keys() and all(_same(given[key], wanted[key]) for key in given)
    return given is None and wanted is None


@lru_cache(256)
def _literal(text: str) -> Any:
    """A value on the command line: JSON if it is, else the text."""
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text
