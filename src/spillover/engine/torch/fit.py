"""What a piece of work takes, part by part, and how much of it a memory limit allows."""

from __future__ import annotations

import math
from dataclasses import dataclass

from spillover.engine.protocol import Work
from spillover.engine.ring import Drive, LayerIndex, Layout
from spillover.engine.torch.device import pick_device
from spillover.engine.torch.linear import Packed
from spillover.engine.torch.lora import parameters
from spillover.engine.torch.packing import whole
from spillover.engine.torch.tiles import KEPT_LENGTH
from spillover.engine.torch.weights import FUSED
from spillover.errors import EngineError
from spillover.models import ModelConfig
from spillover.models.config import Experts
from spillover.models.index import layer_tensors, linears
from spillover.models.lora import LoraConfig

PREFILL_TOKENS = 2048  # newcomers' tokens in one pass: enough to keep the products large
LOGIT_BYTES = 64 << 20  # float32 logits alive at once in a loss or a score
CACHE_GRAIN = 32  # positions: caches grow by as many
_LEAST_TOKENS = 256  # of a pass, where memory is short
_RUNTIME = 250 << 20  # torch itself, its kernels and thread stacks


@dataclass(frozen=True)
class Fit:
    """What a memory limit allows; the fields are those of `spillover.engine.protocol.Plan`."""

    batch: int
    pass_tokens: int
    cache_tokens: int
    parts: list[tuple[str, int]]
    two_layouts: bool = False
    recompute: bool = False
    saved_bytes: int | None = None
    layout: Layout | None = None
    read_bytes: int = 0

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(size for _, size in self.parts)


@dataclass(frozen=True)
class Sizes:
    """Bytes of a model's parts in one dtype; `compiled` kernels keep less of a training pass than torch's."""

    config: ModelConfig
    width: int  # bytes of an element
    compiled: bool = False

    def weights(self) -> int:
        """All of them, as inference lays them out."""
        # a tied head is packed beside the embedding, so both count
        return self.width * self._layers() + 2 * self.head()

    def head(self) -> int:
        """The output matrix."""
        return self.width * self.config.vocab_size * self.config.hidden_size

    def cache_token(self) -> int:
        """Keys and values of one position."""
        c = self.config
        return self.width * 2 * c.layers * c.kv_heads * c.head_dim

    def row(self, sequence: int) -> int:
        """A row of up to `sequence` tokens: its cache and its logits."""
        logits = self.config.vocab_size * (4 + self.width)
        return self.cache_token() * (sequence + CACHE_GRAIN) + logits

    def pass_token(self) -> int:
        """A token of an inference pass: the widest moment of a layer."""
        c = self.config
        return self.width * (4 * c.hidden_size + 4 * self._inner() + 3 * c.heads * c.head_dim)

    def worn(self, lora: LoraConfig | None) -> int:
        """An adapter that rows wear: as it is kept, and beside the fused products."""
        if lora is None:
            return 0
        beside = 0
        for number in range(self.config.layers):
            modules = linears(self.config, number)
            for names in FUSED.values():
                inside = [modules[name] for name in names if name in modules]
                rank = lora.rank * sum(name in modules and name in lora.targets for name in names)
                if rank:
                    beside += rank * (inside[0][0] + sum(outputs for _, outputs in inside))
        return 4 * parameters(self.config, lora) + self.width * beside

    def training_weights(self, layouts: int) -> int:
        """Weights with the products in so many layouts; the head is read as it lies in the file."""
        return self.width * layouts * self._layers() + (1 if self.config.tied else 2) * self.head()

    def largest_layer(self) -> int:
        """The layer that takes most."""
        return self.width * max(self._layer(number) for number in range(self.config.layers))

    def saved_token(self, length: int, rank: int) -> int:
        """A token of a training pass over sequences of `length`: what one layer saves for the backward."""
        c = self.config
        normed = 6 if c.output_norms else 4
        attention, inner = c.head_dim * (2 * c.heads + 2 * c.kv_heads), 3
        if not self.compiled:
            attention, inner = attention + c.heads * min(length, KEPT_LENGTH), 4
        return self.width * (normed * c.hidden_size + attention + inner * self._inner() + 7 * rank)

    def backward_token(self) -> int:
        """A token of a training pass: the widest moment of one layer's backward."""
        return self.width * 8 * self._inner()

    def input_token(self) -> int:
        """A token of a training pass: the inputs of all layers, kept where layers compute again."""
        return self.width * self.config.layers * self.config.hidden_size

    def _layer(self, number: int) -> int:
        return sum(math.prod(shape) for shape in layer_tensors(self.config, number).values())

    def _layers(self) -> int:
        return sum(self._layer(number) for number in range(self.config.layers))

    def _inner(self) -> int:
        """The width of a token's feed-forward part; each expert also takes and gives a residual's width."""
        c, experts = self.config, self.config.experts
        if experts is None:
            return c.intermediate_size
        sparse = experts.per_token * (experts.intermediate_size + c.hidden_size)
        return sparse if len(experts.layers) == c.layers else max(sparse, c.intermediate_size)


