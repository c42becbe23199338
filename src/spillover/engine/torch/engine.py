"""The torch engine: plans, loads, scores."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from spillover.engine.protocol import Floats, Optimizer, Plan, TokenLogprob, Work
from spillover.engine.torch.attention import Causal
from spillover.engine.torch.decoder import Decoder
from spillover.engine.torch.device import measured
from spillover.engine.torch.linear import Adapted, Dense, FusedGate, Gate, Linear, Packed, PackedGate
from spillover.engine.torch.lora import Span, adapter_matrices, fuse, spans
from spillover.engine.torch.packing import pack
from spillover.engine.torch.plan import DTYPES, LOGIT_BYTES, make_plan
from spillover.engine.torch.session import TorchSession, token_logprobs
from spillover.engine.torch.train import TorchTrainer
from spillover.engine.torch.weights import Weights
from spillover.errors import EngineError

if TYPE_CHECKING:
    from spillover.models import Adapter, Model
    from spillover.models.lora import LoraConfig


class TorchEngine:
    """PyTorch on the CPU or one CUDA device, all weights resident."""

    name = "torch"
    version = str(torch.__version__)

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
        return TorchSession(self._decoder, self.plan.batch, self.plan.sequence)

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
            raise EngineError(
                "an adapter cannot be trained on top of another", hint="name the base model alone"
            )
        return TorchTrainer(
            self._weights, config, initial, optimizer, seed=seed, pass_tokens=self.plan.pass_tokens
        )

    @cached_property
    def _decoder(self) -> Decoder:
        with torch.inference_mode():
            return Decoder(self._weights, _Inference(self._weights, self._adapter))

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
        config, stream = self._weights.config, pack(sequences, self._weights.device)
        attention = Causal(stream.lengths, config.kv_heads, config.sliding_window)
        hidden = self._decoder.hidden(stream.tokens, stream.positions, stream.longest, attention)
        places, first = [], 0
        for sequence, start in zip(sequences, starts, strict=True):
            places.append(torch.arange(first + start, first + len(sequence), device=hidden.device))
            first += len(sequence)
        scored = self._targets(hidden, stream.tokens, torch.cat(places), top)
        return [list(itertools.islice(scored, len(part))) for part in places]

    def _targets(self, hidden: Tensor, tokens: Tensor, places: Tensor, top: int) -> Iterator[TokenLogprob]:
        """Score the tokens at `places`, a bounded number of logits at a time."""
        rows = max(1, LOGIT_BYTES // (4 * self._weights.config.vocab_size))
        for part in torch.split(places, rows):
            logits = self._decoder.logits(hidden[part - 1]).float()
            yield from token_logprobs(logits, tokens[part].tolist(), top)


class _Inference:
    """Linear layers that only generate and score, with at most one adapter beside them."""

    def __init__(self, weights: Weights, adapter: Adapter | None) -> None:
        self._config = weights.config
        self._dtype = weights.dtype
        self._packed = weights.device.type == "cpu" and measured(weights.dtype).packed
        self._lora = adapter.config if adapter else None
        self._tensors = (
            {key: torch.from_numpy(value) for key, value in adapter.tensors.items()} if adapter else {}
        )

    def linear(self, layer: int, name: str, weight: Tensor, bias: Tensor | None) -> Linear:
        base: Linear = Packed(weight, bias) if self._packed else Dense(weight, bias)
        columns = self._columns(layer, name)
        if self._lora is None or not columns:
            return base
        a, b = adapter_matrices(self._tensors, layer, columns)
        fused = fuse(a, b, columns, len(weight), self._lora.scale, self._dtype)
        return Adapted(base, *(matrix.to(weight.device) for matrix in fused))

    def gate(self, layer: int, weight: Tensor) -> Gate:
        if self._packed and not self._columns(layer, "gate_up"):
            return PackedGate(*(Packed(half) for half in weight.chunk(2)))
        return FusedGate(self.linear(layer, "gate_up", weight, None))

    def _columns(self, layer: int, name: str) -> list[Span]:
        """The modules of a fused layer that the adapter changes: some adapters leave layers out."""
        if self._lora is None or layer < 0:
            return []
        present = [one for one in self._lora.targets if f"layers.{layer}.{one}.lora_a" in self._tensors]
        return spans(self._config, name, present)
