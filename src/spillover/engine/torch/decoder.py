"""The decoder-only transformer of all families, over a packed stream of tokens.

One loop serves prefill, decoding, scoring and training: they differ in the linear layers and in the attention
that they pass in. The families differ in what `ModelConfig` says of each layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeAlias

import torch
from torch import Tensor

from spillover.engine.torch.attention import Attention
from spillover.engine.torch.experts import Mixture
from spillover.engine.torch.linear import Gate, Linear
from spillover.engine.torch.pointwise import capped, rms_norm, rotate
from spillover.engine.torch.rotary import Rotary
from spillover.engine.torch.weights import LayerWeights, Weights

if TYPE_CHECKING:
    from spillover.models import ModelConfig


Around: TypeAlias = Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]  # (a layer, its input): its output


class Linears(Protocol):
    """Makes a model's linear layers; `name` is a key of `FUSED`, or ``head`` with layer -1."""

    def linear(self, layer: int, name: str, weight: Tensor, bias: Tensor | None) -> Linear:
        """The layer that multiplies by `weight`, ``[out, in]``."""
        ...

    def gate(self, layer: int, weight: Tensor) -> Gate:
        """The gated unit of ``gate_up``, whose `weight` is ``[2 I, H]``, gate first."""
        ...


class FeedForward(Protocol):
    """What follows attention in a layer, ``[N, H]`` to ``[N, H]``."""

    def __call__(self, x: Tensor) -> Tensor: ...

    def onto(self, residual: Tensor, x: Tensor) -> Tensor:
        """``residual + self(x)``."""
        ...


@dataclass(frozen=True)
class Dense:
    """A gated unit and the product that brings it back to the residual's width."""

    gate: Gate
    down: Linear

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.gate(x))

    def onto(self, residual: Tensor, x: Tensor) -> Tensor:
        return self.down.onto(residual, self.gate(x))


@dataclass(frozen=True)
class Layer:
    """One transformer layer: its norms and its products."""

    norms: LayerWeights
    qkv: Linear
    out: Linear
    feedforward: FeedForward


class Decoder:
    """Embedding, layers, final norm and head of one model."""

    def __init__(self, weights: Weights, linears: Linears) -> None:
        self.config: ModelConfig = weights.config
        self.device = weights.device
        self.dtype = weights.dtype
        distinct = [rope for n, rope in enumerate(self.config.ropes) if rope not in self.config.ropes[:n]]
        self.rotaries = [Rotary(rope, weights.dtype, weights.device) for rope in distinct]
        self._rotary_of = [distinct.index(rope) for rope in self.config.ropes]
        self._embedding = weights.embedding
        # rounded as the families that scale their embeddings round it
        self._embedding_scale = torch.tensor(self.config.embedding_scale, dtype=weights.dtype).item()
        self._norm = weights.norm
        self._head = linears.linear(-1, "head", weights.head, None)
        self._layers = [
            _layer(number, weights.layer(number), linears, self.config)
            for number in range(self.config.layers)
        ]

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
        x = torch.nn.functional.embedding(tokens, self._embedding)  # [N, H]
        if self._embedding_scale != 1.0:
            x.mul_(self._embedding_scale)
        for number, layer in enumerate(self._layers):
            turn = tables[self._rotary_of[number]]
            wanted = rows if number == len(self._layers) - 1 else None
            if around is None:
                x = self._layer(number, layer, turn, attention, wanted, x)
            else:
                x = around(partial(self._layer, number, layer, turn, attention, wanted), x)
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
        layer: Layer,
        tables: tuple[Tensor, Tensor],
        attention: Attention,
        rows: Tensor | None,
        x: Tensor,
    ) -> Tensor:
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


def _layer(number: int, weights: LayerWeights, linears: Linears, config: ModelConfig) -> Layer:
    # popped: a packed layer holds a copy of its own
    qkv, out = (
        linears.linear(number, name, weights.matrices.pop(name), weights.biases[name])
        for name in ("qkv", "out")
    )
    return Layer(weights, qkv, out, _feedforward(number, weights, linears, config))


def _feedforward(number: int, weights: LayerWeights, linears: Linears, config: ModelConfig) -> FeedForward:
    if weights.experts is None or config.experts is None:
        gate = linears.gate(number, weights.matrices.pop("gate_up"))
        return Dense(gate, linears.linear(number, "down", weights.matrices.pop("down"), None))
    own = weights.experts
    count = config.experts.count
    gates = [linears.gate(number, own.gate_up.pop(0)) for _ in range(count)]
    downs = [linears.linear(number, "down", own.down.pop(0), None) for _ in range(count)]
    return Mixture(own.router, gates, downs, config.experts)
