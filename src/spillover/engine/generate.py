"""Continuous batching: rows enter as slots free up, leave as they finish, and never wait for each other.

Requests are pulled from their iterator only when a slot is free, so an input of any length stays out of
memory.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from spillover.engine.estimate import Traffic
from spillover.engine.protocol import Completion, Finish, LoadedModel, NextLogits, Request, TokenLogprob
from spillover.engine.sampling import check, sample, uniform
from spillover.engine.stopping import StopRule, TextStream
from spillover.errors import InputError


@dataclass
class _Row:
    """A request with its answer so far."""

    request: Request
    rule: StopRule
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: Finish | None = None
    started: float = field(default_factory=time.perf_counter)
    ended: float = 0.0

    @property
    def most(self) -> int:
        """Tokens that the row may come to have, prompt and answer."""
        return len(self.request.tokens) + self.request.max_tokens

    @property
    def draws(self) -> str:
        """What its random numbers are drawn for."""
        return self.request.id if self.request.draws is None else self.request.draws

    def append(self, token: int) -> None:
        self.tokens.append(token)
        self.finish = self.rule.push(token)
        if self.finish is not None:
            self.ended = time.perf_counter()

    def completion(self) -> Completion:
        assert self.finish is not None
        return Completion(
            id=self.request.id,
            tokens=self.tokens,
            finish=self.finish,
            logprobs=self.logprobs if self.request.logprobs >= 0 else None,
            prompt_tokens=len(self.request.tokens),
            seconds=self.ended - self.started,
        )


Told = Callable[[Request, int, TokenLogprob | None], None]
"""Hears each token that a pass makes: of which request, and how likely it was if that was asked for."""


class Scheduler:
    """Generates rows over the slots of one session of `model`.

    `stream` makes the text stream that stop strings are looked for in; requests with ``stop`` need it.
    `should_stop` is asked between passes: once it answers True, `run` ends and `partials` says what is
    unfinished. In it rows may be withdrawn, and what `run` pulls from may have more again after it had
    nothing: as long as there are rows, it is asked before each pass. `told` hears tokens as they are made.
    ``prefilled`` and ``generated`` count tokens so far, ``traffic`` what passes moved and
    multiplied at least, as far as the plan knows the model's speed.
    """

    def __init__(
        self,
        model: LoadedModel,
        *,
        stream: Callable[[], TextStream] | None = None,
        should_stop: Callable[[], bool] = lambda: False,
        told: Told = lambda request, token, logprob: None,
    ) -> None:
        self.prefilled = 0
        self.generated = 0
        self.traffic = Traffic()
        self._model = model
        self._session = model.session()
        self._stream = stream
        self._should_stop = should_stop
        self._told = told
        self._rows: list[_Row] = []  # index = the session's row number
        self._newcomers: list[_Row] = []  # of the pass under way
        self._unscored: list[_Row] = []  # came with tokens whose log-probabilities are asked for
        self._held: _Row | None = None  # pulled, but too long for the prefill pass that was being filled
        self._finished: deque[_Row] = deque()

    def run(self, requests: Iterable[Request]) -> Iterator[Completion]:
        """Yield completions as rows finish, in any order.

        Raises `InputError` for a request that is empty, does not fit the context, or samples out of range.
        """
        source = iter(requests)
        while not self._should_stop():
            self._pull(source)
            self._score()
            if self._newcomers or self._rows:
                self._pass(self._newcomers)
            elif not self._finished:
                return
            while self._finished:
                yield self._finished.popleft().completion()

    def partials(self) -> dict[str, list[int]]:
        """Tokens answered so far by rows that `run` pulled and did not yield, by request id.

        Put them into ``Request.generated`` and the row continues as if it had never stopped.
        """
        held = [self._held] if self._held else []
        rows = (*self._finished, *self._rows, *self._newcomers, *held)
        return {row.request.id: list(row.tokens) for row in rows}

    @property
    def running(self) -> int:
        """Rows that have a slot."""
        return len(self._rows)

    @property
    def held(self) -> Request | None:
        """What was pulled and waits for memory; nothing else is pulled before it has a slot."""
        return self._held.request if self._held else None

    def withdraw(self, request_id: str) -> list[int] | None:
        """Forget a row between two passes; its tokens so far, or None if it is not here any more."""
        if self._held is not None and self._held.request.id == request_id:
            held, self._held = self._held, None
            return held.tokens
        for number, row in enumerate(self._rows):
            if row.request.id == request_id:
                self._remove(number)
                return row.tokens
        return None

    def _pull(self, source: Iterator[Request]) -> None:
        """Newcomers for one pass: as many as the session has room for, within the tokens of a pass."""
        rows = self._newcomers  # at once, so that an interruption finds them there
        room = self._model.plan.pass_tokens - (len(self._rows) if self._session.joins else 0)
        while len(self._rows) + len(rows) < self._session.slots:
            row = self._held or self._next(source)
            self._held = None
            if row is None:
                break
            room -= len(row.request.tokens) + len(row.tokens)
            fits = (not rows or room >= 0) and self._session.reserve(row.most)
            if not fits:
                self._held = row
                break
            rows.append(row)

    def _next(self, source: Iterator[Request]) -> _Row | None:
        """The next request with tokens left to answer; complete ones go to the finished.

        None too when those are enough for a pass of scoring.
        """
        complete = 0
        for request in source:
            row = self._replay(request)
            if row.finish is None:
                return row
            self._finished.append(row)
            complete += row.most
            if complete >= self._model.plan.pass_tokens:
                break
        return None

    def _replay(self, request: Request) -> _Row:
        self._check(request)
        row = _Row(request, StopRule(request, self._stream or _no_stream))
        for token in request.generated:
            row.append(token)
            if row.finish is not None:
                break
        if row.tokens and request.logprobs >= 0:
            self._unscored.append(row)
        return row

    def _score(self) -> None:
        """Log-probabilities of the tokens that rows came with, those of many rows in one pass."""
        for top in {row.request.logprobs for row in self._unscored}:
            rows = [row for row in self._unscored if row.request.logprobs == top]
            scored = self._model.score(
                [(*row.request.tokens, *row.tokens) for row in rows],
                [len(row.request.tokens) for row in rows],
                top=top,
                adapters=[row.request.adapter for row in rows],
            )
            for row, found in zip(rows, scored, strict=True):
                row.logprobs = found
                row.ended = time.perf_counter() if row.finish is not None else row.ended
            self.prefilled += sum(row.most for row in rows if row.finish is not None)
            self._count_scored([len(row.request.tokens) + len(row.tokens) for row in rows], scored)
        self._unscored.clear()

    def _check(self, request: Request) -> None:
        check(request.sampling)
        if not request.tokens or request.max_tokens < 1:
            what = "has an empty prompt" if not request.tokens else f"asks for {request.max_tokens} tokens"
            raise InputError(f"row {request.id} {what}")
        if len(request.tokens) + request.max_tokens > self._session.length:
            raise InputError(
                f"row {request.id}: a prompt of {len(request.tokens)} tokens and an answer of up to "
                f"{request.max_tokens} exceed the context of {self._session.length}",
                hint="shorten the row or lower max_tokens",
            )

    def _pass(self, newcomers: list[_Row]) -> None:
        """Every row says its next token, newcomers their first; a session may need a pass of its own for
        these."""
        present = self._rows if self._session.joins or not newcomers else []
        prompts = [(*row.request.tokens, *row.tokens) for row in newcomers]
        adapters = [row.request.adapter for row in newcomers]
        found = self._session.shared
        if present:
            last = [row.tokens[-1] for row in present]
            logits = self._session.decode(last, prompts, adapters) if prompts else self._session.decode(last)
        else:
            logits = self._session.admit(prompts, adapters)
        prefilled = sum(len(prompt) for prompt in prompts)
        self.prefilled += prefilled
        seen = sum(len(row.request.tokens) + len(row.tokens) for row in present)
        seen += sum(len(prompt) ** 2 for prompt in prompts) // 2
        computed = len(present) + prefilled - (self._session.shared - found)
        rows = [*present, *newcomers]
        self._count(computed, len(rows), seen)
        self._rows += newcomers
        self._newcomers = []
        self._choose(rows, logits)

    def _count(self, tokens: int, logits: int, seen: int) -> None:
        """Note a pass that computed `tokens` tokens, which attended to `seen` positions in all."""
        speed = self._model.plan.speed
        if speed is not None:
            self.traffic += speed.passes(1, tokens, logits, seen)

    def _count_scored(self, lengths: Sequence[int], scored: Sequence[Sequence[object]]) -> None:
        """Note the passes of whole sequences of `lengths` tokens, some of which were scored."""
        speed, tokens = self._model.plan.speed, sum(lengths)
        if speed is not None:
            passes = -(-tokens // self._model.plan.pass_tokens)
            seen = sum(length**2 for length in lengths) // 2
            self.traffic += speed.passes(passes, tokens, sum(map(len, scored)), seen)

    def _choose(self, rows: Sequence[_Row], logits: NextLogits) -> None:
        """Append a token to each of `rows`, whose logits are in the same order, and release the finished."""
        tokens = self._tokens(rows, logits)
        for top in {row.request.logprobs for row in rows if row.request.logprobs >= 0}:
            places = [place for place, row in enumerate(rows) if row.request.logprobs == top]
            scored = logits.logprobs(places, [tokens[place] for place in places], top)
            for place, logprob in zip(places, scored, strict=True):
                rows[place].logprobs.append(logprob)
        for row, token in zip(rows, tokens, strict=True):
            row.append(token)
            self._told(row.request, token, row.logprobs[-1] if row.request.logprobs >= 0 else None)
        self.generated += len(rows)
        self._release()

    def _tokens(self, rows: Sequence[_Row], logits: NextLogits) -> list[int]:
        """What each of `rows` says next."""
        tokens: list[int] = []
        greedy = logits.argmax() if any(row.request.sampling.temperature == 0 for row in rows) else None
        for place, row in enumerate(rows):
            sampling = row.request.sampling
            if greedy is not None and sampling.temperature == 0:
                tokens.append(int(greedy[place]))
            else:
                u = uniform(sampling.seed, row.draws, len(row.tokens))
                tokens.append(sample(logits.numpy(place), sampling, u))
        return tokens

    def _release(self) -> None:
        for number in range(len(self._rows) - 1, -1, -1):
            row = self._rows[number]
            if row.finish is not None:
                self._remove(number)
                self._finished.append(row)

    def _remove(self, number: int) -> None:
        """Free a row's slot; the last row takes its number."""
        self._session.release(number)
        self._rows[number] = self._rows[-1]
        self._rows.pop()


def _no_stream() -> TextStream:
    raise InputError("stop strings need a tokenizer to find them in text")
