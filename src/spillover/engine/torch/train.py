"""LoRA training on torch.

Guarantee: whatever interrupts `TorchTrainer.step`, at any instruction, the trainer holds the state before the
step or the state after it, never a mixture. Parameters and moments are one flat float32 array each; a step
writes new arrays and then puts them in place with a single assignment. The price is a second copy of the
adapter's state.

Given the same state, micro-batches and thread count, a step is bit for bit the same: no random stream is
carried, and no kernel is chosen by timing.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from spillover.engine.protocol import Floats, MicroBatch, Optimizer, StepResult, TrainState
from spillover.engine.torch.attention import Causal
from spillover.engine.torch.decoder import Decoder
from spillover.engine.torch.dropout import Dropout
from spillover.engine.torch.linear import Dense, FusedGate, Gate, Linear
from spillover.engine.torch.lora import LoraLinear, adapter_matrices, spans
from spillover.engine.torch.loss import cross_entropy_sum
from spillover.engine.torch.packing import whole
from spillover.engine.torch.plan import LOGIT_BYTES
from spillover.engine.torch.weights import Weights
from spillover.errors import EngineError

if TYPE_CHECKING:
    from spillover.models.lora import LoraConfig


@dataclass(frozen=True)
class _State:
    """Flat float32 parameters and AdamW moments after `step` steps."""

    params: Tensor  # [P]
    m: Tensor  # [P]
    v: Tensor  # [P]
    step: int


@dataclass(frozen=True)
class _Sequence:
    """One training sequence, padded to a `whole` length, and its number within the step.

    Padding comes last, so under a causal mask no token sees it, and it is no target.
    """

    number: int
    tokens: Tensor  # int64 [T]
    targets: Tensor  # int64 [M]: positions whose token is predicted, all >= 1


class TorchTrainer:
    """Trains one adapter on a frozen base. See `spillover.engine.protocol.Trainer`.

    `protected` wraps the update: a job may set it to hold signals back for those milliseconds.
    """

    def __init__(
        self,
        weights: Weights,
        config: LoraConfig,
        initial: Mapping[str, Floats],
        optimizer: Optimizer,
        *,
        seed: int,
        pass_tokens: int,
    ) -> None:
        self.protected: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext
        self._optimizer = optimizer
        self._pass_tokens = pass_tokens
        self._dropout = Dropout(config.dropout, seed)
        self._linears = _Trainable(weights, config, self._dropout)
        self._decoder = Decoder(weights, self._linears)
        self._shapes = {name: array.shape for name, array in initial.items()}
        self._device = weights.device
        params = self._flatten(initial)
        self._state = _State(params, torch.zeros_like(params), torch.zeros_like(params), 0)
        self._spare = [torch.empty_like(params) for _ in range(3)]
        self._grad = torch.zeros_like(params)

    @property
    def completed(self) -> int:
        """Optimizer steps made so far, those of a restored state included."""
        return self._state.step

    def step(self, micro_batches: Sequence[MicroBatch], *, lr: float) -> StepResult:
        """One AdamW step on the mean loss over all targets of all `micro_batches`."""
        sequences = self._sequences(micro_batches)
        count = sum(len(one.targets) for batch in sequences for one in batch)
        if not count:
            raise EngineError("a step has no target token: every sequence's mask is empty")
        self._grad.zero_()
        self._bind(self._state.params, self._grad)
        total = 0.0
        for group in self._passes(sequences):
            loss = self._loss(group, self._state.step)
            total += loss.item()
            (loss / count).backward()  # type: ignore[no-untyped-call]
        # by tensor: over millions of elements at once, float32 loses four digits
        norm = float(torch.nn.utils.get_total_norm(self._views(self._grad).values()))
        if not math.isfinite(norm):
            raise EngineError(f"the gradient of step {self.completed + 1} is not finite", hint="lower --lr")
        with self.protected():
            self._update(lr, norm)
        return StepResult(loss=total / count, grad_norm=norm, tokens=count)

    @torch.no_grad()
    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> float:
        """The mean loss over all targets, without dropout; changes nothing."""
        sequences = self._sequences(micro_batches)
        count = sum(len(one.targets) for batch in sequences for one in batch)
        self._bind(self._state.params, None)
        rate, self._dropout.rate = self._dropout.rate, 0.0
        try:
            total = sum(self._loss(group, 0).item() for group in self._passes(sequences))
        finally:
            self._dropout.rate = rate
        return total / max(1, count)

    def state(self) -> TrainState:
        """A copy that later steps do not change."""
        now = self._state
        return TrainState(self._named(now.params), self._named(now.m), self._named(now.v), now.step)

    def restore(self, state: TrainState) -> None:
        """Continue from `state`; `EngineError` names the first tensor that does not fit."""
        params, m, v = (self._flatten(arrays) for arrays in (state.params, state.m, state.v))
        self._state = _State(params, m, v, state.step)

    def _bind(self, params: Tensor, grad: Tensor | None) -> None:
        """Give every layer its adapters: leaves that are views of `params`, with gradients in `grad`."""
        leaves = self._views(params.detach())
        gradients = self._views(grad) if grad is not None else {}
        for name, leaf in leaves.items():
            if gradients:
                leaf.requires_grad_()
                leaf.grad = gradients[name]
        for linear in self._linears.adapted:
            linear.a, linear.b = adapter_matrices(leaves, linear.layer, linear.columns)

    def _sequences(self, micro_batches: Sequence[MicroBatch]) -> list[list[_Sequence]]:
        result, number = [], 0
        for batch in micro_batches:
            rows = []
            for tokens, mask, length in zip(batch.tokens, batch.mask, batch.lengths, strict=True):
                targets = np.flatnonzero(mask[:length])
                targets = targets[targets > 0]  # nothing predicts the first token
                padded = np.zeros(whole(int(length)), np.int64)
                padded[:length] = tokens[:length]
                parts = (torch.from_numpy(x).to(self._device) for x in (padded, targets))
                rows.append(_Sequence(number, *parts))
                number += 1
            result.append(rows)
        return result

    def _passes(self, sequences: Sequence[Sequence[_Sequence]]) -> Iterator[list[_Sequence]]:
        """Each micro-batch in as few passes of whole sequences as the planned tokens per pass allow."""
        for batch in sequences:
            group: list[_Sequence] = []
            for one in batch:
                if group and sum(len(x.tokens) for x in group) + len(one.tokens) > self._pass_tokens:
                    yield group
                    group = []
                group.append(one)
            if any(len(one.targets) for one in group):
                yield group

    def _loss(self, group: Sequence[_Sequence], step: int) -> Tensor:
        """The sum of ``-log p(target)`` over the sequences of one pass."""
        lengths = [len(one.tokens) for one in group]
        self._dropout.step = step
        self._dropout.sequences = [(one.number, len(one.tokens)) for one in group]
        tokens = torch.cat([one.tokens for one in group])
        positions = torch.cat([torch.arange(length, device=self._device) for length in lengths])
        starts = np.cumsum([0, *lengths[:-1]])
        places = torch.cat([one.targets + int(start) for one, start in zip(group, starts, strict=True)])
        config = self._decoder.config
        attention = Causal(lengths, config)
        hidden = self._decoder.hidden(tokens, positions, max(lengths), attention)  # [N, H]
        predicting = self._decoder.normed(hidden.index_select(0, places - 1))
        return cross_entropy_sum(
            predicting, self._linears.head, tokens[places], LOGIT_BYTES, config.logit_softcap
        )

    @torch.no_grad()
    def _update(self, lr: float, norm: float) -> None:
        """Clip, then AdamW in the order of operations of ``torch.optim.AdamW``, into the spare arrays."""
        now, rule = self._state, self._optimizer
        if rule.clip:
            self._grad.mul_(min(1.0, rule.clip / (norm + 1e-6)))
        step = now.step + 1
        beta1, beta2 = rule.betas
        params, m, v = self._spare
        torch.mul(now.params, 1 - lr * rule.weight_decay, out=params)
        torch.lerp(now.m, self._grad, 1 - beta1, out=m)
        torch.mul(now.v, beta2, out=v).addcmul_(self._grad, self._grad, value=1 - beta2)
        root = v.sqrt().div_(math.sqrt(1 - beta2**step)).add_(rule.eps)
        params.addcdiv_(m, root, value=-lr / (1 - beta1**step))
        spare = [now.params, now.m, now.v]
        self._state = _State(params, m, v, step)
        self._spare = spare

    def _flatten(self, arrays: Mapping[str, Floats]) -> Tensor:
        for name in sorted(self._shapes.keys() | arrays.keys()):
            wanted = self._shapes.get(name)
            found = arrays[name].shape if name in arrays else None
            if wanted != found:
                raise EngineError(f"adapter tensor {name} has shape {found}, not {wanted}")
        flat = np.concatenate([arrays[name].ravel() for name in self._shapes]).astype(np.float32, copy=False)
        return torch.from_numpy(flat).to(self._device)

    def _views(self, flat: Tensor) -> dict[str, Tensor]:
        pieces = torch.split(flat, [math.prod(shape) for shape in self._shapes.values()])
        return {
            name: piece.view(shape) for (name, shape), piece in zip(self._shapes.items(), pieces, strict=True)
        }

    def _named(self, flat: Tensor) -> dict[str, Floats]:
        return {name: view.cpu().numpy().copy() for name, view in self._views(flat).items()}


class _Trainable:
    """Linear layers of a training pass; remembers those with adapters, and the head."""

    def __init__(self, weights: Weights, config: LoraConfig, dropout: Dropout) -> None:
        self.adapted: list[LoraLinear] = []
        self.head = torch.empty(0)  # [V, H]
        self._model = weights.config
        self._config = config.on(weights.config)
        self._dropout = dropout

    def linear(self, layer: int, name: str, weight: Tensor, bias: Tensor | None) -> Linear:
        if layer < 0:
            self.head = weight
            return Dense(weight, bias)
        columns = spans(self._model, layer, name, self._config.targets)
        if not columns:
            return Dense(weight, bias)
        self.adapted.append(LoraLinear(layer, weight, bias, columns, self._config.scale, self._dropout))
        return self.adapted[-1]

    def gate(self, layer: int, weight: Tensor) -> Gate:
        return FusedGate(self.linear(layer, "gate_up", weight, None), self._model.activation)
