"""Decoding options that a row brings along: the ``body`` of an OpenAI chat completion request.

What cannot be honoured is refused by name. Only a value that asks for nothing (``n`` 1, ``stream`` false, a
penalty of 0) passes, as clients write the defaults out.
"""

from __future__ import annotations

from typing import Any

import msgspec

from spillover.jobs.data.conversation import require_known
from spillover.jobs.data.parse import Fault, kind, quoted

MAX_TOKENS = 2**31 - 1
TOP_LOGPROBS = 64
MAX_TEMPERATURE = 100

HONOURED = (
    "messages",
    "tools",
    "max_tokens",
    "max_completion_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "logprobs",
    "top_logprobs",
)
# The model is named on the command line; the others only matter to the service that they are written for.
WITHOUT_EFFECT = ("model", "user", "metadata", "store", "service_tier", "parallel_tool_calls")
DEFAULTS: dict[str, tuple[object, ...]] = {
    "n": (1,),
    "stream": (False,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto",),
    "stream_options": (),
    "functions": (),
    "function_call": (),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
}


class Options(msgspec.Struct, frozen=True):
    """Decoding as the row asks for it; None where it does not say.

    ``logprobs`` is the number of alternatives a token: 0 for only the log-probability of the token.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] | None = None
    logprobs: int | None = None


def options_of(body: dict[str, Any]) -> tuple[Options, int | None]:
    """The options and the most tokens to generate; raises `Fault` naming the setting that is refused."""
    body = {key: value for key, value in body.items() if value is not None}
    require_known(body, (*HONOURED, *WITHOUT_EFFECT, *DEFAULTS), "the body", "body.")
    for key, values in DEFAULTS.items():
        if key in body and body[key] not in values:
            raise Fault(f"body.{key} is not supported", hint=f"leave out {key!r}")
    options = Options(
        temperature=_number(body, "temperature", 0, MAX_TEMPERATURE),
        top_p=_number(body, "top_p", 0, 1, without=0),
        top_k=_whole(body, "top_k", 0, MAX_TOKENS),
        min_p=_number(body, "min_p", 0, 1, without=1),
        seed=_whole(body, "seed", -(2**63), 2**63 - 1),
        stop=_stop(body.get("stop")),
        logprobs=_logprobs(body),
    )
    return options, max_tokens_of(body, "body.")


def max_tokens_of(row: dict[str, Any], prefix: str = "") -> int | None:
    """The most tokens to generate, by either of OpenAI's names for it; None if the row does not say."""
    old = _whole(row, "max_tokens", 1, MAX_TOKENS, prefix)
    new = _whole(row, "max_completion_tokens", 1, MAX_TOKENS, prefix)
    if old is not None and new is not None and old != new:
        raise Fault(f"{prefix}max_tokens and {prefix}max_completion_tokens differ", hint="keep one of them")
    return old if new is None else new


def _whole(row: dict[str, Any], key: str, low: int, high: int, prefix: str = "body.") -> int | None:
    value = row.get(key)
    if value is None:
        return None
    if type(value) is not int:
        raise Fault(f"{prefix}{key} must be a whole number, not {_shown(value)}")
    if not low <= value <= high:
        raise Fault(f"{prefix}{key} must be from {low} to {high}")
    return value


def _number(
    body: dict[str, Any], key: str, low: int, high: int, *, without: int | None = None
) -> float | None:
    value = body.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Fault(f"body.{key} must be a number, not {kind(value)}")
    if not low <= value <= high:
        raise Fault(f"body.{key} must be from {low} to {high}")
    if value == without:
        raise Fault(f"body.{key} must not be {without}", hint=f"leave out {key!r}")
    return float(value)


def _stop(value: object) -> tuple[str, ...] | None:
    if value is None:
        return None
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise Fault("body.stop must be a string or a list of strings, none of them empty")
    return tuple(stops) or None


def _logprobs(body: dict[str, Any]) -> int | None:
    wanted = body.get("logprobs", False)
    if not isinstance(wanted, bool):
        raise Fault(f"body.logprobs must be true or false, not {kind(wanted)}")
    top = _whole(body, "top_logprobs", 0, TOP_LOGPROBS)
    if not wanted:
        if top:
            raise Fault("body.top_logprobs needs body.logprobs to be true")
        return None
    return top or 0


def _shown(value: object) -> str:
    return (
        repr(value) if isinstance(value, float) else quoted(value) if isinstance(value, str) else kind(value)
    )
