"""How long work will take and what bounds it.

A roofline (Williams, Waterman and Patterson, "Roofline", CACM 52(4), 2009) says what a machine allows at
most: every pass reads the weights and the keys and values, and multiplies. What a pass really takes is put
together from a few `Costs` that were measured on this machine with a small model; without them, from the
roofline and shares of it that are usual.

Seconds, bytes, FLOP and FLOP/s throughout; a multiplication and its addition are two FLOP.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import msgspec

Bound: TypeAlias = Literal["memory bandwidth", "arithmetic", "drive"]
_READING, _MULTIPLYING, _TRAINING = 0.8, 0.75, 0.5  # shares of the roofline that are usual
_OVERHEAD, _TRAINING_OVERHEAD = 50e-6, 2e-3  # seconds a layer and pass that are usual
_ADAM_BYTES = 60  # moved per adapter parameter and step: gradient, both moments, their new values, scratch


class Costs(msgspec.Struct, frozen=True):
    """What a pass takes, in seconds, part by part.

    Attributes:
        products: (tokens of a pass, seconds a weight of its layers), ascending; between them a straight line.
        layer: per layer and pass, whatever its tokens.
        element: per token, hidden dimension and layer: norms, rotations, activations.
        attention: per token, position it sees, query dimension and layer, where a pass has a token a row.
        causal: the same, averaged over a pass of whole sequences.
        target: per head weight and target of a loss; only training.
        start: per byte of weights, until the first pass: reading them from the page cache and packing.
    """

    products: tuple[tuple[int, float], ...]
    layer: float
    element: float
    attention: float
    causal: float
    target: float
    start: float

    def product(self, tokens: float) -> float:
        """Seconds that `tokens` tokens take per weight that they meet."""
        (low, first), *rest = self.products
        if tokens <= low:
            return first
        for high, last in rest:
            if tokens <= high:
                return first + (last - first) * (tokens - low) / (high - low)
            low, first = high, last
        return first * tokens / low


@dataclass(frozen=True)
class Limits:
    """The most that a machine does in the numerics at hand; the drive may not have been measured."""

    bandwidth: float
    arithmetic: float
    drive: float | None = None


@dataclass(frozen=True)
class Shape:
    """The numbers of a model that decide what a pass takes.

    ``queries`` is heads times head dimension, ``weights`` what a token meets in all layers' products,
    ``stored`` what the layers have (more, where there are experts), ``head`` those of the output matrix,
    ``width`` bytes a number, ``cache`` bytes of keys and values per position.
    """

    layers: int
    hidden: int
    queries: int
    weights: int
    stored: int
    head: int
    width: int
    cache: int

    @property
    def bytes(self) -> int:
        """Bytes of weights that a pass reads."""
        return self.width * (self.stored + self.head)


@dataclass(frozen=True)
class Traffic:
    """What work must move and multiply at least: bytes to and from memory, FLOP, bytes from the drive."""

    bytes: float = 0.0
    flops: float = 0.0
    read: float = 0.0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.bytes + other.bytes, self.flops + other.flops, self.read + other.read)

    def __sub__(self, other: Traffic) -> Traffic:
        return Traffic(self.bytes - other.bytes, self.flops - other.flops, self.read - other.read)

    def bound(self, limits: Limits) -> tuple[Bound, float]:
        """What holds this back the most, and the seconds that it takes alone."""
        times: dict[Bound, float] = {
            "memory bandwidth": self.bytes / limits.bandwidth,
            "arithmetic": self.flops / limits.arithmetic,
            "drive": self.read / limits.drive if limits.drive else 0.0,
        }
        name = max(times, key=lambda one: times[one])
        return name, times[name]


@dataclass(frozen=True)
class Generation:
    """Rows to answer: mean tokens of a prompt and of an answer, and with how many tokens all prompts begin.

    At most `batch` rows are under way at once; a prefill has at most `pass_tokens` tokens. Of a row that is
    scored, not answered, the last `scored` tokens of the prompt want logits.
    """

    rows: int
    prompt: float
    answer: float
    batch: int
    pass_tokens: int
    shared: int = 0
    scored: float = 0


@dataclass(frozen=True)
class Tuning:
    """Micro-batches to train on: their sequences, mean tokens of one and targets among them.

    `adapter` is the number of trained parameters, `pass_tokens` the most tokens of one pass; `recompute`
    means that layers compute once more in the backward.
    """

    steps: int
    micro_batches: int
    sequences: float
    length: float
    targets: float
    adapter: int
    pass_tokens: int
    recompute: bool = False


@dataclass(frozen=True)
class Estimate:
    """Seconds and tokens (answered or trained on) of some work, and what bounds it the most.

    ``rough`` means that the costs are assumed, not measured.
    """

    seconds: float
    tokens: float
    bound: Bound
    rough: bool

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True)
class Speed:
    """What one model does on one machine. ``costs`` None: they were not measured there.

    What prompts have in common is computed once, in whole blocks of ``block`` tokens; 0: it is not.
    ``streamed`` bytes of weights come from the drive in every pass, in training there and back.
    """

    shape: Shape
    limits: Limits
    costs: Costs | None = None
    block: int = 0
    streamed: int = 0

    def streaming(self, size: int, rate: float) -> Speed:
        """The same with `size` bytes a pass from a drive that reads `rate` bytes a second (0: not known)."""
        return replace(self, streamed=size, limits=replace(self.limits, drive=rate or None))

    def generation(self, work: Generation) -> Estimate:
        """Estimate continuous batching of rows that are all alike."""
        costs = self.costs or assumed(self.limits, self.shape.width)
        together, later = min(work.batch, work.rows), max(0.0, work.answer - 1)
        shared = work.shared // self.block * self.block if self.block else 0
        computed = max(1.0, work.rows * work.prompt - (work.rows - 1) * shared)
        own = computed / work.rows  # a prompt's tokens that are computed
        passes: float = math.ceil(computed / max(own, min(work.pass_tokens, together * own)))
        early, late = shared + own / 2, work.prompt + work.answer / 2  # positions that a token sees
        seconds = costs.start * self.shape.bytes
        logits = work.rows * (work.scored or 1)  # of the prefill
        seconds += passes * self._pass(costs, computed / passes, logits / passes, early * costs.causal)
        waves, rest = divmod(work.rows, together)
        for rows, times in ((together, waves), (rest, int(rest > 0))):
            seconds += times * later * self._pass(costs, rows, rows, late * costs.attention)
            passes += times * later
        seen = computed * early + work.rows * later * late
        produced = work.rows * (work.answer + work.scored)
        traffic = self.passes(passes, computed + work.rows * later, produced, seen)
        return self._estimate(traffic, seconds, produced)

    def tuning(self, work: Tuning) -> Estimate:
        """Estimate optimizer steps over micro-batches that are all alike."""
        costs = self.costs or assumed(self.limits, self.shape.width, training=True)
        tokens = work.sequences * work.length
        passes = math.ceil(tokens / work.pass_tokens)
        one = self._pass(costs, tokens / passes, 0, work.length / 2 * costs.causal)
        one = passes * one * (1.5 if work.recompute else 1) + costs.target * self.shape.head * work.targets
        seconds = costs.start * self.shape.bytes + work.micro_batches * one
        seconds += work.steps * _ADAM_BYTES * work.adapter / self.limits.bandwidth
        traffic = self.trained(
            work.micro_batches * passes,
            work.micro_batches * tokens,
            work.micro_batches * work.targets,
            work.micro_batches * tokens * work.length / 2,
        )
        return self._estimate(traffic, seconds, work.micro_batches * tokens)

    def passes(self, passes: float, tokens: float, logits: float, seen: float) -> Traffic:
        """What inference moves and multiplies: `seen` is the positions that each token attends to, summed."""
        shape = self.shape
        products = 2 * (tokens * shape.weights + logits * shape.head)
        return Traffic(
            passes * shape.bytes + seen * shape.cache,
            products + 4 * seen * shape.layers * shape.queries,
            passes * self.streamed,
        )

    def trained(self, passes: float, tokens: float, targets: float, seen: float) -> Traffic:
        """The same for forward passes and their backward passes, which need gradients of inputs alone."""
        shape = self.shape
        products = 4 * (tokens * shape.weights + targets * shape.head)
        attention = 12 * seen * shape.layers * shape.queries
        return Traffic(2 * passes * shape.bytes, products + attention, passes * self.streamed)

    def _pass(self, costs: Costs, tokens: float, logits: float, attention: float) -> float:
        """Seconds of one pass; `attention` is per token, query dimension and layer."""
        shape = self.shape
        seconds = shape.weights * costs.product(tokens)
        if logits:
            seconds += shape.head * costs.product(logits)
        beside = costs.layer + tokens * (shape.hidden * costs.element + shape.queries * attention)
        return seconds + shape.layers * beside

    def _estimate(self, traffic: Traffic, seconds: float, tokens: float) -> Estimate:
        bound, least = traffic.bound(self.limits)
        return Estimate(max(seconds, least), tokens, bound, self.costs is None)


def assumed(limits: Limits, width: int, *, training: bool = False) -> Costs:
    """Costs that would be usual on a machine of these limits, for numbers of `width` bytes."""
    share = _TRAINING if training else _MULTIPLYING
    flop = (4 if training else 2) / (share * limits.arithmetic)
    reading = (2 if training else 1) * width / (_READING * limits.bandwidth)
    balance = max(2, round(reading / flop))  # tokens that take as long to multiply as to read for
    return Costs(
        products=(
            (1, max(reading, flop)),
            (balance, max(reading, balance * flop)),
            (8 * balance, 8 * balance * flop),
        ),
        layer=_TRAINING_OVERHEAD if training else _OVERHEAD,
        element=0.0,
        attention=4 * 2 / limits.arithmetic * 4,
        causal=4 * flop,
        target=flop,
        start=1 / limits.bandwidth,
    )