def resident(sizes: Sizes, work: Work, limit: int) -> Fit:
    """All weights in memory. The parts exceed `limit` where that cannot be."""
    return _training(sizes, work, limit) if work.kind == "train" else _generation(sizes, work, limit)


@dataclass(frozen=True)
class Streaming:
    """What layers are streamed from, and through.

    ``places`` is how many layers are copied out of the ring's buffers: none for kernels that read them there.
    ``host`` is the memory of the ring where products have one of their own, on a GPU; else None.
    """

    layers: LayerIndex
    drive: Drive
    places: int
    host: int | None = None
    rule: Experts | None = None

    @property
    def least(self) -> int:
        """Bytes that the usual buffers take of the memory that products have."""
        return Layout.of(self.layers, self.drive).bytes if self.host is None else 0

    def layout(self, budget: int) -> Layout:
        """What reads least within `budget`, or the smallest there is."""
        budget = budget if self.host is None else self.host
        smallest = Layout.of(self.layers, self.drive, slots=2, expert_slots=2)
        return Layout.within(self.layers, self.drive, budget) if smallest.bytes <= budget else smallest

    def read(self, layout: Layout, tokens: int) -> int:
        """Bytes that a pass of `tokens` tokens reads, each routed to experts as if by chance."""
        there = [number for number in range(len(self.layers.layers)) if number not in layout.pinned]
        shared = sum(self.layers.layers[number].size for number in there) if layout.slots < len(there) else 0
        experts = sum(part.size for number in there for part in self.layers.experts[number])
        if self.places or self.rule is None:  # torch's kernels take all of a layer
            return shared + experts
        missed = (1 - self.rule.per_token / self.rule.count) ** tokens
        return shared + round((1 - missed) * experts)

    def read_twice(self, layout: Layout) -> int:
        """Bytes that a training pass reads: what lies in buffers when it turns is not read again."""
        there = len(self.layers.layers) - len(layout.pinned)
        return round(2 * layout.pass_bytes * max(0.0, 1 - layout.slots / there)) if there else 0

    def parts(self, layout: Layout, sizes: Sizes) -> list[tuple[str, int]]:
        """What it takes of the memory that products have."""
        staged = [("layer", self.places * sizes.largest_layer())] if self.places else []
        if self.host is not None:
            return staged
        buffers = layout.bytes - layout.pinned_bytes
        return [("buffers", buffers), ("layers kept", layout.pinned_bytes), *staged]


def streamed(sizes: Sizes, work: Work, limit: int, streaming: Streaming) -> Fit:
    """Layers through a ring of buffers, what is left keeps some. The parts may exceed `limit`."""
    limit -= sizes.head() + streaming.places * sizes.largest_layer()
    fit = _streamed_training if work.kind == "train" else _streamed_generation
    return fit(sizes, work, limit, streaming)


def _generation(sizes: Sizes, work: Work, limit: int) -> Fit:
    fixed = [
        ("weights", sizes.weights()),
        ("adapter", sizes.worn(work.lora)),
        ("activations", sizes.pass_token() * max(PREFILL_TOKENS, work.sequence) + _RUNTIME),
    ]
    batch = _rows(sizes, work, limit - sum(size for _, size in fixed))
    parts = [*fixed, ("cache", batch * sizes.row(work.sequence))]
    return Fit(batch, PREFILL_TOKENS, _cache_tokens(batch, work), parts)


