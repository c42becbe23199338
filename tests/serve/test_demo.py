"""The real model behind the API: its tokens are those of `spill run`, also among others."""

from __future__ import annotations

import functools
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from jobs.scenarios import run_job
from served import Running, ask

QUESTIONS = (
    "What is the capital of France?",
    "Name three colours.",
    "How many legs has a spider?",
    "Answer with five emoji.",
    "Write the word 'Tokyo' in Japanese.",
    "What is 2 + 2?",
)


@pytest.fixture
def demo_home() -> Path:
    """Where the demo model is kept, or will be."""
    return Path(os.environ.get("SPILL_HOME", Path.home() / ".spillover"))


@pytest.mark.model
def test_the_demo_answers_as_in_a_run(demo_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Greedy and sampled, whole and streamed, all questions at once, against a run of the same rows."""
    monkeypatch.setenv("SPILL_HOME", str(demo_home))
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": q}) + "\n" for q in QUESTIONS))
    options = ("--state", str(tmp_path / "state"), "--context", "512", "--batch", "16")
    with Running("demo", demo_home, tmp_path / "log", options) as server:
        for decoding in ({"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.95, "seed": 11}):
            result, _ = run_job(tmp_path, Path("demo"), logprobs=0, max_tokens=24, **decoding)
            rows = [json.loads(line) for line in result.run.results.read_text().splitlines()]
            wanted = [
                (choice["message"]["content"], [one["token_id"] for one in choice["logprobs"]["content"]])
                for choice in (row["response"]["body"]["choices"][0] for row in rows)
            ]
            ask_one = functools.partial(said, server, **decoding)
            with ThreadPoolExecutor(12) as pool:
                numbers = [*range(len(QUESTIONS))]
                whole = pool.map(ask_one, numbers, [False] * len(numbers))
                streamed = pool.map(ask_one, numbers, [True] * len(numbers))
                assert [*whole] == wanted
                assert [*streamed] == wanted


def said(server: Running, number: int, stream: bool, **decoding) -> tuple[str, list[int]]:
    answer = server.client.chat.completions.create(
        model="demo", messages=ask(QUESTIONS[number]), max_tokens=24, stream=stream, **decoding,
        extra_body={"custom_id": f"row-{number + 1:06d}", "return_token_ids": True},
    )  # fmt: skip
    if not stream:
        return answer.choices[0].message.content, answer.choices[0].token_ids
    text, ids = "", []
    for chunk in answer:
        text += chunk.choices[0].delta.content or ""
        ids += getattr(chunk.choices[0], "token_ids", None) or []
    return text, ids
