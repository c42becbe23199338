"""Rows being generated on torch: a static key-value cache, packed prefill, one-token decoding."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from spillover.engine.protocol import Floats, Ids, TokenLogprob
from spillover.engine.torch.attention import Causal, Scoring, grouped, visible
from spillover.engine.torch.decoder import Decoder
from spillover.engine.torch.linear import Worn
from spillover.engine.torch.packing import pack

# Keys that a decode step attends to come in multiples of this: oneDNN builds a kernel per shape.
_STRIDE = 32


class TorchLogits:
    """Next-token logits ``[rows, V]``, converted to float32 once."""

    def __init__(self, logits: Tensor) -> None:
        self._logits = logits.float()

    def argmax(self) -> Ids:
        """The most likely token per row, int64 ``[rows]``."""
        if self._logits.device.type == "cpu":
            # numpy's argmax over contiguous float32 is vectorized; torch's takes five times as long
            return np.asarray(self._logits.numpy().argmax(axis=-1), dtype=np.int64)
        return self._logits.argmax(dim=-1).cpu().numpy()

    def numpy(self, row: int) -> Floats:
        """The logits of one row, float32 ``[V]``."""
        return self._logits[row].cpu().numpy()

    def logprobs(self, rows: Sequence[int], tokens: Sequence[int], top: int) -> list[TokenLogprob]:
        """The log-probability of one token in each of `rows`, and of the `top` most likely tokens there."""
        return token_logprobs(self._logits[torch.tensor(rows, device=self._logits.device)], tokens, top)


def token_logprobs(logits: Tensor, tokens: Sequence[int], top: int) -> list[TokenLogprob]:
    """Log-probabilities of `tokens` and of the `top` best, from float32 logits ``[M, V]``."""
    total = torch.logsumexp(logits, dim=-1, keepdim=True)  # [M, 1]
    chosen = logits.gather(1, torch.tensor(tokens, device=logits.device).unsqueeze(1)) - total
    best = torch.topk(logits, min(top, logits.shape[1]), dim=-1)
    ids, values = best.indices.tolist(), (best.values - total).tolist()
    return [
        TokenLogprob(token, value, tuple(zip(row_ids, row_values, strict=True)))
        for token, (value,), row_ids, row_values in zip(tokens, chosen.tolist(), ids, values, strict=True)
    ]


class TorchSession:
    """A static cache of `slots` rows of `length` positions; rows 0..n-1 are in use.

    The memory is reserved here and, on the CPU, taken only as positions are written.
    """

    def __init__(self, decoder: Decoder, worn: Worn, slots: int, length: int) -> None:
        self.slots = slots
        self._worn = worn
        self._adapters: list[int] = []
        self._reserved = 0
        self.length = length
        config = decoder.config
        self._decoder = decoder
        self._lengths: list[int] = []
        room = -(-length // _STRIDE) * _STRIDE
        # keys and then values as heads of one tensor, so that a step writes both at once; zeros, because what
        # was never written is masked, but 0 * NaN would not be
        shape = (config.layers, slots, 2 * config.kv_heads, room, config.head_dim)
        self._cache = torch.zeros(shape, dtype=decoder.dtype, device=decoder.device)
        self._seen: tuple[int, int] = (0, 0)
        self._views: list[tuple[Tensor, Tensor, Tensor]] = []

    def reserve(self, tokens: int) -> bool:
        """Keep a slot for a row, whatever its length; False: all are taken."""
        room = len(self._lengths) + self._reserved < self.slots
        self._reserved += room
        return room

    @torch.inference_mode()
    def admit(self, prompts: Sequence[Sequence[int]], adapters: Sequence[int] = ()) -> TorchLogits:
        """Prefill `prompts` as rows n, n + 1, ...; logits of their last tokens."""
        self._reserved = max(0, self._reserved - len(prompts))
        worn = list(adapters) or [0] * len(prompts)
        config, device = self._decoder.config, self._decoder.device
        lengths = [len(prompt) for prompt in prompts]
        stream = pack(prompts, device)
        causal = Causal(stream.lengths, config)
        first = len(self._lengths)

        def attend(layer: int, heads: Tensor) -> Tensor:
            parts = torch.split(heads[: sum(lengths), config.heads :], lengths)
            for row, part in enumerate(parts, first):
                self._cache[layer, row, :, : len(part)] = part.transpose(0, 1)
            return causal(layer, heads)

        self._worn.wear(worn, lengths, device)
        hidden = self._decoder.hidden(stream.tokens, stream.positions, stream.longest, attend)
        self._lengths += lengths
        self._adapters += worn
        last = torch.tensor(lengths, device=device).cumsum(0) - 1
        return TorchLogits(self._decoder.logits(hidden[last]))

    @torch.inference_mode()
    def decode(self, tokens: Sequence[int]) -> TorchLogits:
        """Append one token to every row; logits of every row."""
        config, device = self._decoder.config, self._decoder.device
        rows = len(tokens)
        positions = torch.tensor(self._lengths, device=device)
        longest = max(self._lengths) + 1
        seen = -(-longest // _STRIDE) * _STRIDE
        biases = {window: self._bias(positions, seen, window) for window in set(config.windows)}
        # where each row's new keys and values go, counted in vectors of one layer's cache
        starts = torch.arange(rows * 2 * config.kv_heads, device=device).view(rows, -1) * self._cache.shape[3]
        places = (starts + positions.unsqueeze(1)).flatten()
        views = self._layer_views(rows, seen)
        grouped_shape = (rows, config.kv_heads, -1, config.head_dim)

        def attend(layer: int, heads: Tensor) -> Tensor:
            vectors, keys, values = views[layer]
            vectors.index_copy_(0, places, heads[:, config.heads :].reshape(-1, config.head_dim))
            q = heads[:, : config.heads].reshape(grouped_shape)  # [n, kv, G, D]
            scoring = Scoring.of(config, layer)
            return grouped(q, keys, values, biases[scoring.window], scoring).reshape(rows, -1)

        self._worn.wear(self._adapters, [1] * rows, device)
        hidden = self._decoder.hidden(torch.tensor(tokens, device=device), positions, longest, attend)
        self._lengths = [length + 1 for length in self._lengths]
        return TorchLogits(self._decoder.logits(hidden))

    def release(self, row: int) -> None:
        """Drop `row`; the last row takes its number."""
        last = len(self._lengths) - 1
        length = self._lengths[last]
        if row != last:
            self._cache[:, row, :, :length] = self._cache[:, last, :, :length]
            self._lengths[row] = length
            self._adapters[row] = self._adapters[last]
        self._lengths.pop()
        self._adapters.pop()

    def _bias(self, positions: Tensor, seen: int, window: int | None) -> Tensor:
        """0 for the keys that each row's new token sees, minus infinity for others: ``[n, 1, 1, seen]``."""
        bias = torch.zeros(len(positions), 1, 1, seen, dtype=self._decoder.dtype, device=positions.device)
        return bias.masked_fill_(~visible(positions, seen, window)[:, None, None], -torch.inf)

    def _layer_views(self, rows: int, seen: int) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Per layer: the cache as vectors, and the keys and values that `rows` rows see."""
        if self._seen != (rows, seen):
            self._seen = (rows, seen)
            self._views = [
                (cache.view(-1, cache.shape[-1]), *cache[:rows, :, :seen].chunk(2, dim=1))
                for cache in self._cache
            ]
        return self._views
