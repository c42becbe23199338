"""A row's answer as a line of a file: for people, and for training another model.

`Answers` writes the OpenAI batch output format, plus a ``spillover`` object. Format:
https://platform.openai.com/docs/guides/batch - ``id``, ``custom_id``, ``response`` with a chat completion as
its body, ``error``. A row that could not be answered has ``response`` null and an error. `Distilled` writes
rows that ``tune`` takes.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from spillover.engine import Completion, TokenLogprob, cut
from spillover.jobs.data import Row
from spillover.models import Tokenizer

if TYPE_CHECKING:
    from spillover.jobs.data.conversation import Message

__all__ = ["Answers", "Distilled", "Format", "RowFailure", "Target", "last_reply", "reply_text"]


@dataclass(frozen=True)
class RowFailure:
    """Why one row has no answer; the job goes on."""

    code: str
    message: str


@dataclass(frozen=True)
class Target:
    """What a row is to say, as it is given: token ids of the conversation before it, and its own."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]


class Format(Protocol):
    """Builds result lines, without their newline."""

    def line(self, row: Row, completions: list[Completion], decoding: dict[str, Any]) -> tuple[str, bytes]:
        """The first sample's text, and the line for a row with one completion a sample."""
        ...

    def failure(self, row: Row, failure: RowFailure) -> bytes:
        """The line for a row that cannot be answered."""
        ...


@dataclass(frozen=True)
class Answers:
    """Builds result lines. ``facts`` is what all rows of a run share, for the ``spillover`` object."""

    model: str
    tokenizer: Tokenizer
    facts: dict[str, Any]

    def line(self, row: Row, completions: list[Completion], decoding: dict[str, Any]) -> tuple[str, bytes]:
        """The first sample's text, and the line for a row with one completion a sample."""
        prompt = completions[0].prompt_tokens
        generated = sum(len(completion.tokens) for completion in completions)
        choices = [self._choice(n, completion, decoding["stop"]) for n, completion in enumerate(completions)]
        body = {
            "id": f"chatcmpl-{row.id}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": self.model,
            "choices": choices,
            "usage": {
                "prompt_tokens": prompt,
                "completion_tokens": generated,
                "total_tokens": prompt + generated,
            },
        }
        ours = self._ours(row) | {
            "tokens": {"prompt": prompt, "completion": generated},
            "latency_s": round(max(completion.seconds for completion in completions), 4),
            "decoding": decoding,
        }
        response = {"status_code": 200, "request_id": f"req-{row.id}", "body": body}
        return choices[0]["message"]["content"], _encoded(row, response, None, ours)

    def failure(self, row: Row, failure: RowFailure) -> bytes:
        """The line for a row that cannot be answered."""
        error = {"code": failure.code, "message": failure.message}
        return _encoded(row, None, error, self._ours(row))

    def _ours(self, row: Row) -> dict[str, Any]:
        ours = {"row": row.index, **self.facts}
        return ours if row.expected is None else ours | {"expected": row.expected}

    def _choice(self, index: int, completion: Completion, stop: list[str]) -> dict[str, Any]:
        text = reply_text(self.tokenizer, completion, stop)
        logprobs = completion.logprobs
        return {
            "index": index,
            "message": {"role": "assistant", "content": text},
            "finish_reason": completion.finish,
            "logprobs": None if logprobs is None else {"content": [self._logprob(one) for one in logprobs]},
        }

    def _logprob(self, one: TokenLogprob) -> dict[str, Any]:
        top = [self._token(token, value) for token, value in one.top]
        return self._token(one.token, one.logprob) | {"top_logprobs": top}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        return {"token": self.tokenizer.decode([token]), "token_id": token, "logprob": round(logprob, 6)}


@dataclass(frozen=True)
class Distilled:
    """Builds lines that ``tune`` learns from: a conversation, what the teacher said, and how likely it was.

    ``logprobs`` has, for each of the completion's tokens, its own log-probability and the most likely tokens
    with theirs, best first, as numbers alone: a fifth of the bytes of the batch format. With ``given`` the
    completion is the row's own last reply.
    """

    tokenizer: Tokenizer
    facts: dict[str, Any]
    given: bool = False

    def line(self, row: Row, completions: list[Completion], decoding: dict[str, Any]) -> tuple[str, bytes]:
        """The completion's text, and the line of a row; there is one sample."""
        (completion,) = completions
        text = reply_text(self.tokenizer, completion, decoding["stop"])
        messages, finish = row.messages, completion.finish
        if self.given:
            messages, reply = last_reply(row)
            text, finish = (reply["content"] if isinstance(reply["content"], str) else text), "stop"
        line: dict[str, Any] = {"custom_id": row.id, "messages": messages}
        if row.tools:
            line["tools"] = row.tools
        line |= {
            "completion": text,
            "completion_token_ids": completion.tokens,
            "finish_reason": finish,
            "logprobs": _numbers(completion.logprobs or []),
            "teacher": self.facts["model"],
        }
        if row.expected is not None:
            line["expected"] = row.expected
        tokens = {"prompt": completion.prompt_tokens, "completion": len(completion.tokens)}
        latency = round(completion.seconds, 4)
        ours = {"row": row.index, **self.facts, "tokens": tokens, "latency_s": latency, "decoding": decoding}
        return text, msgspec.json.encode(line | {"spillover": ours})

    def failure(self, row: Row, failure: RowFailure) -> bytes:
        """A line that is counted and goes no further: there is nothing to learn from it."""
        error = {"code": failure.code, "message": failure.message}
        ours = {"row": row.index, **self.facts}
        return msgspec.json.encode({"error": error, "custom_id": row.id, "spillover": ours})

    @staticmethod
    def learnable(line: bytes) -> bool:
        """Whether a line is no failure."""
        return not line.startswith(b'{"error":')


def last_reply(row: Row) -> tuple[list[Message], Message]:
    """The conversation up to its last reply, and that; what may follow it is left out."""
    turns = row.conversation
    end = max(number for number, message in enumerate(turns) if message["role"] == "assistant")
    return turns[:end], turns[end]


def _numbers(logprobs: list[TokenLogprob]) -> dict[str, Any]:
    return {
        "chosen": [round(one.logprob, 6) for one in logprobs],
        "top_token_ids": [[token for token, _ in one.top] for one in logprobs],
        "top": [[round(value, 6) for _, value in one.top] for one in logprobs],
    }


def reply_text(tokenizer: Tokenizer, completion: Completion, stop: list[str]) -> str:
    """What a completion says, without the token that ended it and what a stop string cuts off."""
    ids = completion.tokens
    if completion.finish == "stop" and ids and ids[-1] in tokenizer.stop_ids:
        ids = ids[:-1]
    return cut(tokenizer.decode(ids), stop)


def _encoded(row: Row, response: Any, error: Any, ours: dict[str, Any]) -> bytes:
    line = {"id": f"batch_req_{row.id}", "custom_id": row.id, "response": response, "error": error}
    return msgspec.json.encode(line | {"spillover": ours})
