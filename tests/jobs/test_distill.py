"""``distill``: rows that a student learns from, generated or scored, whole through any interruption."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from jobs.scenarios import distill_job, run_job, tune_job, write_prompts, write_training
from jobs.test_placement import SPILL, killed
from spillover.engine.torch import engine as torch_engine
from spillover.errors import InputError
from spillover.jobs.distill import DistillSettings
from spillover.jobs.interrupts import Ending
from spillover.models import resolve


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def learned(path: Path) -> list[dict[str, Any]]:
    """The rows without what differs from run to run."""
    return [{key: value for key, value in row.items() if key != "spillover"} for row in rows(path)]


def test_a_row_has_what_was_asked_what_was_said_and_how_likely_it_was(folder: Path, tiny: Path) -> None:
    distill_job(folder, tiny, out=folder / "out.jsonl", logprobs=3)
    run_job(folder, tiny, out=folder / "answers.jsonl", logprobs=3)
    asked = rows(folder / "prompts.jsonl")
    found, answers = rows(folder / "out.jsonl"), rows(folder / "answers.jsonl")
    assert [row["messages"][-1]["content"] for row in found] == [row["prompt"] for row in asked]
    for row, answer in zip(found, answers, strict=True):
        choice = answer["response"]["body"]["choices"][0]
        assert row["completion"] == choice["message"]["content"]
        assert row["finish_reason"] == choice["finish_reason"]
        content = choice["logprobs"]["content"]
        assert row["completion_token_ids"] == [one["token_id"] for one in content]
        assert row["logprobs"]["chosen"] == [one["logprob"] for one in content]
        for place, one in enumerate(content):
            top = [(each["token_id"], each["logprob"]) for each in one["top_logprobs"]]
            pairs = zip(row["logprobs"]["top_token_ids"][place], row["logprobs"]["top"][place], strict=True)
            assert list(pairs) == top and len(top) == 3


def test_a_student_learns_from_the_rows_as_they_are(folder: Path, tiny: Path) -> None:
    result, _ = distill_job(folder, tiny, out=folder / "out.jsonl", max_tokens=6)
    assert result.next == f"spill tune MODEL {folder / 'out.jsonl'} --name NAME"
    done, events = tune_job(folder, tiny, data=folder / "out.jsonl", name="student", steps=2, epochs=None)
    assert done.message.startswith("done at step 2 of 2")
    assert any("12 examples" in event.get("message", "") for event in events)


def test_the_score_of_what_was_generated_is_what_was_reported(folder: Path, tiny: Path) -> None:
    """To the bit: with the compiled kernels a token's probability is the same in a prefill."""
    distill_job(folder, tiny, out=folder / "said.jsonl", logprobs=5)
    distill_job(folder, tiny, data=folder / "said.jsonl", out=folder / "scored.jsonl", logprobs=5, score=True)
    for said, scored in zip(rows(folder / "said.jsonl"), rows(folder / "scored.jsonl"), strict=True):
        count = len(said["completion_token_ids"])
        if said["completion_token_ids"] != scored["completion_token_ids"][:count]:
            continue  # a random model's tokens need not be what their text is cut into
        for name in ("chosen", "top_token_ids", "top"):
            assert scored["logprobs"][name][:count] == said["logprobs"][name]


