"""The torch engine: plans, loads, scores."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from spillover.engine.protocol import Floats, Optimizer, Plan, TokenLogprob, Work
from spillover.engine.torch.attention import Causal, grouped_matmul, grouped_sdpa
from spillover.engine.torch.decoder import Decoder
from spillover.engine.torch.device import measured
from spillover.engine.torch.linear import Adapted, Dense, Linear, Packed
from spillover.engine.torch.lora import adapter_matrices, fuse, spans
from spillover.engine.torch.plan import DTYPES, LOGIT_BYTES, make_plan
from spillover.engine.torch.session import DecodeAttention, TorchSession, token_logprobs
from spillover.engine.torch.train import TorchTrainer
from spillover.engine.torch.weights import Weights
from spillover.errors import EngineError

if TYPE_CHECKING:
    from spillover.models import Adapter, Model
    from spillover.models.lora import LoraConfig


class TorchEngine:
    """PyTorch on the CPU or one CUDA device, all weights resident."""

    name = "torch"
    version = torch.__version__

    def plan(self, model: Model, work: Work) -> Plan:
        """Decide device, numerics and batch; `EngineError` in one line when it does not fit."""
        return make_plan(model, work, self.version)

    def load(self, model: Model, plan: Plan, adapters: Sequence[Adapter] = ()) -> TorchModel:
        """Open the weights; they are read by the first session, score or trainer."""
        if len(adapters) > 1:
            raise EngineError(f"{len(adapters)} adapters were named", hint="name one adapter per model")
        return TorchModel(model, plan, adapters[0] if adapters else None)


class TorchModel:
    """One model, with or without an adapter, as one plan places it."""

    def __init__(self, model: Model, plan: Plan, adapter: Adapter | None) -> None:
        self.plan = plan
        self._dtype = DTYPES[plan.numerics]
        self._adapter = adapter
        self._weights = Weights(model.index(), model.config, self._dtype, torch.device(plan.device))

    def session(self) -> TorchSession:
        """An empty session of ``plan.batch`` slots of ``plan.sequence`` tokens."""
        return TorchSession(self._decoder, self.plan.batch, self.plan.sequence, self._cache_attention())

    @torch.inference_mode()
    def score(
        self, sequences: Sequence[Sequence[int]], starts: Sequence[int], *, top: int = 0
    ) -> list[list[TokenLogprob]]:
        """Log-probabilities of ``sequence[start:]`` of each sequence, each token given all before it.

        ``starts`` are at least 1. The `top` most likely tokens come with each.
        """
        result: list[list[TokenLogprob]] = []
        for group in self._passes(sequences):
            result += self._score([sequences[i] for i in group], [starts[i] for i in group], top)
        return result

    def trainer(
        self, config: LoraConfig, initial: Mapping[str, Floats], optimizer: Optimizer, *, seed: int = 0
    ) -> TorchTrainer:
        """A trainer of a new adapter that starts from `initial`; `seed` decides dropout."""
        if self._adapter is not None:
            raise EngineError("an adapter cannot be trained on top of another", hint="name the base model alone")
        return TorchTrainer(
            self._weights, config, initial, optimizer, seed=seed, pass_tokens=self.plan.pass_tokens
        )

    @cached_property
    def _decoder(self) -> Decoder:
        with torch.inference_mode():
            return Decoder(self._weights, self._linear)

    def _linear(self, layer: int, name: str, weight: Tensor, bias: Tensor | None) -> Linear:
        cpu = weight.device.type == "cpu"
        base: Linear = Packed(weight, bias) if cpu and measured(self._dtype).packed else Dense(weight, bias)
        if self._adapter is None or layer < 0:
            return base
        tensors = {key: torch.from_numpy(value) for key, value in self._adapter.tensors.items()}
        present = [m for m in self._adapter.config.targets if f"layers.{layer}.{m}.lora_a" in tensors]
        columns = spans(self._weights.config, name, present)
        if not columns:
            return base
        a, b = adapter_matrices(tensors, layer, columns)
        fused = fuse(a, b, columns, len(weight), self._adapter.config.scale, self._dtype)
        return Adapted(base, *(x.to(weight.device) for x in fused))

    def _cache_attention(self) -> DecodeAttention:
        on_gpu = self._weights.device.type == "cuda"
        return grouped_sdpa if on_gpu or measured(self._dtype).sdpa else grouped_matmul

    def _passes(self, sequences: Sequence[Sequence[int]]) -> Iterator[list[int]]:
        group: list[int] = []
        for number, sequence in enumerate(sequences):
            if group and sum(len(sequences[i]) for i in group) + len(sequence) > self.plan.pass_tokens:
                yield group
                group = []
            group.append(number)
        if group:
            yield group

    def _score(
        self, sequences: Sequence[Sequence[int]], starts: Sequence[int], top: int
    ) -> list[list[TokenLogprob]]:
        lengths = [len(sequence) for sequence in sequences]
        device = self._weights.device
        tokens = torch.tensor(list(itertools.chain.from_iterable(sequences)), device=device)
        positions = torch.cat([torch.arange(length) for length in lengths]).to(device)
        attention = Causal(lengths, self._weights.config.sliding_window)
        hidden = self._decoder.hidden(tokens, positions, max(lengths), attention)
        firsts = itertools.accumulate(lengths, initial=0)
        places = [torch.arange(first + start, first + n) for first, start, n in zip(firsts, starts, lengths)]  # noqa: B905
        scored = self._targets(hidden, tokens, torch.cat(places).to(device), top)
        return [list(itertools.islice(scored, len(part))) for part in places]

    def _targets(self, hidden: Tensor, tokens: Tensor, places: Tensor, top: int) -> Iterator[TokenLogprob]:
        """Score the tokens at `places`, a bounded number of logits at a time."""
        for part in places.split(max(1, LOGIT_BYTES // (4 * self._weights.config.vocab_size))):
            logits = self._decoder.logits(hidden[part - 1]).float()
            yield from token_logprobs(logits, tokens[part].tolist(), top)
