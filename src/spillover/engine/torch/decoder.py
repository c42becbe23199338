"""The decoder-only transformer of the Llama family, over a packed stream of tokens.

One loop serves prefill, decoding, scoring and training: they differ in the linear layers and in the attention
that they pass in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from spillover.engine.torch.attention import Attention
from spillover.engine.torch.linear import Gate, Linear
from spillover.engine.torch.pointwise import rms_norm, rotate
from spillover.engine.torch.rotary import Rotary
from spillover.engine.torch.weights import LayerWeights, Weights

if TYPE_CHECKING:
    from spillover.models import ModelConfig


class Linears(Protocol):
    """Makes a model's linear layers; `name` is a key of `FUSED`, or ``head`` with layer -1."""

    def linear(self, layer: int, name: str, weight: Tensor, bias: Tensor | None) -> Linear:
        """The layer that multiplies by `weight`, ``[out, in]``."""
        ...

    def gate(self, layer: int, weight: Tensor) -> Gate:
        """The gated unit of ``gate_up``, whose `weight` is ``[2 I, H]``, gate first."""
        ...


@dataclass(frozen=True)
class Layer:
    """One transformer layer: its norms and its products."""

    norms: LayerWeights
    qkv: Linear
    out: Linear
    gate: Gate
    down: Linear


class Decoder:
    """Embedding, layers, final norm and head of one model."""

    def __init__(self, weights: Weights, linears: Linears) -> None:
        self.config: ModelConfig = weights.config
        self.device = weights.device
        self.dtype = weights.dtype
        self.rotary = Rotary(self.config, weights.dtype, weights.device)
        self._embedding = weights.embedding
        self._norm = weights.norm
        self._head = linears.linear(-1, "head", weights.head, None)
        self._layers = [
            _layer(number, weights.layer(number), linears) for number in range(self.config.layers)
        ]

    def hidden(self, tokens: Tensor, positions: Tensor, length: int, attention: Attention) -> Tensor:
        """The last layer's output, ``[N, H]``, before the final norm.

        `tokens` and `positions` are int64 ``[N]``; `length` is above every position.
        """
        cos, sin = self.rotary(positions, length)
        x = torch.nn.functional.embedding(tokens, self._embedding)  # [N, H]
        for number, layer in enumerate(self._layers):
            x = self._layer(number, layer, x, cos, sin, attention)
        return x

    def normed(self, hidden: Tensor) -> Tensor:
        """The final norm of ``[M, H]``."""
        return rms_norm(hidden, self._norm, self.config.rms_eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """Final norm and head: ``[M, V]`` in the compute dtype from the output of `hidden`."""
        return self._head(self.normed(hidden))

    def _layer(
        self, number: int, layer: Layer, x: Tensor, cos: Tensor, sin: Tensor, attention: Attention
    ) -> Tensor:
        config, norms = self.config, layer.norms
        qkv = layer.qkv(rms_norm(x, norms.input_norm, config.rms_eps))
        heads = qkv.view(len(qkv), -1, config.head_dim)  # [N, heads + 2 kv_heads, D]
        if norms.q_norm is not None and norms.k_norm is not None:
            q, k, v = torch.split(heads, [config.heads, config.kv_heads, config.kv_heads], dim=1)
            q, k = rms_norm(q, norms.q_norm, config.rms_eps), rms_norm(k, norms.k_norm, config.rms_eps)
            heads = torch.cat((q, k, v), dim=1)
        heads = rotate(heads, cos, sin, config.heads + config.kv_heads)
        x = layer.out.onto(x, attention(number, heads))
        return layer.down.onto(x, layer.gate(rms_norm(x, norms.post_norm, config.rms_eps)))


def _layer(number: int, weights: LayerWeights, linears: Linears) -> Layer:
    qkv, out, down = (
        linears.linear(number, name, weights.matrices.pop(name), weights.biases[name])
        for name in ("qkv", "out", "down")
    )
    # popped: a packed layer holds a copy of its own
    return Layer(weights, qkv, out, linears.gate(number, weights.matrices.pop("gate_up")), down)
