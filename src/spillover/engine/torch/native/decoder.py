"""The decoder on the CPU: packed weights, and passes of tokens through the compiled layers.

The residual stream, norms, rotations and softmax are float32; products take bfloat16 or float32 inputs and
sum in float32. A token's output depends on the tokens before it alone, to the bit: not on what shares its
pass, nor on how its sequence was cut into passes, nor on the number of threads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spillover.engine.protocol import Floats
from spillover.engine.torch.native.layers import Beside, Experts, Layers, Resident, Rotations
from spillover.engine.torch.native.library import Pass, Run, Shape, library, why_not
from spillover.engine.torch.native.logits import NativeLogits
from spillover.engine.torch.native.packing import Packer
from spillover.engine.torch.native.streamed import Streamed

if TYPE_CHECKING:
    from spillover.engine.ring import Ring
    from spillover.engine.torch.weights import Weights
    from spillover.models import Adapter, ModelConfig

_RUN = np.dtype({"names": ["first", "count", "position", "blocks"], "formats": ["<i4", "<i4", "<i4", "<u8"],
                 "offsets": [0, 4, 8, 16], "itemsize": ctypes.sizeof(Run)})  # fmt: skip
_WIDEST_HEAD = 256
Gather: TypeAlias = Callable[[NDArray[np.int64]], NDArray[Any]]  # rows of the embedding by number


@dataclass(frozen=True)
class Stretch:
    """Consecutive tokens of one sequence, the first at `position`, whose cache is the blocks of `table`."""

    tokens: Sequence[int]
    position: int
    table: NDArray[np.int32]
    adapter: int


def unsupported(config: ModelConfig) -> str:
    """Why the compiled kernels cannot run a model, in a few words; empty when they can."""
    if config.head_dim > _WIDEST_HEAD or config.head_dim % 2 or config.heads % config.kv_heads:
        return f"they have no heads of {config.head_dim}"
    return why_not()


class NativeDecoder:
    """One model with any number of adapters, on all threads that torch uses.

    Its layers are packed in memory, or pass through it as a ring brings them.
    """

    def __init__(
        self,
        weights: Weights,
        adapters: Sequence[Adapter],
        length: int,
        open_ring: Callable[[], Ring] | None = None,
    ) -> None:
        native = library()
        assert native is not None
        self.config = weights.config
        self.native = native
        self.wide = int(weights.dtype == torch.float32)
        self._weights = weights
        self._workspace = native.spill_workspace(torch.get_num_threads())
        packer = Packer(native, weights.dtype, self._workspace)
        self._packer = packer  # keeps what the structures point into
        self._shape = self._model_shape()
        self._head = packer.matrix(weights.head_in_file)  # packing reads any dtype
        weights.forget()
        self._norm = packer.vector(weights.norm)
        self._embedding = _kept(weights) if open_ring is None else _filed(weights)
        # the families that scale do so in the dtype that computes
        self._embedding_scale = torch.tensor(self.config.embedding_scale, dtype=weights.dtype).item()
        self._beside = Beside(weights, packer, adapters)
        around = (weights, packer, self._beside, Rotations(self.config, packer, length))
        self._layers: Layers = Resident(*around) if open_ring is None else Streamed(*around, open_ring())

    def __del__(self) -> None:
        if hasattr(self, "_workspace"):
            self.native.spill_workspace_free(self._workspace)

    def worn(self, adapters: Sequence[int], rows: int) -> list[int]:
        """The adapter of each of `rows` rows, -1 for none; asked for none at all, all wear the first."""
        count = self._beside.count
        return [one if one < count else -1 for one in adapters or [0] * rows]

    def forward(self, stretches: Sequence[Stretch], cache: Cache) -> Floats:
        """The last layer's output of every token, float32 ``[N, H]``; their keys and values go to `cache`."""
        counts = [len(stretch.tokens) for stretch in stretches]
        firsts = np.cumsum([0, *counts[:-1]])
        runs = np.zeros(len(stretches), _RUN)
        runs["first"], runs["count"] = firsts, counts
        runs["position"] = [stretch.position for stretch in stretches]
        runs["blocks"] = [stretch.table.ctypes.data for stretch in stretches]
        worn = np.repeat(np.array([stretch.adapter for stretch in stretches], np.int32), counts)
        x = self._embed([token for stretch in stretches for token in stretch.tokens])
        work = Pass(
            *(len(x), len(runs), self._beside.count),
            ctypes.cast(runs.ctypes.data, ctypes.POINTER(Run)),
            worn.ctypes.data,
            self._beside.widest,
        )
        for number, placed in enumerate(self._layers):
            self.native.spill_layer(
                *(self.wide, self._shape, placed.layer, work),
                *(cache.address(number), cache.stride, self._workspace, x.ctypes.data),
            )
            if placed.experts is not None:
                self._route(placed.experts, placed.layer.feed_norm, x)
        return x

    def _route(self, experts: Experts, norm: int, x: Floats) -> None:
        """Add what the experts say that each token is routed to, in the order of their numbers."""
        k = experts.routing.per_token
        shares, chosen = np.empty((len(x), k), np.float32), np.empty((len(x), k), np.int32)
        self.native.spill_route(
            *(self.wide, self._shape, experts.routing, experts.router, norm, x.ctypes.data, len(x)),
            *(self._workspace, shares.ctypes.data, chosen.ctypes.data),
        )
        for number, gate_up, down in experts.chosen(np.unique(chosen).tolist()):
            tokens, places = np.nonzero(chosen == number)
            rows, own = tokens.astype(np.int32), shares[tokens, places]
            self.native.spill_expert(
                *(self.wide, self._shape, gate_up, down, experts.inner, rows.ctypes.data, own.ctypes.data),
                *(len(rows), len(x), self._workspace, x.ctypes.data),
            )

    def logits(self, hidden: Floats) -> NativeLogits:
        """Final norm and head of ``[M, H]``."""
        config = self.config
        hidden = np.ascontiguousarray(hidden)
        out = np.empty((len(hidden), config.vocab_size), np.float32)
        self.native.spill_logits(
            *(self.wide, self._shape, self._head, self._norm, config.logit_softcap or 0.0),
            *(hidden.ctypes.data, len(hidden), self._workspace, out.ctypes.data),
        )
        return NativeLogits(self.native, out, self._workspace)

    def _embed(self, tokens: Sequence[int]) -> Floats:
        # in numpy: torch's threads would wait for each other here
        rows = self._embedding(np.asarray(tokens, np.int64))
        wide: Floats = rows if rows.dtype == np.float32 else (rows.astype(np.uint32) << 16).view(np.float32)
        if self._embedding_scale != 1:
            wide *= np.float32(self._embedding_scale)
        return wide

    def _model_shape(self) -> Shape:
        config = self.config
        return Shape(
            *(config.hidden_size, config.heads, config.kv_heads, config.head_dim, config.intermediate_size),
            config.ropes[0].dim,
            0 if config.activation == "silu" else 1,
            *(config.rms_eps, config.attention_scale, config.attention_softcap or 0.0),
        )


