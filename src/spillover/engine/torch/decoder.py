"""The decoder-only transformer of the Llama family, over a packed stream of tokens.

One loop serves prefill, decoding, scoring and training: they differ in the linear layers and in the attention
that they pass in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from spillover.engine.torch.attention import Attention
from spillover.engine.torch.linear import Linear
from spillover.engine.torch.pointwise import rms_norm, rotate, swiglu
from spillover.engine.torch.rotary import Rotary
from spillover.engine.torch.weights import FUSED, LayerWeights, Weights

if TYPE_CHECKING:
    from spillover.models import ModelConfig


@dataclass(frozen=True)
class Layer:
    """One transformer layer: four fused linear layers and its norms."""

    norms: LayerWeights
    qkv: Linear
    out: Linear
    gate_up: Linear
    down: Linear


class Decoder:
    """Embedding, layers, final norm and head of one model.

    ``linear(layer, name, weight, bias)`` makes the linear layer called `name` (a key of `FUSED`), and the head
    under the name ``head``, whose layer is -1.
    """

    def __init__(self, weights: Weights, linear: Callable[[int, str, Tensor, Tensor | None], Linear]) -> None:
        self.config: ModelConfig = weights.config
        self.device = weights.device
        self.dtype = weights.dtype
        self.rotary = Rotary(self.config, weights.dtype, weights.device)
        self._embedding = weights.embedding
        self._norm = weights.norm
        self._head = linear(-1, "head", weights.head, None)
        self._layers = []
        for number in range(self.config.layers):
            norms = weights.layer(number)
            made = {name: linear(number, name, norms.matrices[name], norms.biases[name]) for name in FUSED}
            norms.matrices.clear()  # a packed layer holds its own copy
            self._layers.append(Layer(norms, **made))

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
        heads = qkv.unflatten(-1, (-1, config.head_dim))  # [N, heads + 2 kv_heads, D]
        turned, v = heads.split((config.heads + config.kv_heads, config.kv_heads), dim=1)
        if norms.q_norm is not None and norms.k_norm is not None:
            q, k = turned.split((config.heads, config.kv_heads), dim=1)
            q, k = rms_norm(q, norms.q_norm, config.rms_eps), rms_norm(k, norms.k_norm, config.rms_eps)
            turned = torch.cat((q, k), dim=1)
        q, k = rotate(turned, cos, sin).split((config.heads, config.kv_heads), dim=1)
        x = x + layer.out(attention(number, q, k, v))
        return x + layer.down(swiglu(layer.gate_up(rms_norm(x, norms.post_norm, config.rms_eps))))
