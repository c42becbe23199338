"""What the trained model, its adapter beside the weights, says to held-out prompts: greedy, in float32."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from spillover.engine import Completion, Request, Sampling, Scheduler, TokenLogprob, Work, engine
from spillover.errors import InputError, ModelError
from spillover.export.settings import LEAST_ROWS

if TYPE_CHECKING:
    from spillover.models import Adapter, Model, Tokenizer

__all__ = ["MOST_ROWS", "Computing", "Question", "Reply", "ask", "questions"]

Report = Callable[[int, int], None]

MOST_ROWS = 1000
"""Rows of a longer file that are compared; the first ones."""
BATCH = 16
_ROUND = 64


class Question(msgspec.Struct, frozen=True):
    """One prompt: where it is from, its messages, and the tokens that the model's own tokenizer makes of
    it."""

    id: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    prompt: list[int]


class Reply(msgspec.Struct, frozen=True):
    """What the trained model says: its tokens, and the natural log-probability of each.

    ``margins`` are how much less likely the second-best token is, in nats. ``untrained`` are those that the
    base alone gives to the same tokens; empty where there is no adapter.
    """

    tokens: list[int]
    logprobs: list[float]
    margins: list[float]
    untrained: list[float] = []


@dataclass(frozen=True)
class Computing:
    """What to compute with: bytes of memory and the device, None to choose."""

    memory: int | None = None
    device: str | None = None

    def work(self, sequence: int, limit: int) -> Work:
        """Rows of up to `sequence` tokens, in float32, within a context of `limit`."""
        length = min(limit, -(-sequence // _ROUND) * _ROUND)
        return Work("generate", BATCH, length, numerics="float32", device=self.device, memory=self.memory)


def questions(path: Path | None, tokenizer: Tokenizer, room: int) -> list[Question]:
    """The rows of `path`, or those that come with the package, each of at most `room` tokens.

    Raises `InputError` for a file that is no file of prompts or has too few, `ModelError` when the model's
    chat template has no way to write one.
    """
    from spillover.jobs.data import check_file, read_rows

    if room < 1:
        raise InputError("the context holds no prompt beside so many --tokens", hint="lower --tokens")
    with resources.as_file(resources.files("spillover.export") / "prompts.jsonl") as packaged:
        source = path or packaged
        summary = check_file(source, "prompt")
        if summary.rows < LEAST_ROWS:
            raise InputError(
                f"{source} has {summary.rows} rows; answers to at least {LEAST_ROWS} are compared",
                hint="add rows, or leave out --parity to use those that come with spillover",
            )
        rows = islice(read_rows(source, "prompt", stamp=summary.stamp), MOST_ROWS)
        return [_question(source.name, row, tokenizer, room) for row in rows]


def _question(source: str, row: Any, tokenizer: Tokenizer, room: int) -> Question:
    try:
        prompt = tokenizer.prompt_ids(row.messages, tools=row.tools)
    except ModelError as error:
        raise ModelError(f"{source}:{row.line}: {error}", hint=error.hint) from None
    if len(prompt) > room:
        raise InputError(
            f"{source}:{row.line}: a prompt of {len(prompt)} tokens is too long, {room} fit",
            hint="shorten the row, or lower --tokens",
        )
    return Question(f"{source}:{row.line}", row.messages, row.tools, prompt)


def ask(
    model: Model,
    adapter: Adapter | None,
    tokenizer: Tokenizer,
    asked: list[Question],
    tokens: int,
    computing: Computing,
    report: Report,
) -> list[Reply]:
    """The replies of the trained model, in order, of up to `tokens` tokens."""
    computes = engine("torch")
    longest = max(len(question.prompt) for question in asked) + tokens
    plan = computes.plan(model, computing.work(longest, model.config.max_positions))
    loaded = computes.load(model, plan, [adapter] if adapter is not None else [])
    requests = (
        Request(str(i), tuple(question.prompt), tokens, Sampling(), tokenizer.stop_ids, logprobs=2)
        for i, question in enumerate(asked)
    )
    said: dict[int, Completion] = {}
    for done in Scheduler(loaded).run(requests):
        said[int(done.id)] = done
        report(len(said), len(asked))
    replies = [said[i] for i in range(len(asked))]
    untrained: list[list[TokenLogprob]] = [[] for _ in asked]
    if adapter is not None:
        whole = [(*question.prompt, *reply.tokens) for question, reply in zip(asked, replies, strict=True)]
        starts = [len(question.prompt) for question in asked]
        untrained = loaded.score(whole, starts, adapters=[-1] * len(asked))
    return [
        Reply(reply.tokens, _logprobs(reply.logprobs), _margins(reply.logprobs), _logprobs(base))
        for reply, base in zip(replies, untrained, strict=True)
    ]


def _logprobs(tokens: list[TokenLogprob] | None) -> list[float]:
    return [one.logprob for one in tokens or ()]


def _margins(tokens: list[TokenLogprob] | None) -> list[float]:
    return [one.top[0][1] - one.top[1][1] for one in tokens or ()]