def _kept(weights: Weights) -> Gather:
    rows = _plain(weights.embedding)
    return lambda numbers: rows[numbers]


def _filed(weights: Weights) -> Gather:
    weights.open_rows()
    return lambda numbers: _plain(weights.embed_from_file(torch.from_numpy(numbers)))


def _plain(x: Tensor) -> NDArray[Any]:
    """The same memory for numpy, which has no bfloat16: its bits as uint16."""
    return (x.view(torch.uint16) if x.dtype == torch.bfloat16 else x).numpy()


class Cache:
    """Keys and values of `blocks` blocks in every layer; memory is taken as blocks are written."""

    def __init__(self, decoder: NativeDecoder, blocks: int) -> None:
        config = decoder.config
        self.blocks = blocks
        block = decoder.native.spill_block_bytes(decoder.wide, config.kv_heads, config.head_dim)
        # a block's layers lie together: what a row takes is one piece
        self._data = np.zeros((blocks, config.layers, block), np.uint8)
        self.stride: int = self._data.strides[0]
        self._written = np.zeros(blocks, np.bool_)

    def address(self, layer: int) -> int:
        """Where `layer` lies in the first block; the others follow every `stride` bytes."""
        return self._data.ctypes.data + layer * self._data.strides[1]

    def clear(self, block: int) -> None:
        """Ready `block` for a new row: what is masked is multiplied by 0, which an infinity would survive."""
        if self._written[block]:
            self._data[block] = 0
        self._written[block] = True
