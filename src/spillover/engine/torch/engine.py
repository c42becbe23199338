"""The torch engine: plans, loads, scores."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from spillover.engine.protocol import Floats, Optimizer, Plan, Session, TokenLogprob, Work
from spillover.engine.ring import Drive, LayerIndex, Ring, forward
from spillover.engine.torch.attention import Causal
from spillover.engine.torch.decoder import Decoder
from spillover.engine.torch.device import measured
from spillover.engine.torch.fit import LOGIT_BYTES
from spillover.engine.torch.linear import (
    ROWS,
    Adapted,
    Dense,
    FusedGate,
    Gate,
    Linear,
    Packed,
    PackedGate,
    Worn,
)
from spillover.engine.torch.lora import adapter_matrices, fuse, present
from spillover.engine.torch.native.model import NativeModel
from spillover.engine.torch.packing import pack
from spillover.engine.torch.plan import (
    COMPILED,
    DTYPES,
    GRAPHS,
    TORCH,
    WITHOUT_GRAPHS,
    make_plan,
)
from spillover.engine.torch.session import TorchSession, token_logprobs
from spillover.engine.torch.staging import pinned
from spillover.engine.torch.steps import CudaCapture, Eager, Recorded, Runner
from spillover.engine.torch.train import TorchTrainer
from spillover.engine.torch.weights import Weights
from spillover.errors import EngineError

if TYPE_CHECKING:
    from spillover.models import Adapter, Model, ModelConfig, WeightIndex
    from spillover.models.lora import LoraConfig


class TorchEngine:
    """PyTorch on the CPU or one CUDA device; on the CPU, weights may also be streamed from the drive."""

    name = "torch"
    version = str(torch.__version__)

    def plan(self, model: Model, work: Work) -> Plan:
        """Decide device, numerics and batch; `EngineError` in one line when it does not fit."""
        return make_plan(model, work, self.version)

    def load(self, model: Model, plan: Plan, adapters: Sequence[Adapter] = ()) -> TorchModel:
        """Open the weights; they are read by the first session, score or trainer."""
        return TorchModel(model, plan, adapters)


class TorchModel:
    """One model, with any number of adapters, as one plan places it."""

    def __init__(self, model: Model, plan: Plan, adapters: Sequence[Adapter]) -> None:
        self.plan = plan
        self._dtype = DTYPES[plan.numerics]
        self._adapters = tuple(adapters)
        self._worn = Worn(len(adapters))
        config = model.config.within(plan.sequence)
        self._weights = Weights(model.index(), config, self._dtype, torch.device(plan.device))
        self._open_ring = None if plan.layout is None else partial(_ring, self._weights.index, config, plan)

    def session(self) -> Session:
        """An empty session of up to ``plan.batch`` rows of up to ``plan.sequence`` tokens."""
        if self.plan.kernels == COMPILED:
            return self._native.session()
        batch, sequence = self.plan.batch, self.plan.sequence
        return TorchSession(self._decoder, self._worn, batch, sequence, self._runner())

    @torch.inference_mode()
    def score(
        self,
        sequences: Sequence[Sequence[int]],
        starts: Sequence[int],
        *,
        top: int = 0,
        adapters: Sequence[int] = (),
    ) -> list[list[TokenLogprob]]:
        """Log-probabilities of ``sequence[start:]`` of each sequence, each token given all before it.

        ``starts`` are at least 1. The `top` most likely tokens come with each.
        """
        result: list[list[TokenLogprob]] = []
        score = self._native.score if self.plan.kernels == COMPILED else self._score
        worn = adapters or [0] * len(sequences)
        for group in self._passes(sequences):
            result += score(
                [sequences[i] for i in group], [starts[i] for i in group], top, [worn[i] for i in group]
            )
        if self.plan.kernels == COMPILED:
            self._native.forget()
        return result

    def trainer(
        self, config: LoraConfig, initial: Mapping[str, Floats], optimizer: Optimizer, *, seed: int = 0
    ) -> TorchTrainer:
        """A trainer of a new adapter that starts from `initial`; `seed` decides dropout."""
        if self._adapters:
            raise EngineError(
                "an adapter cannot be trained on top of another", hint="name the base model alone"
            )
        ring = self._open_ring
        return TorchTrainer(
            self._weights, config, initial, optimizer, seed=seed, plan=self.plan, open_ring=ring
        )

    def _runner(self) -> Runner:
        if self.plan.kernels != GRAPHS:
            return Eager()
        device, vocabulary = self._weights.device, self._weights.config.vocab_size
        out = torch.empty(self.plan.batch, vocabulary, dtype=torch.float32, device=device)
        return Recorded(CudaCapture(device), out, self._without_graphs)

    def _without_graphs(self, reason: str) -> None:
        why = f"{self.plan.why}, {WITHOUT_GRAPHS}: {reason}"
        self.plan = replace(self.plan, kernels=TORCH, why=why)

    @cached_property
    def _decoder(self) -> Decoder:
        with torch.inference_mode():
            rows = None if self.plan.placement == "streamed" else ROWS
            inference = _Inference(self._weights, self._adapters, self._worn, rows)
            return Decoder(self._weights, inference, self._open_ring)

    @cached_property
    def _native(self) -> NativeModel:
        return NativeModel(self._weights, self.plan, self._adapters, self._open_ring)

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
        self, sequences: Sequence[Sequence[int]], starts: Sequence[int], top: int, adapters: Sequence[int]
    ) -> list[list[TokenLogprob]]:
        stream = pack(sequences, self._weights.device)
        self._worn.wear(adapters, [len(sequence) for sequence in sequences], self._weights.device)
        attention = Causal(stream.lengths, self._weights.config)
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


def _ring(index: WeightIndex, config: ModelConfig, plan: Plan) -> Ring:
    """A model's layers, read in the order of generation."""
    assert plan.layout is not None
    layers, drive, order = LayerIndex(index, config), plan.drive or Drive(), forward(config.layers)
    if plan.device == "cpu":
        return Ring(layers, plan.layout, drive, order)
    return Ring(layers, plan.layout, drive, order, allocate=pinned)


