"""Decode steps on static memory: what one step does can be recorded once and replayed.

A step reads its tokens, positions and adapters from buffers, writes the cache in place, and derives all else
from them on the device. Nothing that changes from one step to the next is decided in Python. That is what a
CUDA graph needs: it launches the kernels that it saw, with the addresses that they had.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from spillover.engine.torch.attention import Scoring, grouped, visible
from spillover.engine.torch.decoder import Decoder
from spillover.engine.torch.linear import Worn

if TYPE_CHECKING:
    from spillover.models import ModelConfig

STRIDE = 32  # keys that a step attends to come in multiples of this: oneDNN builds a kernel per shape
_LEAST = 64  # keys of the smallest step that is recorded
_WARM_UPS = 2  # before a capture, for what libraries allocate and choose on first use

Run: TypeAlias = Callable[[], Tensor]
"""Does a step with what the buffers hold; its logits, float32 ``[rows, V]``."""

Capture: TypeAlias = Callable[[Callable[[], object]], Callable[[], None]]
"""Records what a function does to memory; the result does it again. Raises `RuntimeError` where it cannot."""


class Bucket(NamedTuple):
    """The shape of a step: its rows, the positions they see, and whether their adapters `Worn.differ`."""

    rows: int
    seen: int
    differ: bool


class Runner(Protocol):
    """Decides how steps run, and so how many are made."""

    rounds: bool  # sizes are rounded up to a few, and the steps of each are kept

    def prepare(self, run: Run, rows: int) -> Run:
        """What does the same as `run`, again and again."""
        ...


class Eager:
    """Every operator of a step is called anew."""

    rounds = False

    def prepare(self, run: Run, rows: int) -> Run:
        return run


class Recorded:
    """Steps are recorded by `capture` and replayed.

    Once it cannot, `failed` gets the reason and steps run eagerly. Every step leaves its logits in `out`,
    float32 ``[slots, V]``, so that recordings may share the memory of all that is between.
    """

    def __init__(self, capture: Capture, out: Tensor, failed: Callable[[str], None]) -> None:
        self.rounds = True
        self._capture = capture
        self._out = out
        self._failed = failed

    def prepare(self, run: Run, rows: int) -> Run:
        if not self.rounds:
            return run
        out = self._out[:rows]

        def into() -> None:
            out.copy_(run())

        try:
            replay = self._capture(into)
        except RuntimeError as error:  # CUDA's errors, memory that ran out included
            self.rounds = False
            self._failed(str(error).partition("\n")[0])
            return run

        def again() -> Tensor:
            replay()
            return out

        return again


class CudaCapture:
    """Records on a stream of its own into CUDA graphs that share one pool of memory.

    The recorded function runs a few times first, so it must be one that may be repeated: a step writes the
    same keys to the same places.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __call__(self, run: Callable[[], object]) -> Callable[[], None]:
        with torch.cuda.device(self._device):
            stream, pool = self._place
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(_WARM_UPS):
                    run()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            # other threads of the process may go on using CUDA meanwhile
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                run()
        replay: Callable[[], None] = graph.replay
        return replay

    @cached_property
    def _place(self) -> tuple[torch.cuda.Stream, Any]:
        return torch.cuda.Stream(), torch.cuda.graph_pool_handle()  # type: ignore[no-untyped-call]


def unsupported(config: ModelConfig, device: torch.device) -> str:
    """Why decode steps cannot be recorded, in a few words; empty when they can. Tries it with one kernel."""
    if config.experts is not None:
        return "which experts compute is decided on the host"
    try:
        number = torch.zeros(1, device=device)
        CudaCapture(device)(lambda: number.add_(1))
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    return ""


