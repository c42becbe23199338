"""Metrics: what is right, what is wrong, and what cannot be scored."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from spillover.errors import InputError
from spillover.evaluate import Question, Unfit, parse_metric
from spillover.evaluate.timing import TooSlow, time_limit


def score(spec: str, answer: str, expected: Any = None, schema: Any = None) -> float:
    metric, question = parse_metric(spec), Question(expected, schema)
    metric.check(question)
    assert metric.score is not None
    return metric.score(answer, question)


@pytest.mark.parametrize(
    ("answer", "expected", "right"),
    [
        ("Paris", "Paris", 1),
        (" the PARIS!\n", "paris", 1),
        ("An apple, a day", "apple day", 1),
        ("Paris, France", "Paris", 0),
        ("theatre", "atre", 0),  # articles are words
        ("card_arrival", "card arrival", 0),
        ("Cafe\u0301", "Caf\u00e9", 1),  # two spellings of one character
        ("\u2460", "1", 0),  # but not other characters that look alike
        ("Paris\u00a0Texas", "Paris Texas", 1),
        ("+", "-", 0),  # nothing would be left of either
        ("The", "the", 1),
        ("The", "A", 0),
        ("", "x", 0),
        ("", "", 1),
        ("42", 42, 1),
        ("true", True, 1),
        ("Rome", ["Paris", "Rome"], 1),
        ("Oslo", ["Paris", "Rome"], 0),
        ("7", [7, 8], 1),
        ("\ud7ff\U0001f642", "\U0001f642", 0),
    ],
)
def test_exact_match(answer: str, expected: Any, right: float) -> None:
    assert score("exact_match", answer, expected) == right


@pytest.mark.parametrize(
    ("answer", "expected", "right"),
    [
        ("The capital is PARIS.", "paris", 1),
        ("The capital\n  is Paris", "capital is paris", 1),
        ("Pari s", "Paris", 0),
        ("3.5", "35", 0),  # punctuation counts
        ("Stra\u00dfe", "STRASSE", 1),
        ("Oslo", ["Paris", "Oslo"], 1),
        ("", "x", 0),
    ],
)
def test_contains(answer: str, expected: Any, right: float) -> None:
    assert score("contains", answer, expected) == right


@pytest.mark.parametrize(
    ("answer", "expected", "wanted"),
    [
        ("the cat sat", "cat sat", 1.0),
        ("cat", "cat sat", 2 / 3),  # precision 1, recall 1/2
        ("cat cat", "cat", 2 / 3),  # a word counts as often as it is there
        ("dog", "cat", 0.0),
        ("", "cat", 0.0),
        ("", "", 1.0),
        ("a b c d", ["c d e f", "x"], 2 * (2 / 3) * (2 / 4) / (2 / 3 + 2 / 4)),  # "a" is an article
    ],
)
def test_f1(answer: str, expected: Any, wanted: float) -> None:
    assert score("f1", answer, expected) == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("spec", "answer", "expected", "right"),
    [
        ("regex:^yes", "yes, indeed", None, 1),
        ("regex:^yes", "Yes", None, 0),
        ("regex:(?i)^yes", "Yes", "ignored", 1),  # flags are no group
        (r"regex:#### ([-\d.,]+)", "so 6 * 7\n#### 1,200", "1200", 1),
        (r"regex:#### ([-\d.,]+)", "#### 1200.0", 1200, 1),
        (r"regex:#### ([-\d.,]+)", "#### 3.5", "35", 0),
        (r"regex:#### ([-\d.,]+)", "1200", "1200", 0),
        (r"regex:answer: (\w+)", "answer: PARIS", ["Rome", "paris"], 1),
        (r"regex:a(b)?", "a", "b", 0),  # the group took no part
        (r"regex:(?P<x>\w+):", "k: v", "k", 1),
    ],
)
def test_regex(spec: str, answer: str, expected: Any, right: float) -> None:
    assert score(spec, answer, expected) == right


def test_a_pattern_that_never_ends_is_refused_in_time() -> None:
    before = time.process_time()
    with pytest.raises(Unfit, match=r"takes more than 1 s") as caught:
        score("regex:^(?:a+)+$", "a" * 40 + "b")
    assert caught.value.hint is not None
    assert time.process_time() - before < 5
    assert score("regex:^(?:a+)+$", "a" * 40) == 1  # and nothing of the limit is left behind


def test_the_limit_is_of_the_body_alone() -> None:
    with time_limit(0.05):
        pass
    end = time.process_time() + 0.2
    while time.process_time() < end:
        pass
    with pytest.raises(TooSlow), time_limit(0.05):
        while True:
            pass


def test_outside_of_the_main_thread_there_is_no_limit() -> None:
    found: list[float] = []
    thread = threading.Thread(target=lambda: found.append(score("regex:^yes", "yes")))
    thread.start()
    thread.join()
    assert found == [1]


OBJECT = {"city": "Paris", "size": {"people": 2_100_000, "tags": ["a", None, True]}}


@pytest.mark.parametrize(
    ("spec", "answer", "expected", "right"),
    [
        ("json_field:city", json.dumps(OBJECT), "paris", 1),
        ("json_field:city", json.dumps(OBJECT), OBJECT, 1),  # the same field of an object
        ("json_field:size.people", json.dumps(OBJECT), "2,100,000", 1),
        ("json_field:size.people=2100000.0", json.dumps(OBJECT), None, 1),
        ("json_field:size.tags.0=a", json.dumps(OBJECT), None, 1),
        ("json_field:size.tags.1=null", json.dumps(OBJECT), None, 1),
        ("json_field:size.tags.2=true", json.dumps(OBJECT), None, 1),
        ("json_field:size.tags.2=1", json.dumps(OBJECT), None, 0),
        ("json_field:size.tags.3=a", json.dumps(OBJECT), None, 0),
        ("json_field:size.tags.-1=true", json.dumps(OBJECT), None, 0),
        ('json_field:size.tags=["A",null,true]', json.dumps(OBJECT), None, 1),
        ("json_field:city.name", json.dumps(OBJECT), "Paris", 0),
        ("json_field:city", "Sure:\n```json\n" + json.dumps(OBJECT) + "\n```\nDone.", "Paris", 1),
        ("json_field:city", "Paris", "Paris", 0),  # not JSON
        ("json_field:city", "", "Paris", 0),
        ("json_field:city", '{"city": "Paris"', "Paris", 0),
        ("json_field:city", '{"city": NaN}', "NaN", 0),
        ("json_field:city", '{"city": "Paris"} x', "Paris", 0),
        ("json_field:city", "[" * 100_000, "Paris", 0),
        ("json_field:city", '{"city": "\ud800"}', "Paris", 0),  # no bytes are such a text
        ("json_field:0=x", '["x"]', None, 1),
    ],
)
def test_json_field(spec: str, answer: str, expected: Any, right: float) -> None:
    assert score(spec, answer, expected) == right


SCHEMA = {"type": "object", "required": ["city"], "properties": {"city": {"type": "string", "minLength": 2}}}


@pytest.mark.parametrize(
    ("answer", "right"),
    [('{"city": "Oslo"}', 1), ('{"city": 3}', 0), ("{}", 0), ("Oslo", 0), ('{"city": NaN}', 0), ("null", 0)],
)
def test_json_schema(tmp_path: Path, answer: str, right: float) -> None:
    path = tmp_path / "schema.json"
    path.write_text(json.dumps(SCHEMA))
    assert score(f"json_schema:{path}", answer) == right
    assert score("json_schema", answer, schema=SCHEMA) == right


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"$ref": "http://127.0.0.1:9/schema.json"}, "refers to 'http://127.0.0.1:9/schema.json'"),
        ({"$ref": "#/$defs/none"}, "refers to"),
        ({"$ref": "#"}, "without end"),
        ({"properties": {"a": {"pattern": "^(a+)+$"}}}, "takes more than 1 s"),
    ],
)
def test_a_schema_that_cannot_be_used_is_refused(schema: dict[str, Any], words: str) -> None:
    """Nothing is fetched, and nothing runs for ever."""
    with pytest.raises(Unfit, match=words):
        score("json_schema", json.dumps({"a": "a" * 40 + "b"}), schema=schema)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("exact", "no metric 'exact'"),
        ("", "no metric ''"),
        ("exact_match:x", "takes no argument"),
        ("f1:", "takes no argument"),
        ("regex", "needs an argument"),
        ("regex:", "takes no argument"),
        ("regex:(", "the pattern is wrong"),
        ("json_field:a..b", "is no path"),
        ("json_field:=x", "is no path"),
        ("script", "needs an argument"),
        ("script:none.py", "no such file"),
        ("json_schema:none.json", "No such file"),
    ],
)
def test_a_metric_that_there_is_not_is_one_line(spec: str, words: str) -> None:
    with pytest.raises(InputError, match=words.replace("(", r"\(")) as caught:
        parse_metric(spec)
    assert "\n" not in str(caught.value) and caught.value.hint


@pytest.mark.parametrize("content", ["", "[]", '{"type": "objekt"}', "nonsense", '{"$schema": 3}'])
def test_a_file_that_is_no_schema_is_one_line(tmp_path: Path, content: str) -> None:
    path = tmp_path / "schema.json"
    path.write_text(content)
    with pytest.raises(InputError, match=r"schema\.json: "):
        parse_metric(f"json_schema:{path}")


@pytest.mark.parametrize(
    ("spec", "expected", "words"),
    [
        ("exact_match", None, "nothing to compare"),
        ("f1", [], "nothing to compare"),
        ("contains", "", "every answer contains it"),
        ("contains", ["a", " "], "every answer contains it"),
        ("exact_match", {"a": 1}, "must be a text"),
        ("f1", [["a"]], "must be a text"),
        ("regex:(a)", None, "nothing to compare"),
        ("json_field:a", None, "nothing to compare"),
        ("json_field:a.b", {"a": {"c": 1}}, "has nothing at 'a.b'"),
        ("json_schema", "x", "has no 'schema'"),
    ],
)
def test_a_question_that_a_metric_cannot_be_used_on(spec: str, expected: Any, words: str) -> None:
    with pytest.raises(Unfit, match=words):
        parse_metric(spec).check(Question(expected))


@pytest.mark.parametrize("answer", ["A.", "(A)", "A)", "**A**", "a"])
def test_a_choice_is_itself_whatever_stands_around_it(answer: str) -> None:
    from spillover.evaluate.text import words

    assert words(answer) == words("A") != words("B")