def test_given_replies_are_scored_many_in_a_pass(
    folder: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scored: list[int] = []
    usual = torch_engine.TorchModel.score

    def counted(self: Any, sequences: Any, *args: Any, **more: Any) -> Any:
        scored.append(len(sequences))
        return usual(self, sequences, *args, **more)

    monkeypatch.setattr(torch_engine.TorchModel, "score", counted)
    write_training(folder / "train.jsonl", rows=40)
    distill_job(folder, tiny, data=folder / "train.jsonl", out=folder / "out.jsonl", score=True)
    found = rows(folder / "out.jsonl")
    assert [row["completion"] for row in found] == [row["answer"] for row in rows(folder / "train.jsonl")]
    assert all(row["finish_reason"] == "stop" for row in found)  # through the end of the turn
    assert all(len(row["logprobs"]["chosen"]) == len(row["completion_token_ids"]) for row in found)
    assert sum(scored) == 40 and len(scored) <= 2


@pytest.mark.parametrize("weights", [(None, None), (1, 0), (0, 1)])
def test_a_conversation_is_scored_from_its_last_reply(
    folder: Path, tiny: Path, weights: tuple[int | None, int | None]
) -> None:
    """Whichever of its replies a tune would learn from."""
    turns = [("user", "the capital"), ("assistant", "Paris"), ("user", "of Italy"), ("assistant", "Rome is")]
    messages: list[dict[str, Any]] = [{"role": role, "content": text} for role, text in turns]
    for message, weight in zip(messages[1::2], weights, strict=True):
        message |= {} if weight is None else {"weight": weight}
    plain = [*messages[:-1], {"role": "assistant", "content": "Rome is"}]
    for name, conversation in (("chat", messages), ("plain", plain)):
        (folder / f"{name}.jsonl").write_text(json.dumps({"messages": conversation}) + "\n")
        distill_job(folder, tiny, data=folder / f"{name}.jsonl", out=folder / f"{name}.out", score=True)
    (folder / "alone.jsonl").write_text(json.dumps({"prompt": "of Italy", "answer": "Rome is"}) + "\n")
    distill_job(folder, tiny, data=folder / "alone.jsonl", out=folder / "alone.out", score=True)
    (row,), (expected,), (alone,) = (rows(folder / f"{name}.out") for name in ("chat", "plain", "alone"))
    assert row["completion_token_ids"] == alone["completion_token_ids"]
    assert (row["messages"], row["completion"]) == (messages[:-1], "Rome is")
    assert row["logprobs"] == expected["logprobs"] and len(row["logprobs"]["chosen"]) > 2


def test_a_given_reply_comes_back_as_it_was_given(folder: Path, tiny: Path) -> None:
    """With a stop token in its middle, which is no end here."""
    tokenizer = resolve(str(tiny)).tokenizer()
    stop = next(
        text for text in ("<|im_end|>", "<|endoftext|>") if set(tokenizer.encode(text)) & tokenizer.stop_ids
    )
    row = {"prompt": "the capital", "answer": f"Paris{stop} is"}
    (folder / "odd.jsonl").write_text(json.dumps(row) + "\n")
    distill_job(folder, tiny, data=folder / "odd.jsonl", out=folder / "out.jsonl", score=True)
    (found,) = rows(folder / "out.jsonl")
    assert (found["completion"], found["finish_reason"]) == (row["answer"], "stop")
    ids = found["completion_token_ids"]
    assert sum(one in tokenizer.stop_ids for one in ids) == 2 and len(found["logprobs"]["chosen"]) == len(ids)


def test_a_row_can_ask_for_more_log_probabilities_but_not_for_fewer(folder: Path, tiny: Path) -> None:
    bodies = [{"logprobs": True}, {"logprobs": True, "top_logprobs": 7}, {}]
    with (folder / "batch.jsonl").open("w") as file:
        for number, more in enumerate(bodies):
            body = {
                "model": "x",
                "messages": [{"role": "user", "content": "the capital"}],
                "max_tokens": 2,
                **more,
            }
            file.write(json.dumps({"custom_id": f"r{number}", "method": "POST",
                                   "url": "/v1/chat/completions", "body": body}) + "\n")  # fmt: skip
    distill_job(folder, tiny, data=folder / "batch.jsonl", out=folder / "out.jsonl", logprobs=4)
    assert [len(row["logprobs"]["top"][0]) for row in rows(folder / "out.jsonl")] == [4, 7, 4]


@pytest.mark.parametrize("score", [False, True])
def test_stopped_anywhere_it_writes_the_same_rows(folder: Path, tiny: Path, score: bool) -> None:
    data = folder / ("train.jsonl" if score else "prompts.jsonl")
    options: dict[str, Any] = {"data": data, "score": score, "logprobs": 2}
    distill_job(folder, tiny, state=str(folder / "whole"), out=folder / "whole.jsonl", **options)
    parts = {"state": str(folder / "parts"), "out": folder / "parts.jsonl"}
    endings = [distill_job(folder, tiny, stop_after=5, **parts, **options)[0].ending for _ in range(5)]
    assert endings[0] is Ending.STOPPED and endings[-1] is Ending.DONE
    assert learned(folder / "parts.jsonl") == learned(folder / "whole.jsonl")


def test_what_cannot_be_answered_is_counted_and_left_out(folder: Path, tiny: Path) -> None:
    lines = (folder / "prompts.jsonl").read_text().splitlines()
    lines.insert(3, json.dumps({"prompt": "Rome " * 5000, "custom_id": "long"}))
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    result, _ = distill_job(folder, tiny, out=folder / "out.jsonl")
    assert "13 of 13 rows, 1 failed" in result.message
    assert len(rows(folder / "out.jsonl")) == 12
    assert "long" not in (folder / "out.jsonl").read_text()


def test_other_work_is_not_continued(folder: Path, tiny: Path) -> None:
    """Scoring and generating from one file are two jobs; so are run and distill."""
    runs = [
        run_job(folder, tiny, data=folder / "train.jsonl")[0].run,
        distill_job(folder, tiny, data=folder / "train.jsonl")[0].run,
        distill_job(folder, tiny, data=folder / "train.jsonl", score=True)[0].run,
    ]
    assert len({run.id for run in runs if run is not None}) == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"samples": 2, "temperature": 1.0}, "one completion a row"),
        ({"logprobs": None}, "needs log-probabilities"),
        ({"logprobs": 65}, "--logprobs 65"),
    ],
)
def test_a_wrong_option_is_one_line(folder: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        DistillSettings(**{"model": "demo", "data": folder / "prompts.jsonl", **change})
    assert caught.value.hint


def test_rows_without_a_reply_cannot_be_scored(folder: Path, tiny: Path) -> None:
    with pytest.raises(InputError, match=r"prompts\.jsonl:1: "):
        distill_job(folder, tiny, score=True)
    assert not (folder / "runs").exists()


@pytest.mark.slow
def test_200_rows_killed_ten_times(folder: Path, tiny: Path) -> None:
    write_prompts(folder / "prompts.jsonl", rows=200)
    distill_job(folder, tiny, state=str(folder / "whole"), out=folder / "whole.jsonl", logprobs=5)
    source = random.Random(20261130)
    command = [str(SPILL), "distill", str(tiny), "prompts.jsonl", "--batch", "3", "--logprobs", "5",
               "--numerics", "float32", "--headless", "--quiet", "--state", "killed",
               "--out", "killed.jsonl"]  # fmt: skip
    killed(folder, command, "row", [source.randint(1, 25) for _ in range(10)])
    found = rows(folder / "killed.jsonl")
    assert [row["custom_id"] for row in found] == [f"row-{n + 1:06d}" for n in range(200)]
    assert learned(folder / "killed.jsonl") == learned(folder / "whole.jsonl")
