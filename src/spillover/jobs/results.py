"""A row's answer as a line of the OpenAI batch output format, plus a ``spillover`` object.

Format: https://platform.openai.com/docs/guides/batch - ``id``, ``custom_id``, ``response`` with a chat
completion as its body, ``error``. A row that could not be answered has ``response`` null and an error.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import msgspec

from spillover.engine import Completion, TokenLogprob, cut
from spillover.jobs.data import Row
from spillover.models import Tokenizer

__all__ = ["Answers", "RowFailure"]


@dataclass(frozen=True)
class RowFailure:
    """Why one row has no answer; the job goes on."""

    code: str
    message: str


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
        ids = completion.tokens
        if completion.finish == "stop" and ids and ids[-1] in self.tokenizer.stop_ids:
            ids = ids[:-1]
        text = cut(self.tokenizer.decode(ids), stop)
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


def _encoded(row: Row, response: Any, error: Any, ours: dict[str, Any]) -> bytes:
    line = {"id": f"batch_req_{row.id}", "custom_id": row.id, "response": response, "error": error}
    return msgspec.json.encode(line | {"spillover": ours})
