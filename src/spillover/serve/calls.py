"""What a request asks for: bodies of chat completions and completions, checked.

Decoding is checked by what checks the rows of files (`spillover.jobs.data.options`), so that a body means the
same here and in a batch. What cannot be honoured is refused by name.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from spillover.engine import Request, Sampling
from spillover.errors import ModelError
from spillover.jobs.data.conversation import messages_of, tools_of
from spillover.jobs.data.options import TOP_LOGPROBS, Options, options_of
from spillover.jobs.data.parse import Fault, kind, parse_object
from spillover.jobs.data.rows import generated_id
from spillover.models import Tokenizer
from spillover.serve.refusals import Refused

__all__ = ["Call", "Kind", "Limits", "body_of", "read_call"]

Kind: TypeAlias = Literal["chat", "completions"]
MAX_SAMPLES = 128
MAX_PROMPTS = 1024
OWN = ("model", "n", "stream", "stream_options", "return_token_ids", "custom_id")
"""What is read here and not part of decoding."""
COMPLETIONS_ONLY = ("prompt", "echo", "suffix", "best_of", "logprobs")
_FIELD, _FIRST = re.compile(r"body\.(\w+)"), re.compile(r"(\w+)")


@dataclass(frozen=True)
class Limits:
    """What a call may ask for: tokens of a prompt and its answer, and of an answer that does not say."""

    context: int
    max_tokens: int
    names: Mapping[str, int]


@dataclass(frozen=True)
class Call:
    """A checked request.

    ``prompts`` are token ids, ``samples`` the answers wanted of each. ``decoding`` is as `spill run` records
    it. Random numbers are those of rows of a file: of the one called ``row``, or of its first rows where that
    is None.
    """

    kind: Kind
    model: str
    adapter: int
    prompts: tuple[tuple[int, ...], ...]
    samples: int
    decoding: dict[str, Any]
    stop_ids: frozenset[int]
    row: str | None
    stream: bool = False
    usage: bool = False
    token_ids: bool = False

    def requests(self) -> list[Request]:
        """One for each choice, in their order."""
        return [
            self._request(prompt, number, sample)
            for number, prompt in enumerate(self.prompts)
            for sample in range(self.samples)
        ]

    def _request(self, prompt: tuple[int, ...], number: int, sample: int) -> Request:
        decoding = self.decoding
        row = generated_id(number)
        if self.row is not None:
            row = self.row if number == 0 else f"{self.row}\0prompt {number}"
        return Request(
            id=row if sample == 0 else f"{row}\0{sample}",
            tokens=prompt,
            max_tokens=decoding["max_tokens"][number],
            sampling=Sampling(*(decoding[key] for key in ("temperature", "top_p", "top_k", "min_p", "seed"))),
            stop_ids=self.stop_ids,
            stop=tuple(decoding["stop"]),
            logprobs=-1 if decoding["logprobs"] is None else decoding["logprobs"],
            adapter=self.adapter,
        )


def body_of(data: bytes) -> dict[str, Any]:
    """The JSON object of a body, without keys that are null.

    Raises:
        Refused: it is none.
    """
    try:
        body = parse_object(data)
    except Fault as fault:
        raise Refused(400, fault.message.replace("a row must", "the body must")) from None
    return {key: value for key, value in body.items() if value is not None}


def read_call(kind: Kind, data: bytes, tokenizer: Tokenizer, limits: Limits) -> Call:
    """Check a body and tokenize its prompts.

    Raises:
        Refused: something in it is wrong or not known here.
    """
    body = body_of(data)
    try:
        return _call(kind, body, tokenizer, limits)
    except Fault as fault:
        message = fault.message + (f"; {fault.hint}" if fault.hint else "")
        raise Refused(400, message.replace("body.", ""), param=_param(fault.message, body)) from None


def _call(kind: Kind, body: dict[str, Any], tokenizer: Tokenizer, limits: Limits) -> Call:
    model = _model(body, limits)
    samples = _whole(body, "n", 1, MAX_SAMPLES, 1)
    options, asked = _decoding(kind, body, samples)
    prompts = _chat(body, tokenizer) if kind == "chat" else _prompts(body, tokenizer)
    param = "messages" if kind == "chat" else "prompt"
    most = [_room(prompt, asked, limits, param) for prompt in prompts]
    row = body.get("custom_id")
    if row is not None and (not isinstance(row, str) or not row):
        raise Fault("body.custom_id must be a string that is not empty")
    stream = _flag(body, "stream")
    return Call(
        kind=kind,
        model=model,
        adapter=limits.names[model],
        prompts=tuple(map(tuple, prompts)),
        samples=samples,
        decoding=_applied(options, most),
        stop_ids=tokenizer.stop_ids,
        row=row,
        stream=stream,
        usage=_usage(body, stream),
        token_ids=_flag(body, "return_token_ids"),
    )


def _model(body: dict[str, Any], limits: Limits) -> str:
    name = body.get("model")
    if name is None:
        raise Fault("body.model is missing", hint=f"served here: {', '.join(limits.names)}")
    if not isinstance(name, str):
        raise Fault(f"body.model must be a string, not {kind(name)}")
    if name not in limits.names:
        known = ", ".join(limits.names)
        raise Refused(
            404, f"there is no model {name[:80]!r} here, only {known}", param="model", code="model_not_found"
        )
    return name


def _decoding(kind: Kind, body: dict[str, Any], samples: int) -> tuple[Options, int | None]:
    rest = {key: value for key, value in body.items() if key not in OWN}
    if kind == "completions":
        for key in ("messages", "tools"):
            if key in rest:
                raise Fault(f"body.{key} is for chat completions")
        if _flag(rest, "echo"):
            raise Fault("body.echo is not supported", hint="put the prompt before the answer yourself")
        if "suffix" in rest:
            raise Fault("body.suffix is not supported")
        if _whole(rest, "best_of", 1, MAX_SAMPLES, samples) != samples:
            raise Fault("body.best_of is not supported", hint="ask for n")
        top = _whole(rest, "logprobs", 0, TOP_LOGPROBS, -1)
        rest = {key: value for key, value in rest.items() if key not in COMPLETIONS_ONLY}
        if top >= 0:
            rest |= {"logprobs": True, "top_logprobs": top}
    return options_of(rest)


def _applied(options: Options, most: list[int]) -> dict[str, Any]:
    """The decoding that applies; what a request leaves out is what the OpenAI API says, and a new seed."""
    return {
        "max_tokens": most,
        "temperature": 1.0 if options.temperature is None else options.temperature,
        "top_p": 1.0 if options.top_p is None else options.top_p,
        "top_k": options.top_k or 0,
        "min_p": options.min_p or 0.0,
        "seed": secrets.randbits(62) if options.seed is None else options.seed,
        "stop": list(options.stop or ()),
        "logprobs": options.logprobs,
    }


def _chat(body: dict[str, Any], tokenizer: Tokenizer) -> list[list[int]]:
    if "messages" not in body:
        raise Fault("body.messages is missing")
    messages = messages_of(body["messages"])
    if messages[-1]["role"] not in ("user", "tool"):
        raise Fault("messages end with one that is not the user's: there is nothing to answer")
    tools = tools_of(body["tools"]) if body.get("tools") else None
    try:
        return [tokenizer.prompt_ids(messages, tools=tools)]
    except ModelError as error:  # the chat template refuses the conversation
        raise Refused(400, str(error), param="messages") from None


def _prompts(body: dict[str, Any], tokenizer: Tokenizer) -> list[list[int]]:
    """One prompt or several, each a string or token ids."""
    prompt = body.get("prompt")
    if prompt is None:
        raise Fault("body.prompt is missing")
    several = prompt if isinstance(prompt, list) and not _is_ids(prompt) else [prompt]
    if not several or len(several) > MAX_PROMPTS:
        raise Fault(f"body.prompt must be one prompt or a list of up to {MAX_PROMPTS}")
    return [_prompt(one, tokenizer) for one in several]


def _is_ids(value: list[Any]) -> bool:
    return bool(value) and type(value[0]) is int


def _prompt(prompt: Any, tokenizer: Tokenizer) -> list[int]:
    if isinstance(prompt, str):
        try:
            ids = tokenizer.text_ids(prompt)
        except ModelError as error:
            raise Refused(400, str(error), param="prompt") from None
    elif isinstance(prompt, list) and all(type(token) is int for token in prompt):
        ids = prompt
    else:
        raise Fault("body.prompt must be a string, a list of token ids, or a list of either")
    if not ids:
        raise Fault("body.prompt is empty")
    if unknown := next((token for token in ids if not 0 <= token < tokenizer.vocab_size), None):
        raise Fault(f"body.prompt has the token id {unknown}; there are {tokenizer.vocab_size}")
    return ids


def _room(prompt: list[int], asked: int | None, limits: Limits, param: str) -> int:
    """The most tokens that an answer may have."""
    left = limits.context - len(prompt)
    if left < (asked or 1):
        answer = "no token of an answer is left" if asked is None else f"the answer may have {asked}"
        raise Refused(
            400,
            f"the prompt has {len(prompt)} tokens and {answer}; the context is {limits.context}",
            param=param,
            code="context_length_exceeded",
        )
    return min(left, limits.max_tokens) if asked is None else asked


def _usage(body: dict[str, Any], stream: bool) -> bool:
    options = body.get("stream_options", {})
    if not isinstance(options, dict):
        raise Fault(f"body.stream_options must be an object, not {kind(options)}")
    if options and not stream:
        raise Fault("body.stream_options needs body.stream to be true")
    if unknown := next((key for key in options if key not in ("include_usage", "include_obfuscation")), None):
        raise Fault(f"body.stream_options has an unknown key {unknown[:60]!r}")
    return _flag(options, "include_usage", "stream_options.include_usage")


def _flag(body: dict[str, Any], key: str, name: str | None = None) -> bool:
    value = body.get(key, False)
    if not isinstance(value, bool):
        raise Fault(f"body.{name or key} must be true or false, not {kind(value)}")
    return value


def _whole(body: dict[str, Any], key: str, low: int, high: int, otherwise: int) -> int:
    value = body.get(key, otherwise)
    if value == otherwise and type(value) is int:
        return otherwise
    if type(value) is not int or not low <= value <= high:
        raise Fault(f"body.{key} must be a whole number from {low} to {high}")
    return value


def _param(message: str, body: dict[str, Any]) -> str | None:
    """The field that a fault is about: the first that it names."""
    if field := _FIELD.search(message):
        return field[1]
    first = _FIRST.match(message)
    return first[1] if first and first[1] in body else None