class _Inference:
    """Linear layers that only generate and score, with adapters beside them."""

    def __init__(self, weights: Weights, adapters: Sequence[Adapter], worn: Worn, rows: int | None) -> None:
        self._config = weights.config
        self._rows = rows
        self._dtype = weights.dtype
        self._packed = weights.device.type == "cpu" and measured(weights.dtype).packed
        self._worn = worn
        self._adapters = [
            (one.config, {key: torch.from_numpy(value) for key, value in one.tensors.items()})
            for one in adapters
        ]

    def linear(self, layer: int, name: str, weight: Tensor, bias: Tensor | None) -> Linear:
        base: Linear = Packed(weight, bias, self._rows) if self._packed else Dense(weight, bias)
        pairs = [self._pair(layer, name, weight, *one) for one in self._adapters]
        return Adapted(base, pairs, self._worn) if any(pairs) else base

    def gate(self, layer: int, weight: Tensor) -> Gate:
        adapted = any(present(self._config, layer, "gate_up", *one) for one in self._adapters)
        if self._packed and not adapted:
            gate, up = (Packed(half, None, self._rows) for half in weight.chunk(2))
            return PackedGate(gate, up, self._config.activation)
        return FusedGate(self.linear(layer, "gate_up", weight, None), self._config.activation)

    def _pair(
        self, layer: int, name: str, weight: Tensor, lora: LoraConfig, tensors: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor] | None:
        columns = present(self._config, layer, name, lora, tensors)
        if not columns:
            return None
        matrices = adapter_matrices(tensors, layer, columns)
        a, b = fuse(*matrices, columns, len(weight), lora.scale, self._dtype)
        return a.to(weight.device), b.to(weight.device)