def _streamed_generation(sizes: Sizes, work: Work, limit: int, streaming: Streaming) -> Fit:
    """Rows before pinned layers: a pass costs the same with one row more, and little less with a layer less
    to read. No pass has room for more tokens than all rows together."""
    least, row = streaming.least, sizes.row(work.sequence)
    tokens = min(PREFILL_TOKENS, max(_LEAST_TOKENS, work.batch * work.sequence))
    while True:
        activations = sizes.pass_token() * max(tokens, work.sequence) + _RUNTIME
        room = limit - activations - sizes.worn(work.lora)
        if room - least >= row or tokens <= _LEAST_TOKENS:
            break
        tokens //= 2
    batch = _rows(sizes, work, room - least)
    layout = streaming.layout(room - batch * row)
    parts = [
        *streaming.parts(layout, sizes),
        ("head", sizes.head()),
        ("adapter", sizes.worn(work.lora)),
        ("activations", activations),
        ("cache", batch * row),
    ]
    read = streaming.read(layout, batch)
    return Fit(batch, tokens, _cache_tokens(batch, work), parts, layout=layout, read_bytes=read)


def _rows(sizes: Sizes, work: Work, room: int) -> int:
    """How many rows `room` bytes hold; at least one is tried."""
    return max(1, min(work.batch, room // sizes.row(work.sequence)))


def _cache_tokens(batch: int, work: Work) -> int:
    return batch * (work.sequence + CACHE_GRAIN)


def _training(sizes: Sizes, work: Work, limit: int) -> Fit:
    """The fastest way that has room for a sequence.

    Sequences of a micro-batch that do not fit together go through in several passes of whole sequences.
    """
    rank, longest = _rank(work), whole(work.sequence)
    saved = sizes.saved_token(work.sequence, rank)
    for two_layouts, recompute in [*_packed(work), (False, False), (False, True)]:
        fixed = [("weights", sizes.training_weights(1 + two_layouts)), *_trained(sizes, work)]
        kept = saved + sizes.input_token() if recompute else sizes.config.layers * saved
        sequence = (kept + sizes.backward_token()) * longest
        room = limit - sum(size for _, size in fixed)
        if room >= sequence:
            break
    together = max(1, min(work.batch, room // sequence))
    parts = [*fixed, ("activations", together * sequence)]
    return Fit(work.batch, together * longest, 0, parts, two_layouts, recompute)


def _streamed_training(sizes: Sizes, work: Work, limit: int, streaming: Streaming) -> Fit:
    """As many sequences together as one layer's work allows: each pass reads all layers twice.

    The layers' inputs stay in memory before any layer does: either saves as much reading a byte.
    """
    rank, longest = _rank(work), whole(work.sequence)
    fixed = _trained(sizes, work)
    sequence = (sizes.saved_token(work.sequence, rank) + sizes.backward_token()) * longest
    room = limit - sum(size for _, size in fixed)
    free = room - streaming.least
    together = max(1, min(work.batch, free // sequence))
    inputs = min(together * sizes.input_token() * longest, max(0, free - together * sequence))
    layout = streaming.layout(room - together * sequence - inputs)
    parts = [*streaming.parts(layout, sizes), ("head", sizes.head()), *fixed]
    parts += [("activations", together * sequence), ("saved inputs", inputs)]
    read = streaming.read_twice(layout)
    return Fit(
        work.batch,
        together * longest,
        0,
        parts,
        recompute=True,
        saved_bytes=inputs,
        layout=layout,
        read_bytes=read,
    )


def _packed(work: Work) -> list[tuple[bool, bool]]:
    """The fastest way to train, where this build of torch has it."""
    return [(True, False)] if pick_device(work.device).type == "cpu" and Packed.available() else []


def _rank(work: Work) -> int:
    if work.lora is None:
        raise EngineError("training needs a LoRA configuration: base weights are never trained")
    return work.lora.rank


def _trained(sizes: Sizes, work: Work) -> list[tuple[str, int]]:
    assert work.lora is not None
    return [
        # parameters and two moments, twice (a step writes new ones), gradients, factors, what products read,
        # and a copy for a checkpoint
        ("adapter", 4 * 12 * parameters(sizes.config, work.lora)),
        ("loss", 2 * LOGIT_BYTES + _RUNTIME),
    ]