class Steps:
    """The cache of `slots` rows, and the steps that append a token to each of the first n.

    `cache` is ``[layers, slots, 2 kv_heads, room, D]``: keys and then values as heads of one tensor, so that
    a step writes both at once. Rows that fill up a bucket write into slots beyond those in use.
    """

    def __init__(self, decoder: Decoder, worn: Worn, slots: int, length: int, runner: Runner) -> None:
        config = decoder.config
        self._decoder = decoder
        self._worn = worn
        self._runner = runner
        room = -(-length // STRIDE) * STRIDE
        # zeros, because what was never written is masked, but 0 * NaN would not be
        shape = (config.layers, slots, 2 * config.kv_heads, room, config.head_dim)
        self.cache = torch.zeros(shape, dtype=decoder.dtype, device=decoder.device)
        # tokens, positions and adapters of rows
        self._inputs = torch.zeros(3, slots, dtype=torch.int64, device=decoder.device)
        self._made: dict[Bucket, Run] = {}

    def __call__(self, tokens: Sequence[int], positions: Sequence[int], adapters: Sequence[int]) -> Tensor:
        """Append `tokens` at `positions`; logits of every row, float32 ``[n, V]``, until the next step."""
        rows = len(tokens)
        bucket = self._bucket(rows, max(positions) + 1, self._worn.differ(adapters))
        self._inputs[:, :rows] = torch.tensor([tokens, positions, adapters])
        if bucket.rows > rows:
            self._inputs[:, rows : bucket.rows] = 0
        run = self._made.get(bucket)
        if run is None:
            run = self._make(bucket)
        return run()[:rows]

    def move(self, row: int, to: int, length: int) -> None:
        """Copy the first `length` positions of a row."""
        self.cache[:, to, :, :length] = self.cache[:, row, :, :length]

    def _bucket(self, rows: int, seen: int, differ: bool) -> Bucket:
        slots, room = self.cache.shape[1], self.cache.shape[3]
        if not self._runner.rounds:
            return Bucket(rows, -(-seen // STRIDE) * STRIDE, differ)
        return Bucket(min(slots, 1 << (rows - 1).bit_length()), min(room, rounded(max(seen, _LEAST))), differ)

    def _make(self, bucket: Bucket) -> Run:
        if not self._runner.rounds:
            self._made.clear()  # there may be very many, each with views of every layer
        step = _Step(self._decoder, self._worn, self.cache, self._inputs[:, : bucket.rows], bucket)
        self._made[bucket] = self._runner.prepare(step, bucket.rows)
        return self._made[bucket]


def rounded(number: int) -> int:
    """`number` or the next larger of 1, 2, 3, 4, 6, 8, 12, 16 and so on."""
    power: int = 1 << (number - 1).bit_length()
    return 3 * power // 4 if power >= 4 and number <= 3 * power // 4 else power


@dataclass
class _Step:
    """The step of one bucket; calling it again without new `inputs` changes nothing."""

    decoder: Decoder
    worn: Worn
    cache: Tensor
    inputs: Tensor  # int64 [3, rows]
    bucket: Bucket

    def __post_init__(self) -> None:
        config, (rows, seen, _) = self.decoder.config, self.bucket
        room, width = self.cache.shape[3:]
        # per layer: the cache as vectors, and the keys and values that the rows see
        self._views = [
            (cache.view(-1, width), *cache[:rows, :, :seen].chunk(2, dim=1)) for cache in self.cache
        ]
        # where each row's keys and values begin, counted in vectors of one layer's cache
        starts = torch.arange(rows * 2 * config.kv_heads, device=self.cache.device) * room
        self._starts = starts.view(rows, -1)
        # a replay reads the tables of this moment, which longer ones may have replaced
        self._tables = [rotary.reach(seen) for rotary in self.decoder.rotaries]

    def __call__(self) -> Tensor:
        config, (rows, seen, differ) = self.decoder.config, self.bucket
        tokens, positions, adapters = self.inputs
        self.worn.choose(adapters if differ else None)
        biases = {window: self._bias(positions, window) for window in set(config.windows)}
        places = (self._starts + positions.unsqueeze(1)).flatten()
        grouped_shape = (rows, config.kv_heads, -1, config.head_dim)

        def attend(layer: int, heads: Tensor) -> Tensor:
            vectors, keys, values = self._views[layer]
            vectors.index_copy_(0, places, heads[:, config.heads :].reshape(-1, config.head_dim))
            q = heads[:, : config.heads].reshape(grouped_shape)  # [n, kv, G, D]
            scoring = Scoring.of(config, layer)
            return grouped(q, keys, values, biases[scoring.window], scoring).reshape(rows, -1)

        hidden = self.decoder.hidden(tokens, positions, seen, attend)
        return self.decoder.logits(hidden).float()

    def _bias(self, positions: Tensor, window: int | None) -> Tensor:
        """0 for the keys that each row's new token sees, minus infinity for others: ``[n, 1, 1, seen]``."""
        seen, dtype = self.bucket.seen, self.decoder.dtype
        bias = torch.zeros(len(positions), 1, 1, seen, dtype=dtype, device=positions.device)
        return bias.masked_fill_(~visible(positions, seen, window)[:, None, None], -torch.inf)
