"""Evaluating models: scores that follow from the answers, each answer computed once."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jobs.scenarios import eval_job, run_job, write_evals
from models.folders import tiny_llama
from spillover.engine import Completion
from spillover.errors import Corrupt, InputError, LockContended, ModelError
from spillover.jobs import answering
from spillover.jobs.events import Event
from spillover.jobs.interrupts import Ending
from spillover.jobs.job import Result

ROWS = 12
TALKATIVE = {"initializer_range": 1.0}
"""So that a random model's answers are not all the same."""


@pytest.fixture(scope="session")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model") / "one", **TALKATIVE)


@pytest.fixture(scope="session")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model") / "two", intermediate_size=48, **TALKATIVE)


@pytest.fixture
def evals(folder: Path, one: Path) -> Path:
    """``evals.jsonl``, whose expected answers are those of model one on every other row."""
    path = write_evals(folder / "evals.jsonl", ROWS)
    result, _ = run_job(folder, one, data=path)
    assert result.run is not None
    said = [text_of(line) for line in lines(result.run.results)]
    assert len(set(said)) > ROWS // 2
    rows = lines(path)
    for row, text in list(zip(rows, said, strict=True))[::2]:
        row["expected"] = text
    write(path, rows)
    return path


def text_of(line: dict[str, Any]) -> str:
    return line["response"]["body"]["choices"][0]["message"]["content"]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().split("\n") if line]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def left(result: Result) -> dict[str, bytes]:
    """What an evaluation wrote."""
    assert result.run is not None
    return {
        name: (result.run.folder / name).read_bytes()
        for name in ("scores.jsonl", "disagreements.jsonl", "report.json")
    }


def report(result: Result) -> dict[str, Any]:
    return json.loads(left(result)["report.json"])


def computed(events: list[Event]) -> int:
    """How many rows the engine answered."""
    return sum(event["event"] == "row" for event in events)


def mean_of(result: Result, model: Path, metric: str) -> float | None:
    (found,) = [s for s in report(result)["scores"] if (s["model"], s["metric"]) == (str(model), metric)]
    return found["mean"]


def test_scores_follow_from_the_answers(folder: Path, evals: Path, one: Path, two: Path) -> None:
    result, events = eval_job(folder, one, two, metric=("exact_match", "f1"))
    assert computed(events) == 2 * ROWS
    scores = [json.loads(line) for line in left(result)["scores.jsonl"].splitlines()]
    keys = [(line["row"], line["model"], line["sample"], line["metric"]) for line in scores]
    assert keys == [
        (row, str(model), 0, metric)
        for row in range(ROWS)
        for model in (one, two)
        for metric in ("exact_match", "f1")
    ]
    answers = {}
    for model in (one, two):
        ran, _ = run_job(folder, model, data=evals)
        assert ran.run is not None
        answers[str(model)] = [text_of(line) for line in lines(ran.run.results)]
    assert all(line["answer"] == answers[line["model"]][line["row"]] for line in scores)
    for model in (one, two):
        mine = [
            line["score"] for line in scores if (line["model"], line["metric"]) == (str(model), "exact_match")
        ]
        assert mean_of(result, model, "exact_match") == pytest.approx(np.mean(mine))
    assert mean_of(result, one, "exact_match") == 0.5
    assert mean_of(result, two, "exact_match") < 0.5


def test_disagreements_are_the_rows_on_which_scores_differ(
    folder: Path, evals: Path, one: Path, two: Path
) -> None:
    result, _ = eval_job(folder, one, two)
    scores = [json.loads(line) for line in left(result)["scores.jsonl"].splitlines()]
    of = {(line["row"], line["model"]): line["score"] for line in scores}
    wanted = [row for row in range(ROWS) if of[row, str(one)] != of[row, str(two)]]
    found = [json.loads(line) for line in left(result)["disagreements.jsonl"].splitlines()]
    assert [line["row"] for line in found] == wanted and 0 < len(wanted) < ROWS
    rows = lines(evals)
    for line in found:
        assert (line["prompt"], line["expected"]) == (
            rows[line["row"]]["prompt"],
            rows[line["row"]]["expected"],
        )
        assert [m["model"] for m in line["models"]] == [str(one), str(two)]
        assert [m["scores"] for m in line["models"]] == [
            {"exact_match": [of[line["row"], str(model)]]} for model in (one, two)
        ]
        assert all(len(m["answers"]) == 1 for m in line["models"])
    assert report(result)["disagreements"] == len(wanted)
    assert result.next is not None and result.next.endswith("disagreements.jsonl")
    (compared,) = report(result)["comparisons"]
    assert (compared["model"], compared["baseline"], compared["better"]) == (str(two), str(one), 0)
    assert compared["worse"] == len(wanted) and compared["p"] == pytest.approx(2 * 0.5 ** len(wanted))
    assert any("against" in line and "p = " in line for line in result.details)


