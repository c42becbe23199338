"""Rows being generated on torch: a static key-value cache, packed prefill, one-token decoding."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from spillover.engine.protocol import Floats, Ids, TokenLogprob
from spillover.engine.torch.attention import Causal
from spillover.engine.torch.decoder import Decoder
from spillover.engine.torch.linear import Worn
from spillover.engine.torch.packing import pack
from spillover.engine.torch.steps import Runner, Steps


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

    def __init__(self, decoder: Decoder, worn: Worn, slots: int, length: int, runner: Runner) -> None:
        self.slots = slots
        self.length = length
        self.joins = False  # rows of different lengths have kernels of their own
        self.shared = 0  # nothing is kept once its row is gone
        self._decoder = decoder
        self._worn = worn
        self._steps = Steps(decoder, worn, slots, length, runner)
        self._lengths: list[int] = []
        self._adapters: list[int] = []
        self._reserved = 0

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
                self._steps.cache[layer, row, :, : len(part)] = part.transpose(0, 1)
            return causal(layer, heads)

        self._worn.wear(worn, lengths, device)
        hidden = self._decoder.hidden(stream.tokens, stream.positions, stream.longest, attend)
        self._lengths += lengths
        self._adapters += worn
        last = torch.tensor(lengths, device=device).cumsum(0) - 1
        return TorchLogits(self._decoder.logits(hidden[last]))

    @torch.inference_mode()
    def decode(
        self, tokens: Sequence[int], prompts: Sequence[Sequence[int]] = (), adapters: Sequence[int] = ()
    ) -> TorchLogits:
        """Append one token to every row; logits of every row. Newcomers have passes of their own."""
        assert not prompts
        logits = self._steps(tokens, self._lengths, self._adapters)
        self._lengths = [length + 1 for length in self._lengths]
        return TorchLogits(logits)

    def release(self, row: int) -> None:
        """Drop `row`; the last row takes its number."""
        last = len(self._lengths) - 1
        if row != last:
            self._steps.move(last, row, self._lengths[last])
            self._lengths[row] = self._lengths[last]
            self._adapters[row] = self._adapters[last]
        self._lengths.pop()
        self._adapters.pop()
