"""The process that runs exported files, and nothing else: what does it make of the trained model's answers?

    python -m spillover.export.check REQUEST

It reads a `Request`, computes the probabilities that the exported model gives to each token of the trained
model's replies and which token it would have said instead, and prints an `Outcome` as its last line. All it
knows of the model comes from the exported files.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from spillover.engine import engine
from spillover.errors import InputError, SpillError
from spillover.export.answers import BATCH, Computing, Question, Reply

if TYPE_CHECKING:
    from spillover.models import Model

__all__ = ["Outcome", "Request", "Scored", "main"]


class Request(msgspec.Struct, frozen=True):
    """What to check: a folder or a GGUF file, on what; ``scratch`` is an empty folder to work in."""

    exported: str
    scratch: str
    questions: list[Question]
    replies: list[Reply]
    memory: int | None
    device: str | None


class Scored(msgspec.Struct, frozen=True):
    """One reply: whether the exported tokenizer makes the same prompt, and by token what the exported model
    says.

    ``tokens`` are the ones that it finds most likely, ``logprobs`` those of the trained model's tokens.
    """

    same_prompt: bool
    tokens: list[int]
    logprobs: list[float]


class Outcome(msgspec.Struct, frozen=True):
    """How it went: every reply, or the one line that says why not."""

    rows: list[Scored] = []
    error: str | None = None
    hint: str | None = None


def main(path: str) -> None:
    """Answer the request in the file `path`."""
    request = msgspec.json.decode(Path(path).read_bytes(), type=Request)
    try:
        outcome = Outcome(_score(request))
    except SpillError as error:
        outcome = Outcome(error=str(error), hint=error.hint)
    except OSError as error:
        outcome = Outcome(
            error=f"the export cannot be checked: {error.strerror or error}", hint="free some space"
        )
    print(msgspec.json.encode(outcome).decode(), flush=True)


def _score(request: Request) -> list[Scored]:
    exported, told = Path(request.exported), _Progress(len(request.replies))
    model, same = _folder(exported, request) if exported.is_dir() else _gguf(exported, request)
    sequences = [[*q.prompt, *r.tokens] for q, r in zip(request.questions, request.replies, strict=True)]
    computing = Computing(request.memory, request.device)
    longest = max(map(len, sequences))
    if longest > model.config.max_positions:
        raise InputError(f"the export reads {model.config.max_positions} tokens, a row has {longest}")
    computes = engine("torch")
    loaded = computes.load(model, computes.plan(model, computing.work(longest, model.config.max_positions)))
    scored: list[Scored] = []
    for first in range(0, len(sequences), BATCH):
        part = slice(first, first + BATCH)
        starts = [len(question.prompt) for question in request.questions[part]]
        for row in loaded.score(sequences[part], starts, top=1):
            found = Scored(same[len(scored)], [one.top[0][0] for one in row], [one.logprob for one in row])
            scored.append(found)
        told(len(scored))
    return scored


def _folder(path: Path, request: Request) -> tuple[Model, list[bool]]:
    from spillover.models.model import inspect
    from spillover.models.tags import parse

    model = inspect(parse(str(path)), path)
    tokenizer = model.tokenizer()
    prompts = (tokenizer.prompt_ids(q.messages, tools=q.tools) for q in request.questions)
    return model, [q.prompt == prompt for q, prompt in zip(request.questions, prompts, strict=True)]


def _gguf(path: Path, request: Request) -> tuple[Model, list[bool]]:
    """The model out of a GGUF file, and whether its tokenizer and template make the same prompts."""
    from spillover.export.gguf.reader import expand, template_of, tokenizer_of
    from spillover.models import Model, ModelConfig, WeightIndex
    from spillover.models.tags import parse

    folder = Path(request.scratch)
    expand(path, folder, lambda done, total: None)
    config = ModelConfig.read(folder)
    WeightIndex(folder).check(config)
    size = sum(file.stat().st_size for file in folder.iterdir())
    inner, template = tokenizer_of(path), template_of(path)
    texts = (template.render(q.messages, tools=q.tools) for q in request.questions)
    prompts = (inner.encode(text, add_special_tokens=False).ids for text in texts)
    same = [q.prompt == prompt for q, prompt in zip(request.questions, prompts, strict=True)]
    return Model(parse(str(folder)), folder, config, "", size), same


class _Progress:
    """Says how many replies are done, as lines that are no `Outcome`, twice a second at most."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._told = 0.0

    def __call__(self, done: int) -> None:
        now = time.monotonic()
        if now - self._told > 0.5:
            self._told = now
            print(f"{done} {self._total}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