def test_the_baseline_can_be_another(folder: Path, evals: Path, one: Path, two: Path) -> None:
    result, _ = eval_job(folder, one, two, baseline=str(two))
    (compared,) = report(result)["comparisons"]
    assert (compared["model"], compared["baseline"], compared["worse"]) == (str(one), str(two), 0)


def test_only_what_is_new_is_computed(folder: Path, evals: Path, one: Path, two: Path) -> None:
    """Another model, another metric, another row, a row less, a row moved."""

    def count(*models: Path, **changes: Any) -> int:
        return computed(eval_job(folder, *models, **changes)[1])

    assert count(one) == ROWS
    assert count(one) == 0
    assert count(one, metric=("f1", "contains")) == 0
    assert count(one, two) == ROWS
    rows = lines(evals)
    rows[4]["prompt"] += " and more"
    write(evals, rows)
    assert count(one, two) == 2
    write(evals, rows[:3] + rows[5:])
    assert count(one, two) == 0
    write(evals, rows[::-1])
    assert count(one, two) == 0
    rows[0]["expected"] = "something else"
    write(evals, rows)
    assert count(one, two) == 0
    rows[1]["max_tokens"] += 1
    write(evals, rows)
    assert count(one) == 1
    assert count(one, seed=5, top_p=0.5) == 0  # greedy: they decide nothing
    assert count(one, stop=("q",)) == ROWS


def test_answers_taken_over_are_the_answers_computed(folder: Path, evals: Path, one: Path, two: Path) -> None:
    eval_job(folder, one, two)
    rows = lines(evals)
    write(evals, [{"prompt": "first of all", "expected": "x"}, *rows[6:], *rows[:6]])
    again, events = eval_job(folder, one, two)
    assert computed(events) == 2
    anew, events = eval_job(folder, one, two, state=str(folder / "elsewhere"))
    assert computed(events) == 2 * (ROWS + 1)
    assert left(again) == left(anew)


