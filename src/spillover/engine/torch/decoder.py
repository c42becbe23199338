"""The decoder-only transformer of all families, over a packed stream of tokens.

One loop serves prefill, decoding, scoring and training: they differ in the linear layers and in the attention
that they pass in. The families differ in what `ModelConfig` says of each layer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from spillover.engine.torch.attention import Attention
from spillover.engine.torch.layers import FeedForward, Layers, Linears, Resident, Streamed
from spillover.engine.torch.linear import Linear
from spillover.engine.torch.pointwise import capped, rms_norm, rotate
from spillover.engine.torch.rotary import Rotary
from spillover.engine.torch.staging import staging
from spillover.engine.torch.weights import Weights

if TYPE_CHECKING:
    from spillover.engine.ring import Ring
    from spillover.models import ModelConfig


Around: TypeAlias = Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]  # (a layer, its input): its output


class Decoder:
    """Embedding, layers, final norm and head of one model; the layers stay, or pass through a ring."""

    def __init__(
        self, weights: Weights, linears: Linears, open_ring: Callable[[], Ring] | None = None
    ) -> None:
        self.config: ModelConfig = weights.config
        self.device = weights.device
        self.dtype = weights.dtype
        distinct = [rope for n, rope in enumerate(self.config.ropes) if rope not in self.config.ropes[:n]]
        self.rotaries = [Rotary(rope, weights.dtype, weights.device) for rope in distinct]
        self._rotary_of = [distinct.index(rope) for rope in self.config.ropes]
        self._embed = weights.embed if open_ring is None else weights.embed_from_file
        if open_ring is not None:
            weights.open_rows()
        # rounded as the families that scale their embeddings round it
        self._embedding_scale = torch.tensor(self.config.embedding_scale, dtype=weights.dtype).item()
        self._norm = weights.norm
        head = weights.head if open_ring is None else weights.copied_head()
        self._head = linears.linear(-1, "head", head, None)
        self._layers: Layers = (
            Resident(weights, linears)
            if open_ring is None
            else Streamed(weights, linears, open_ring(), staging(self.dtype, self.device))
        )

    def hidden(
        self,
        tokens: Tensor,
        positions: Tensor,
        length: int,
        attention: Attention,
        around: Around | None = None,
        rows: Tensor | None = None,
    ) -> Tensor:
        """The last layer's output, ``[N, H]``, before the final norm.

        `tokens` and `positions` are int64 ``[N]``; `length` is above every position. `around` calls each
        layer with its input where given. `rows`, int64 ``[M]``, are the only ones wanted of the output: the
        last layer does no more than it must for them.
        """
        tables = [rotary(positions, length) for rotary in self.rotaries]
        x = self._embed(tokens)  # [N, H]
        if self._embedding_scale != 1.0:
            x.mul_(self._embedding_scale)
        self._layers.begin(backward=around is not None and torch.is_grad_enabled())
        for number in range(self.config.layers):
            turn = tables[self._rotary_of[number]]
            wanted = rows if number == self.config.layers - 1 else None
            if around is None:
                x = self._layer(number, turn, attention, wanted, x)
            else:
                x = around(partial(self._layer, number, turn, attention, wanted), x)
        return x

    def normed(self, hidden: Tensor) -> Tensor:
        """The final norm of ``[M, H]``."""
        return rms_norm(hidden, self._norm, self.config.rms_eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """Final norm, head and soft-cap: ``[M, V]`` in the compute dtype from the output of `hidden`."""
        return capped(self._head(self.normed(hidden)), self.config.logit_softcap)

    def _layer(
        self,
        number: int,
        tables: tuple[Tensor, Tensor],
        attention: Attention,
        rows: Tensor | None,
        x: Tensor,
    ) -> Tensor:
        layer = self._layers[number]
        config, norms = self.config, layer.norms
        qkv = layer.qkv(rms_norm(x, norms.input_norm, config.rms_eps))
        heads = qkv.view(len(qkv), -1, config.head_dim)  # [N, heads + 2 kv_heads, D]
        if norms.q_norm is not None and norms.k_norm is not None:
            q, k, v = torch.split(heads, [config.heads, config.kv_heads, config.kv_heads], dim=1)
            q, k = rms_norm(q, norms.q_norm, config.rms_eps), rms_norm(k, norms.k_norm, config.rms_eps)
            heads = torch.cat((q, k, v), dim=1)
        heads = rotate(heads, *tables, config.heads + config.kv_heads)
        mixed = attention(number, heads)
        if rows is not None:
            x, mixed = x.index_select(0, rows), mixed.index_select(0, rows)
        x = self._onto(x, layer.out, mixed, norms.attention_output_norm)
        inner = rms_norm(x, norms.post_norm, config.rms_eps)
        return self._onto(x, layer.feedforward, inner, norms.feedforward_output_norm)

    def _onto(self, residual: Tensor, part: Linear | FeedForward, x: Tensor, norm: Tensor | None) -> Tensor:
        """``residual + part(x)``, the addend normalised where the family does so."""
        if norm is None:
            return part.onto(residual, x)
        return residual + rms_norm(part(x), norm, self.config.rms_eps)
