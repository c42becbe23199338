"""Answering rows: each once, in order, whatever interrupts it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jobs.scenarios import run_job, tune_job
from spillover.errors import InputError, Mismatch, ModelError
from spillover.jobs.interrupts import Ending
from spillover.state import State
from spillover.store import open_store

ROWS = 12


def answers(path: Path) -> list[dict[str, Any]]:
    """Result lines without what differs from run to run: times and the run's name."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        line["spillover"].pop("latency_s", None)
        line["spillover"].pop("run")
        if line["response"] is not None:
            line["response"]["body"].pop("created")
    return lines


@pytest.fixture
def whole(folder: Path, tiny: Path) -> list[dict[str, Any]]:
    """The answers of an uninterrupted run."""
    result, _ = run_job(folder, tiny, state=str(folder / "whole"), out=folder / "whole.jsonl")
    assert result.ending is Ending.DONE
    return answers(folder / "whole.jsonl")


def test_results_have_the_batch_output_shape_in_the_order_of_the_input(whole) -> None:
    assert [line["custom_id"] for line in whole] == [f"row-{n:06d}" for n in range(1, ROWS + 1)]
    for number, line in enumerate(whole):
        assert line.keys() == {"id", "custom_id", "response", "error", "spillover"}
        assert line["error"] is None
        body = line["response"]["body"]
        choice = body["choices"][0]
        assert (choice["index"], choice["message"]["role"]) == (0, "assistant")
        assert choice["finish_reason"] in ("stop", "length")
        usage = body["usage"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        assert usage["completion_tokens"] <= 2 + number % 5
        assert line["spillover"]["row"] == number
        assert line["spillover"]["decoding"]["max_tokens"] == 2 + number % 5


@pytest.mark.parametrize("stop", [1, 2, 4, 7, 11])
def test_stopped_anywhere_it_continues_to_the_same_answers(
    folder: Path, tiny: Path, whole, stop: int
) -> None:
    first, _ = run_job(folder, tiny, stop_after=stop)
    assert first.ending is Ending.STOPPED
    second, events = run_job(folder, tiny)
    assert second.ending is Ending.DONE
    assert answers(second.run.results) == whole
    seen = [e["custom_id"] for e in events if e["event"] == "row"]
    assert len(seen) == len(set(seen)) <= ROWS - stop


def test_one_row_at_a_time_answers_each_row_once(folder: Path, tiny: Path, whole) -> None:
    seen: list[str] = []
    for _ in range(ROWS + 2):
        result, events = run_job(folder, tiny, stop_after=1)
        seen += [e["custom_id"] for e in events if e["event"] == "row"]
        if result.ending is Ending.DONE:
            break
    assert sorted(seen) == [f"row-{n:06d}" for n in range(1, ROWS + 1)]
    assert answers(result.run.results) == whole


def test_a_stop_keeps_the_tokens_of_unfinished_rows(folder: Path, tiny: Path) -> None:
    state = str(folder / "state")
    with (folder / "prompts.jsonl").open("w") as file:
        file.write('{"prompt": "short", "max_tokens": 1}\n{"prompt": "the capital", "max_tokens": 40}\n')
    run_job(folder, tiny, state=state, stop_after=1)
    document = State(open_store(state)).read()
    assert document is not None
    partials = json.loads((Path(state) / document.current["rows"].folder / "partials.json").read_text())
    assert [*partials] == ["row-000002"]
    kept = partials["row-000002"]
    assert len(kept) >= 1
    _, events = run_job(folder, tiny, state=state, logprobs=None)
    assert any(f"{len(kept)} tokens of unfinished" in e.get("message", "") for e in events)


def test_samples_do_not_depend_on_batch_mates_or_on_a_stop(folder: Path, tiny: Path) -> None:
    options = {"temperature": 1.0, "seed": 3, "samples": 2, "max_tokens": 6}
    run_job(folder, tiny, state=str(folder / "a"), out=folder / "a.jsonl", **options)
    run_job(folder, tiny, state=str(folder / "b"), out=folder / "b.jsonl", batch=1, **options)
    for _ in range(3):
        run_job(folder, tiny, state=str(folder / "c"), stop_after=3, **options)
    run_job(folder, tiny, state=str(folder / "c"), out=folder / "c.jsonl", **options)
    texts = [
        [
            [choice["message"]["content"] for choice in line["response"]["body"]["choices"]]
            for line in answers(p)
        ]
        for p in (folder / "a.jsonl", folder / "b.jsonl", folder / "c.jsonl")
    ]
    assert texts[0] == texts[1] == texts[2]
    assert any(first != second for first, second in texts[0])


def test_logprobs_come_in_the_documented_shape(folder: Path, tiny: Path) -> None:
    result, _ = run_job(folder, tiny, logprobs=3)
    for line in answers(result.run.results):
        choice = line["response"]["body"]["choices"][0]
        content = choice["logprobs"]["content"]
        assert len(content) == line["response"]["body"]["usage"]["completion_tokens"]
        for token in content:
            assert token.keys() == {"token", "token_id", "logprob", "top_logprobs"}
            assert len(token["top_logprobs"]) == 3
            assert token["top_logprobs"][0]["token_id"] == token["token_id"]  # greedy


def test_a_row_that_is_too_long_fails_alone(folder: Path, tiny: Path) -> None:
    with (folder / "prompts.jsonl").open("a") as file:
        file.write(json.dumps({"prompt": "word " * 2000}) + "\n")
    result, _ = run_job(folder, tiny)
    lines = answers(result.run.results)
    assert lines[-1]["response"] is None
    assert lines[-1]["error"]["code"] == "context_length_exceeded"
    assert all(line["error"] is None for line in lines[:-1])
    assert "1 failed" in result.message


def test_a_finished_run_is_not_done_again(folder: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is it measured what its rows would take."""
    result, _ = run_job(folder, tiny)
    first = answers(result.run.results)
    result.run.results.unlink()
    monkeypatch.setattr("spillover.jobs.run.planned", lambda *given: pytest.fail("it was planned again"))
    again, events = run_job(folder, tiny, out=folder / "copy.jsonl")
    assert "already complete" in again.message
    assert not [e for e in events if e["event"] == "row"]
    assert answers(again.run.results) == answers(folder / "copy.jsonl") == first


def test_other_input_or_decoding_is_refused(folder: Path, tiny: Path) -> None:
    state = str(folder / "state")
    run_job(folder, tiny, state=state, stop_after=1)
    with pytest.raises(Mismatch, match="max tokens was 256, now 8"):
        run_job(folder, tiny, state=state, max_tokens=8)
    with (folder / "prompts.jsonl").open("a") as file:
        file.write('{"prompt": "one more"}\n')
    with pytest.raises(Mismatch, match="input was"):
        run_job(folder, tiny, state=state)


def test_an_adapter_answers_differently_and_only_on_its_base(folder: Path, tiny: Path, whole) -> None:
    from models.folders import tiny_llama

    tune_job(folder, tiny, lr=0.1)
    result, _ = run_job(folder, Path(f"{tiny}+tiny"))
    tuned = [line["response"]["body"]["choices"][0] for line in answers(result.run.results)]
    assert tuned != [line["response"]["body"]["choices"][0] for line in whole]
    other = tiny_llama(folder / "other", rms_norm_eps=0.5)
    with pytest.raises(ModelError, match="was trained on"):
        run_job(folder, Path(f"{other}+tiny"))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"max_tokens": 0}, "--max-tokens"),
        ({"temperature": -1.0}, "--temperature"),
        ({"samples": 2}, "temperature 0"),
        ({"logprobs": 65}, "--logprobs"),
    ],
)
def test_senseless_settings_are_refused(folder: Path, tiny: Path, change: dict, named: str) -> None:
    with pytest.raises(InputError, match=named):
        run_job(folder, tiny, **change)
    assert not (folder / "runs").exists()