def test_a_model_that_was_evaluated_needs_no_weights(
    folder: Path, evals: Path, one: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from spillover.engine.torch.engine import TorchEngine

    eval_job(folder, one)
    write(evals, lines(evals)[:5])

    def refuse(*args: Any) -> None:
        raise AssertionError("the weights were read")

    monkeypatch.setattr(TorchEngine, "load", refuse)
    result, events = eval_job(folder, one)
    assert computed(events) == 0 and result.ending is Ending.DONE


def test_damaged_answers_are_computed_again(folder: Path, evals: Path, one: Path) -> None:
    eval_job(folder, one)
    for path in (folder / "runs" / "answers").rglob("results.jsonl"):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    rows = lines(evals)
    write(evals, rows[::-1])
    result, events = eval_job(folder, one)
    assert computed(events) == ROWS
    assert any("cannot be used again" in (event.get("message") or "") for event in events)
    assert mean_of(result, one, "exact_match") == 0.5


@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "garble"])
def test_damage_to_answers_that_are_complete_says_what_to_delete(
    folder: Path, evals: Path, one: Path, damage: str
) -> None:
    first, _ = eval_job(folder, one)
    answers = folder / "runs" / "answers"
    for path in answers.rglob("results.jsonl"):
        data = bytearray(path.read_bytes())
        if damage == "flip":
            data[len(data) // 2] ^= 1
        path.write_bytes({"cut": data[:-20], "garble": b"[" + data[1:]}.get(damage, data))
        if damage == "remove":
            path.unlink()
    with pytest.raises(Corrupt) as failure:
        eval_job(folder, one)
    (state,) = {path.parent for path in answers.rglob("control.json")}
    assert failure.value.hint == f"delete {state} to have it computed again"
    shutil.rmtree(state)
    again, events = eval_job(folder, one)
    assert left(again) == left(first) and computed(events) == ROWS


def test_a_second_process_leaves_the_judge_its_questions(
    folder: Path, evals: Path, one: Path, two: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused, and the one that owns the judge's answers goes on reading what it began to read."""
    told: list[str] = []
    finish = answering.Answering._finish
    settings = {"judge": str(two), "judge_max_tokens": 2}

    def disturbed(self: answering.Answering, completion: Completion) -> None:
        finish(self, completion)
        if self.work.settings.data.name == "judge.jsonl" and not told:
            told.append("begun")
            with pytest.raises(LockContended):
                eval_job(folder, one, **settings)
            told.append("refused")

    monkeypatch.setattr(answering.Answering, "_finish", disturbed)
    result, events = eval_job(folder, one, **settings)
    assert result.ending is Ending.DONE and told == ["begun", "refused"]
    assert computed(events) == 2 * ROWS


@pytest.mark.parametrize("stop", [4, 12, 13])
def test_stopped_anywhere_it_continues_to_the_same_report(
    folder: Path, evals: Path, one: Path, two: Path, stop: int
) -> None:
    whole, _ = eval_job(folder, one, two, state=str(folder / "whole"))
    expected = left(whole)
    seen = 0
    for _ in range(30):
        result, events = eval_job(folder, one, two, state=str(folder / "parts"), stop_after=stop)
        seen += computed(events)
        if result.ending is Ending.DONE:
            break
        assert result.ending is Ending.STOPPED and "durable at" in result.message
    assert left(result) == expected
    assert seen == 2 * ROWS


SAMPLED = {"temperature": 1.0, "metric": ("exact_match",)}


def test_samples_are_kept_and_extended(folder: Path, evals: Path, one: Path) -> None:
    rows = lines(evals)
    for row in rows:
        row["max_tokens"], row["expected"] = 1, "x"
    write(evals, rows)
    eval_job(folder, one, samples=2, **SAMPLED)
    more, events = eval_job(folder, one, samples=5, **SAMPLED)
    assert computed(events) == ROWS
    anew, _ = eval_job(folder, one, samples=5, state=str(folder / "elsewhere"), **SAMPLED)
    assert left(more) == left(anew)
    less, events = eval_job(folder, one, samples=3, **SAMPLED)
    assert computed(events) == 0
    scores = [json.loads(line) for line in left(more)["scores.jsonl"].splitlines()]
    assert Counter(line["row"] for line in scores) == dict.fromkeys(range(ROWS), 5)
    fewer = [json.loads(line) for line in left(less)["scores.jsonl"].splitlines()]
    assert fewer == [line for line in scores if line["sample"] < 3]


def test_of_several_samples_it_says_how_often_one_is_right(folder: Path, evals: Path, one: Path) -> None:
    rows = lines(evals)
    for row in rows:
        row["max_tokens"] = 1
    write(evals, rows)
    result, _ = eval_job(folder, one, samples=6, temperature=1.0, metric=("regex:[a-m]",))
    scores = [json.loads(line) for line in left(result)["scores.jsonl"].splitlines()]
    table = np.array([line["score"] for line in scores]).reshape(ROWS, 6)
    (found,) = report(result)["scores"]
    assert found["mean"] == pytest.approx(table.mean()) and 0 < found["mean"] < 1
    assert [*found["pass_at"]] == ["1", "2", "4", "6"]
    assert found["pass_at"]["1"] == pytest.approx(table.mean())
    assert found["pass_at"]["6"] == pytest.approx(table.max(axis=1).mean())
    assert found["n"] == ROWS and found["low"] < found["mean"] < found["high"]


def test_rows_score_themselves(folder: Path, one: Path) -> None:
    path = write(
        folder / "evals.jsonl",
        [
            {"prompt": "a", "expected": "zzz"},
            {"prompt": "b", "metric": "regex:^"},
            {"prompt": "c", "metric": "regex:never ever"},
            {"prompt": "d", "metric": "json_schema", "schema": {"type": "object"}},
            {"prompt": "e", "metric": "exact_match", "expected": "zzz"},
        ],
    )
    result, _ = eval_job(folder, one, data=path, max_tokens=2)
    found = {score["metric"]: (score["n"], score["mean"]) for score in report(result)["scores"]}
    assert found == {"exact_match": (2, 0.0), "regex": (2, 0.5), "json_schema": (1, 0.0)}


def test_a_row_without_an_answer_scores_0_and_is_counted(folder: Path, evals: Path, one: Path) -> None:
    rows = lines(evals)
    write(evals, [*rows, {"prompt": "word " * 2000, "expected": "x", "custom_id": "long"}])
    result, _ = eval_job(folder, one, metric=("exact_match", "regex:^"))
    assert mean_of(result, one, "exact_match") == pytest.approx(6 / 13)
    assert mean_of(result, one, "regex:^") == pytest.approx(12 / 13)
    (model,) = report(result)["models"]
    assert (model["answered"], model["failed"]) == (12, 1)
    last = json.loads(left(result)["scores.jsonl"].splitlines()[-1])
    assert (last["custom_id"], last["answer"], last["score"]) == ("long", None, 0.0)


def test_a_judge_whose_words_are_no_verdict_leaves_answers_unscored(
    folder: Path, evals: Path, one: Path, two: Path
) -> None:
    result, events = eval_job(folder, one, judge=str(two), judge_max_tokens=3)
    assert computed(events) == 2 * ROWS  # answers, then their grades
    (score,) = report(result)["scores"]
    assert (score["n"], score["unscored"], score["mean"]) == (0, ROWS, None)
    scores = [json.loads(line) for line in left(result)["scores.jsonl"].splitlines()]
    assert all(line["score"] is None and isinstance(line["judge"], str) for line in scores)
    assert any("12 unscored" in line for line in result.details)
    assert computed(eval_job(folder, one, judge=str(two), judge_max_tokens=3)[1]) == 0


def test_a_verdict_becomes_a_score(
    folder: Path, evals: Path, one: Path, two: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The judge's words are real; here those with a letter are praise, and one of them is no verdict."""
    from spillover.jobs import scoring

    said: list[str] = []

    def lenient(text: str) -> float | None:
        said.append(text)
        return None if len(said) == 3 else float(any(letter.isalpha() for letter in text))

    monkeypatch.setattr(scoring, "verdict", lenient)
    result, _ = eval_job(folder, one, metric=("exact_match",), judge=str(two), judge_max_tokens=1)
    (score,) = [s for s in report(result)["scores"] if s["metric"] == "judge"]
    praised = [any(c.isalpha() for c in text) for place, text in enumerate(said) if place != 2]
    assert (score["n"], score["unscored"]) == (ROWS - 1, 1)
    assert score["mean"] == pytest.approx(np.mean(praised))
    assert mean_of(result, one, "exact_match") == 0.5


def test_a_judge_sees_what_the_prompt_file_shows(folder: Path, evals: Path, one: Path, two: Path) -> None:
    prompt = folder / "judge.txt"
    prompt.write_text("P {prompt} A {answer} E {expected}")
    result, _ = eval_job(folder, one, judge=str(two), judge_prompt=prompt, judge_max_tokens=1)
    assert result.run is not None
    asked = lines(result.run.folder / "judge.jsonl")
    scores = [json.loads(line) for line in left(result)["scores.jsonl"].splitlines()]
    for row, line, score in zip(lines(evals), asked, scores, strict=True):
        assert line["prompt"] == f"P {row['prompt']} A {score['answer']} E {row['expected']}"


SCRIPT = """
import json, sys
for line in sys.stdin:
    row = json.loads(line)
    print(json.dumps({"score": row["answer"].strip() == row["expected"].strip()}))
"""


def test_a_script_scores(folder: Path, evals: Path, one: Path, two: Path) -> None:
    (folder / "score.py").write_text(SCRIPT)
    spec = f"script:{folder / 'score.py'}"
    result, _ = eval_job(folder, one, two, metric=(spec, "exact_match"))
    assert mean_of(result, one, spec) == 0.5
    assert mean_of(result, two, spec) == mean_of(result, two, "exact_match")


@pytest.mark.parametrize(
    ("source", "line", "words"),
    [
        ("print(1)\nprint(1)\nprint(1)\nraise ValueError('no')", 2, "ended with exit code 1: ValueError: no"),
        ("print('sure')", 1, "wrote 'sure', which is no score"),
        ("print(0)\nimport time\ntime.sleep(60)", 1, "gave no score within 1 s"),
    ],
)
def test_a_script_that_fails_names_the_row_and_loses_nothing(
    folder: Path, evals: Path, one: Path, two: Path, source: str, line: int, words: str
) -> None:
    (folder / "score.py").write_text(source)
    spec = f"script:{folder / 'score.py'}"
    with pytest.raises(InputError) as caught:
        eval_job(folder, one, two, metric=(spec,), script_timeout=1.0)
    assert str(caught.value).startswith(f"{evals}:{line}: {folder / 'score.py'} {words}")
    assert not [*(folder / "runs").glob("eval-*/report.json")]
    (folder / "score.py").write_text(SCRIPT)
    result, events = eval_job(folder, one, two, metric=(spec,))
    assert computed(events) == 0 and mean_of(result, one, spec) == 0.5


def test_a_pattern_that_never_ends_names_the_row(folder: Path, one: Path) -> None:
    path = write(folder / "evals.jsonl", [{"prompt": "a"}, {"prompt": "b"}])
    pattern = r"regex:^(?:(?:.|\n)+)+\Z\A"
    with pytest.raises(InputError, match=r"evals\.jsonl:1: the pattern .* more than 1 s on the answer of "):
        eval_job(folder, one, data=path, max_tokens=60, metric=(pattern,))


def bad_rows() -> Iterator[Any]:
    ok = {"prompt": "a", "expected": "b"}
    yield [ok, {"prompt": "c"}], {}, "2: there is nothing to compare the answer with"
    yield [ok, {"prompt": "c", "expected": {"x": 1}}], {}, "2: 'expected' must be a text"
    yield [ok, ok | {"metric": "exact"}], {}, "2: there is no metric 'exact'"
    yield [ok, ok | {"metric": 3}], {}, "2: metric must be a string"
    yield [ok, ok | {"metric": "regex:("}], {}, "2: metric 'regex:.': the pattern is wrong"
    yield [ok, ok | {"metric": "script:score.py"}], {}, "2: a row cannot name a file"
    yield [ok, ok | {"metric": "json_schema:/etc/passwd"}], {}, "2: a row cannot name a file"
    yield [ok, ok | {"metric": "json_schema"}], {}, "2: the row has no 'schema'"
    yield [ok, ok | {"metric": "json_schema", "schema": {"type": 3}}], {}, "2: its schema is none"
    yield [ok, ok | {"schema": "x"}], {}, "2: schema must be an object"
    yield [ok, ok | {"metric": "judge"}], {}, "2: the row asks for a judge"
    yield [ok, ok | {"metrics": "f1"}], {}, "2: unknown key 'metrics'"
    yield [ok, {"prompt": "c", "expected": None}], {"metric": ("contains",)}, "2: there is nothing to compare"
    yield [ok, "x"], {}, "2: a row must be a JSON object"
    yield [], {}, "1: the file has no rows"


@pytest.mark.parametrize(("rows", "changes", "words"), [*bad_rows()])
def test_a_row_that_cannot_be_scored_is_one_line_before_any_work(
    folder: Path, one: Path, rows: list[Any], changes: dict[str, Any], words: str
) -> None:
    path = write(folder / "evals.jsonl", rows)
    with pytest.raises(InputError, match=rf"evals\.jsonl:{words}"):
        eval_job(folder, one, data=path, **changes)
    assert not (folder / "runs").exists()


@pytest.mark.parametrize(
    ("models", "changes", "words"),
    [
        (("ONE", "nowhere/at/all"), {}, "model folder nowhere/at/all does not exist"),
        (("ONE", "ONE+none"), {}, "there is no adapter 'none'"),
        (("ONE",), {"judge": "./nowhere"}, "model folder ./nowhere does not exist"),
        (("ONE", "ONE"), {}, "is given twice"),
        ((), {}, "needs a model"),
        (("ONE",), {"baseline": "two"}, "none of the models"),
        (("ONE",), {"metric": ("judge",)}, "needs a model that judges"),
        (("ONE",), {"metric": ("f1", "f1")}, "is given twice"),
        (("ONE",), {"metric": ("f2",)}, "no metric 'f2'"),
        (("ONE",), {"judge_prompt": Path("x")}, "needs a judge"),
        (("ONE",), {"script_timeout": 0.0}, "--script-timeout"),
        (("ONE",), {"script_timeout": float("nan")}, "--script-timeout"),
        (("ONE",), {"samples": 2}, "temperature 0"),
    ],
)
def test_what_cannot_be_done_is_one_line_before_any_work(
    folder: Path, one: Path, models: tuple[str, ...], changes: dict[str, Any], words: str
) -> None:
    write_evals(folder / "evals.jsonl")
    with pytest.raises((InputError, ModelError), match=words) as caught:
        eval_job(folder, *(model.replace("ONE", str(one)) for model in models), **changes)
    assert "\n" not in str(caught.value) and caught.value.hint
    assert not (folder / "runs").exists()


def test_a_dry_run_begins_nothing(folder: Path, evals: Path, one: Path, two: Path) -> None:
    eval_job(folder, one)
    before = sorted(folder.rglob("*"))
    result, events = eval_job(folder, one, two, dry_run=True)
    assert f"{one}: all 12 rows are answered" in result.message
    assert "nothing was begun" in result.message and "12 rows" in result.message
    assert sorted(folder.rglob("*")) == before and computed(events) == 0
