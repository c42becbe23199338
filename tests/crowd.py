"""Many clients at once, some of whom leave in the middle of an answer."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

import openai


@dataclass
class Found:
    """What a crowd saw: answers to the end, answers left, and what should not have been."""

    finished: int = 0
    left: int = 0
    refused: int = 0
    tokens: int = 0
    first: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def crowd(url: str, model: str, *, clients: int, seconds: float, tokens: int = 40, token: str = "x") -> Found:
    """Let clients stream one answer after the other; every third of the answers is left half-way.

    Every client asks the same with the same seed, so each has to get the same text.
    """
    return asyncio.run(_crowd(url, model, clients, seconds, tokens, token))


async def _crowd(url: str, model: str, clients: int, seconds: float, tokens: int, token: str) -> Found:
    found, end = Found(), time.monotonic() + seconds
    async with openai.AsyncOpenAI(base_url=url, api_key=token, max_retries=0, timeout=120) as client:
        said: dict[int, str] = {}

        async def ask(number: int) -> None:
            turn = number
            while time.monotonic() < end:
                turn += 1
                await _one(client, model, turn % 8, tokens, leaves=turn % 3 == 0, found=found, said=said)

        await asyncio.gather(*(ask(number) for number in range(clients)))
    return found


async def _one(
    client: openai.AsyncOpenAI,
    model: str,
    seed: int,
    tokens: int,
    *,
    leaves: bool,
    found: Found,
    said: dict[int, str],
) -> None:
    begun, text, finish, pieces = time.monotonic(), "", None, 0
    try:
        stream = await client.completions.create(
            model=model, prompt="The capital of", max_tokens=tokens, seed=seed, temperature=1.0, stream=True,
            extra_body={"return_token_ids": True},
        )  # fmt: skip
        async with stream:
            async for chunk in stream:
                if not pieces:
                    found.first.append(time.monotonic() - begun)
                pieces += 1
                text += chunk.choices[0].text
                found.tokens += len(getattr(chunk.choices[0], "token_ids", None) or [])
                finish = chunk.choices[0].finish_reason or finish
                if leaves and pieces > tokens // 4:
                    found.left += 1
                    return
    except openai.RateLimitError:
        found.refused += 1
        await asyncio.sleep(0.05)
        return
    except openai.APIError as error:
        found.wrong.append(repr(error))
        return
    found.finished += 1
    if finish not in ("stop", "length"):
        found.wrong.append(f"an answer ended with {finish}")
    if said.setdefault(seed, text) != text:
        found.wrong.append(f"seed {seed} said {text!r} and {said[seed]!r}")
