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

from spillover.engine.protocol import Floats, MicroBatch, Optimizer, Plan, StepResult, TrainState
from spillover.engine.torch.adamw import update
from spillover.engine.torch.attention import Causal, Tiled
from spillover.engine.torch.decoder import Decoder
from spillover.engine.torch.dropout import Dropout
from spillover.engine.torch.fit import LOGIT_BYTES
from spillover.engine.torch.linear import Dense, Frozen, FusedGate, Gate, Linear
from spillover.engine.torch.lora import LoraLinear, Site, adapter_matrices, spans
from spillover.engine.torch.loss import Chosen, Distribution, Goal, HeadLoss
from spillover.engine.torch.packing import pack, whole
from spillover.engine.torch.recompute import Inputs, recomputed
from spillover.engine.torch.weights import FUSED, Weights
from spillover.errors import EngineError

if TYPE_CHECKING:
    from spillover.engine.ring import Ring
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
    """One training sequence and its number within the step."""

    number: int
    tokens: Sequence[int]
    targets: Tensor  # int64 [M]: positions whose token is predicted, all >= 1
    likely: Distribution | None  # of M targets


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
        plan: Plan,
        open_ring: Callable[[], Ring] | None = None,
    ) -> None:
        self.protected: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext
        self._optimizer = optimizer
        self._pass_tokens = plan.pass_tokens
        self._recompute = plan.recompute
        self._inputs = None if plan.saved_bytes is None else Inputs(plan.saved_bytes)
        self._dropout = Dropout(config.dropout, seed)
        self._linears = _Trainable(weights, config, self._dropout, packed=plan.two_layouts)
        self._shapes = {name: array.shape for name, array in initial.items()}
        self._device = weights.device
        params = self._flatten(initial)
        self._state = _State(params, torch.zeros_like(params), torch.zeros_like(params), 0)
        self._spare = [torch.empty_like(params) for _ in range(3)]
        self._grad = torch.zeros_like(params)
        # what the products read: the parameters in their dtype, the scale already in each b
        self._bound = torch.empty_like(params, dtype=weights.dtype)
        self._factors = self._scales(config.scale)
        self._anchor = torch.zeros((), device=self._device, requires_grad=True)
        self._attach()
        self._decoder = Decoder(weights, self._linears, open_ring)
        self._loss_of = HeadLoss(self._linears.head, LOGIT_BYTES, weights.config.logit_softcap)

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
        self._bind()
        total = 0.0
        for group in self._passes(sequences):
            loss = self._loss(group, self._state.step)
            total += loss.item()
            (loss / count).backward()  # type: ignore[no-untyped-call]
        # by tensor: over millions of elements at once, float32 loses four digits
        norm = float(torch.nn.utils.get_total_norm(self._gradients))
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
        self._bind()
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

    def _scales(self, scale: float) -> Tensor:
        """What each parameter is multiplied by on its way into a product, float32 ``[P]``."""
        factors = torch.ones_like(self._grad)
        for name, view in self._views(factors).items():
            if name.endswith(".lora_b"):
                view.fill_(scale)
        return factors

    def _attach(self) -> None:
        """Give every layer its views of the bound parameters and of the gradient, which stay in place."""
        bound, gradients = self._views(self._bound), self._views(self._grad)
        self._gradients = list(gradients.values())
        self._side_by_side: list[tuple[Tensor, list[Tensor]]] = []
        for site in self._linears.sites.values():
            a, site.b = adapter_matrices(bound, site.layer, site.columns)
            site.grads = adapter_matrices(gradients, site.layer, site.columns)
            site.anchor = self._anchor
            site.a = a[0]
            if len(a) > 1:
                site.a = a[0].new_empty(len(a[0]), sum(one.shape[1] for one in a))
                self._side_by_side.append((site.a, a))

    @torch.no_grad()
    def _bind(self) -> None:
        """Let the layers see the present parameters."""
        torch.mul(self._state.params, self._factors, out=self._bound)
        for wide, parts in self._side_by_side:
            torch.cat(parts, dim=1, out=wide)

    def _sequences(self, micro_batches: Sequence[MicroBatch]) -> list[list[_Sequence]]:
        result, number = [], 0
        for batch in micro_batches:
            rows, entry = [], 0
            for tokens, mask, length in zip(batch.tokens, batch.mask, batch.lengths, strict=True):
                masked = np.flatnonzero(mask[:length])
                targets = masked[masked > 0]  # nothing predicts the first token
                stop = entry + len(masked)
                likely = self._likely(batch, stop - len(targets), stop)
                entry = stop
                places = torch.from_numpy(targets).to(self._device)
                rows.append(_Sequence(number, tokens[:length].tolist(), places, likely))
                number += 1
            result.append(rows)
        return result

    def _likely(self, batch: MicroBatch, start: int, stop: int) -> Distribution | None:
        """What the teacher held of some of a micro-batch's targets, if it had one."""
        if batch.likely is None:
            return None
        parts = (batch.likely.tokens[start:stop], batch.likely.logprobs[start:stop])
        return Distribution(*(torch.from_numpy(part).to(self._device) for part in parts))

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
        """The sum of the losses of all targets in the sequences of one pass."""
        stream = pack([one.tokens for one in group], self._device)
        lengths = [len(one.tokens) for one in group]
        starts = np.cumsum([0, *lengths[:-1]])
        places = torch.cat([one.targets + int(start) for one, start in zip(group, starts, strict=True)])
        if self._inputs is not None:
            self._inputs.clear()
        self._dropout.step = step
        self._dropout.sequences = [(one.number, len(one.tokens)) for one in group]
        config = self._decoder.config
        cpu = self._device.type == "cpu"
        attention = Tiled(lengths, config) if cpu else Causal(stream.lengths, config)
        # padded like the stream: any row will do, the loss leaves it out
        rows = torch.nn.functional.pad(places - 1, (0, whole(len(places)) - len(places)))
        hidden = self._decoder.hidden(
            stream.tokens,
            stream.positions,
            stream.longest,
            attention,
            self._recomputed if self._recompute else None,
            None if self._dropout.rate else rows,  # masks are made for whole sequences
        )
        if self._dropout.rate:
            hidden = hidden.index_select(0, rows)
        return self._loss_of(self._decoder.normed(hidden), _goal(group, stream.tokens[places]))

    def _recomputed(self, run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return recomputed(run, x, self._anchor, self._inputs)

    def _update(self, lr: float, norm: float) -> None:
        """Clip, then AdamW into the spare arrays, then one assignment."""
        now, rule = self._state, self._optimizer
        clip = min(1.0, rule.clip / (norm + 1e-6)) if rule.clip else 1.0
        old = [now.params, now.m, now.v]
        update(rule, old, self._spare, self._grad, step=now.step + 1, lr=lr, clip=clip)
        params, m, v = self._spare
        self._state, self._spare = _State(params, m, v, now.step + 1), old

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


def _goal(group: Sequence[_Sequence], targets: Tensor) -> Goal:
    """What the targets of a pass are to become: themselves, int64 ``[M]``, or as likely as a teacher held."""
    taught = [one.likely for one in group if one.likely is not None]
    if not taught:
        return Chosen(targets)
    if len(taught) < len(group):
        raise EngineError("a pass holds targets with a teacher and targets without")
    return Distribution(
        torch.cat([one.tokens for one in taught]), torch.cat([one.logprobs for one in taught])
    )


class _Trainable:
    """Linear layers of a training pass, the places of adapters among them, and the head."""

    def __init__(self, weights: Weights, config: LoraConfig, dropout: Dropout, *, packed: bool) -> None:
        self.head = torch.empty(0)  # [V, H]
        self._model = weights.config
        self._packed = packed
        targets = config.on(weights.config).targets
        places = {
            (layer, name): spans(weights.config, layer, name, targets)
            for layer in range(weights.config.layers)
            for name in FUSED
        }
        self.sites = {
            (layer, name): Site(layer, columns, config.scale, dropout)
            for (layer, name), columns in places.items()
            if columns
        }

    def linear(self, layer: int, name: str, weight: Tensor, bias: Tensor | None) -> Linear:
        if layer < 0:
            self.head = weight
            return Dense(weight, bias)
        frozen = Frozen(weight, bias, packed=self._packed)
        site = self.sites.get((layer, name))
        return frozen if site is None else LoraLinear(frozen, site)

    def gate(self, layer: int, weight: Tensor) -> Gate:
        return FusedGate(self.linear(layer, "gate_up", weight, None), self._model.activation)
