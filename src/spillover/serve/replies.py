"""Answers as the OpenAI API has them: whole, or piece by piece."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from spillover.engine import Completion, TokenLogprob, Withheld
from spillover.jobs.results import Answers, text_of
from spillover.models import StreamDecoder, Tokenizer
from spillover.serve.calls import Call

__all__ = ["DONE", "Reply", "Speech", "event"]

DONE = b"data: [DONE]\n\n"


def event(data: Any) -> bytes:
    """A server-sent event."""
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


class Speech:
    """The text of one choice as its tokens come: whole characters, and nothing of a stop string."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        self._stop_ids = tokenizer.stop_ids
        self._decoder = StreamDecoder(tokenizer)
        self._withheld = Withheld(stop)

    def push(self, token: int) -> str:
        """What can be shown now that `token` came."""
        return "" if token in self._stop_ids else self._withheld.push(self._decoder.push(token))

    def end(self) -> str:
        """The rest."""
        return self._withheld.push(self._decoder.flush()) + self._withheld.end()


@dataclass
class Reply:
    """One answer under construction."""

    call: Call
    tokenizer: Tokenizer
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        chat = self.call.kind == "chat"
        self._answers = Answers(self.call.model, self.tokenizer, {})
        self.id = f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}"

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """The answer that does not stream, with one completion a choice."""
        choose = self._chat_choice if self.call.kind == "chat" else self._text_choice
        choices = [choose(number, one) for number, one in enumerate(completions)]
        return self._head(stream=False) | {"choices": choices, "usage": self.usage(completions)}

    def begin(self, place: int) -> bytes:
        """The first event of a choice."""
        if self.call.kind == "chat":
            extra = self._prompt_ids(place)
            return self._choice_event(place, {"delta": {"role": "assistant", "content": ""}} | extra)
        extra = self._prompt_ids(place)
        return self._choice_event(place, {"text": ""} | extra) if extra else b""

    def piece(self, place: int, text: str, tokens: Sequence[tuple[int, TokenLogprob | None]]) -> bytes:
        """Text of a choice, and the tokens that came with it where the call asks for them."""
        scored = [one for _, one in tokens if one is not None]
        what: dict[str, Any] = {"delta": {"content": text}} if self.call.kind == "chat" else {"text": text}
        if self.call.decoding["logprobs"] is not None:
            chat = self.call.kind == "chat"
            what["logprobs"] = (
                {"content": [self._answers.logprob(one) for one in scored]} if chat else self._legacy(scored)
            )
        if self.call.token_ids:
            what["token_ids"] = [token for token, _ in tokens]
        return self._choice_event(place, what)

    def end(self, place: int, completion: Completion) -> bytes:
        """The last event of a choice."""
        what: dict[str, Any] = {"delta": {}} if self.call.kind == "chat" else {"text": ""}
        return self._choice_event(place, what, completion.finish)

    def usage_event(self, completions: Sequence[Completion]) -> bytes:
        """The last event of an answer that is to say its usage."""
        return event(self._head(stream=True) | {"choices": [], "usage": self.usage(completions)})

    def usage(self, completions: Sequence[Completion]) -> dict[str, int]:
        """Tokens read and written; a prompt counts once, however many answers it has."""
        prompt = sum(map(len, self.call.prompts))
        written = sum(len(one.tokens) for one in completions)
        return {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}

    def _head(self, *, stream: bool) -> dict[str, Any]:
        if self.call.kind == "completions":
            kind = "text_completion"
        else:
            kind = "chat.completion.chunk" if stream else "chat.completion"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.call.model}

    def _choice_event(self, place: int, what: dict[str, Any], finish: str | None = None) -> bytes:
        choice = {"index": place, **what, "finish_reason": finish}
        choice.setdefault("logprobs", None)
        head = self._head(stream=True) | {"choices": [choice]}
        return event(head | {"usage": None} if self.call.usage else head)

    def _chat_choice(self, place: int, completion: Completion) -> dict[str, Any]:
        choice = self._answers.choice(place, completion, self.call.decoding["stop"])
        return choice | self._ids(place, completion)

    def _text_choice(self, place: int, completion: Completion) -> dict[str, Any]:
        scored = completion.logprobs
        return {
            "index": place,
            "text": text_of(self.tokenizer, completion, self.call.decoding["stop"]),
            "finish_reason": completion.finish,
            "logprobs": None if scored is None else self._legacy(scored),
        } | self._ids(place, completion)

    def _ids(self, place: int, completion: Completion) -> dict[str, Any]:
        if not self.call.token_ids:
            return {}
        return {"token_ids": completion.tokens} | self._prompt_ids(place)

    def _prompt_ids(self, place: int) -> dict[str, Any]:
        if not self.call.token_ids:
            return {}
        return {"prompt_token_ids": self.call.prompts[place // self.call.samples]}

    def _legacy(self, scored: Sequence[TokenLogprob]) -> dict[str, Any]:
        """Log-probabilities as completions have them: columns."""

        def text(token: int) -> str:
            return self.tokenizer.decode([token])

        tops = [{text(token): round(value, 6) for token, value in one.top} for one in scored]
        return {
            "tokens": [text(one.token) for one in scored],
            "token_logprobs": [round(one.logprob, 6) for one in scored],
            "top_logprobs": tops if self.call.decoding["logprobs"] else None,
            "text_offset": None,
        }
