"""Resident placement: what a piece of work takes, part by part, and whether the machine has it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from spillover.engine.protocol import Numerics, Plan, Work
from spillover.engine.torch import steps
from spillover.engine.torch.bound import speed_of
from spillover.engine.torch.device import SHARE, default_numerics, memory_limit, pick_device
from spillover.engine.torch.linear import Packed
from spillover.engine.torch.lora import parameters
from spillover.engine.torch.native import decoder as native
from spillover.engine.torch.packing import whole
from spillover.engine.torch.tiles import KEPT_LENGTH
from spillover.errors import EngineError
from spillover.models.index import layer_tensors

if TYPE_CHECKING:
    from spillover.models import Model, ModelConfig

DTYPES: dict[str, torch.dtype] = {"float32": torch.float32, "bf16": torch.bfloat16}
# `Plan.kernels`: spillover.engine.torch.native, torch's own in recorded steps, and torch's own one by one
COMPILED, GRAPHS, TORCH = "compiled", "graphs", "torch"
WITHOUT_GRAPHS = "without CUDA graphs"
PREFILL_TOKENS = 2048  # newcomers' tokens in one pass: enough to keep the products large
LOGIT_BYTES = 64 << 20  # float32 logits alive at once in a loss or a score
CACHE_GRAIN = 32  # positions: caches grow by as many
_RUNTIME = 250 << 20  # torch itself, its kernels and thread stacks


@dataclass(frozen=True)
class _Sizes:
    """Bytes of one model's parts in one dtype."""

    config: ModelConfig
    width: int  # bytes of an element

    def weights(self) -> int:
        c = self.config
        layers = sum(math.prod(s) for n in range(c.layers) for s in layer_tensors(c, n).values())
        # a tied head is packed beside the embedding, so both count
        return self.width * (layers + 2 * c.vocab_size * c.hidden_size)

    def cache_token(self) -> int:
        c = self.config
        return self.width * 2 * c.layers * c.kv_heads * c.head_dim

    def logits_row(self) -> int:
        return self.config.vocab_size * (4 + self.width)

    def pass_token(self) -> int:
        """A token of an inference pass: the widest moment of a layer."""
        c = self.config
        return self.width * (4 * c.hidden_size + 4 * self._inner() + 3 * c.heads * c.head_dim)

    def training_weights(self, layouts: int) -> int:
        """Weights with the products in so many layouts; the head is read as it lies in the file."""
        c = self.config
        layers = sum(math.prod(s) for n in range(c.layers) for s in layer_tensors(c, n).values())
        return self.width * (layouts * layers + (1 if c.tied else 2) * c.vocab_size * c.hidden_size)

    def saved_token(self, length: int, rank: int, *, recompute: bool) -> int:
        """A token of a training pass over sequences of `length`: what layers save, and one's backward."""
        c, inner = self.config, self._inner()
        normed = 6 if c.output_norms else 4
        attention = c.head_dim * (2 * c.heads + 2 * c.kv_heads) + c.heads * min(length, KEPT_LENGTH)
        layer = normed * c.hidden_size + attention + 4 * inner + 7 * rank
        kept = layer + c.layers * c.hidden_size if recompute else c.layers * layer
        return self.width * (kept + 8 * inner)

    def _inner(self) -> int:
        """The width of a token's feed-forward part; each expert also takes and gives a residual's width."""
        c, experts = self.config, self.config.experts
        if experts is None:
            return c.intermediate_size
        sparse = experts.per_token * (experts.intermediate_size + c.hidden_size)
        return sparse if len(experts.layers) == c.layers else max(sparse, c.intermediate_size)


def make_plan(model: Model, work: Work, version: str) -> Plan:
    """Decide device, numerics, batch and tokens per pass; `EngineError` when one row does not fit."""
    device = pick_device(work.device)
    numerics, reason = _numerics(work, device)
    sizes = _Sizes(model.config, DTYPES[numerics].itemsize)
    if work.sequence > model.config.max_positions:
        raise EngineError(
            f"{model.ref.spec} reads at most {model.config.max_positions} tokens, not {work.sequence}",
            hint=f"ask for {model.config.max_positions} or fewer",
        )
    limit = memory_limit(device)
    kernels, without = _kernels(model.config, device, work)
    fit = _fit_training if work.kind == "train" else _fit_generation
    fitted = fit(sizes, work, limit)
    parts = fitted.parts
    without += ", layers computed again in the backward to save memory" if fitted.recompute else ""
    total = sum(size for _, size in parts)
    listed = ", ".join(f"{name} {_gb(size)}" for name, size in parts)
    if total > limit:
        raise EngineError(
            f"{model.ref.spec} needs {_gb(total)} ({listed}) but {_gb(limit)} may be used "
            f"({SHARE:.0%} of this machine's memory)",
            hint="choose a smaller model, a shorter sequence or a machine with more memory",
        )
    return Plan(
        engine="torch",
        device=str(device),
        numerics=numerics,
        placement="resident",
        batch=fitted.batch,
        sequence=work.sequence,
        pass_tokens=fitted.pass_tokens,
        weights_bytes=sizes.weights(),
        memory_bytes=total,
        parts=tuple(parts),
        why=f"resident on {device} in {numerics} ({reason}){without}; {_gb(total)} of {_gb(limit)}: {listed}",
        cache_tokens=fitted.cache_tokens,
        kernels=kernels,
        two_layouts=fitted.two_layouts,
        recompute=fitted.recompute,
        speed=speed_of(model.config, work.kind, numerics, kernels) if device.type == "cpu" else None,
    )


def _kernels(config: ModelConfig, device: torch.device, work: Work) -> tuple[str, str]:
    """What computes, and what to say where the compiled kernels cannot."""
    if work.kind == "train":
        return TORCH, ""
    if device.type == "cpu":
        why = native.unsupported(config)
        return (TORCH, f", without compiled kernels: {why}") if why else (COMPILED, "")
    why = steps.unsupported(config, device)
    return (TORCH, f", {WITHOUT_GRAPHS}: {why}") if why else (GRAPHS, "")


def _numerics(work: Work, device: torch.device) -> tuple[Numerics, str]:
    if work.numerics is not None:
        return work.numerics, "as asked"
    chosen, reason = default_numerics(device)
    return ("bf16" if chosen == "bf16" else "float32"), reason


@dataclass(frozen=True)
class _Fit:
    """What a memory limit allows."""

    batch: int
    pass_tokens: int
    cache_tokens: int
    parts: list[tuple[str, int]]
    two_layouts: bool = False
    recompute: bool = False


def _fit_generation(sizes: _Sizes, work: Work, limit: int) -> _Fit:
    fixed = [
        ("weights", sizes.weights()),
        ("activations", sizes.pass_token() * max(PREFILL_TOKENS, work.sequence) + _RUNTIME),
    ]
    row = sizes.cache_token() * (work.sequence + CACHE_GRAIN) + sizes.logits_row()
    room = limit - sum(size for _, size in fixed)
    batch = max(1, min(work.batch, room // row))
    cache_tokens = batch * (work.sequence + CACHE_GRAIN)
    return _Fit(batch, PREFILL_TOKENS, cache_tokens, [*fixed, ("cache", batch * row)])


def _fit_training(sizes: _Sizes, work: Work, limit: int) -> _Fit:
    """The fastest way that has room for a sequence.

    Sequences of a micro-batch that do not fit together go through in several passes of whole sequences.
    """
    if work.lora is None:
        raise EngineError("training needs a LoRA configuration: base weights are never trained")
    cpu = pick_device(work.device).type == "cpu" and Packed.available()
    ways = [(True, False)] if cpu else []
    for two_layouts, recompute in [*ways, (False, False), (False, True)]:
        fixed = [
            ("weights", sizes.training_weights(1 + two_layouts)),
            # parameters and two moments, twice (a step writes new ones), gradients, factors, what products
            # read, and a copy for a checkpoint
            ("adapter", 4 * 12 * parameters(sizes.config, work.lora)),
            ("loss", 2 * LOGIT_BYTES + _RUNTIME),
        ]
        longest = whole(work.sequence)
        sequence = sizes.saved_token(work.sequence, work.lora.rank, recompute=recompute) * longest
        room = limit - sum(size for _, size in fixed)
        if room >= sequence:
            break
    together = max(1, min(work.batch, room // sequence))
    parts = [*fixed, ("activations", together * sequence)]
    return _Fit(work.batch, together * longest, 0, parts, two_layouts, recompute)


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB"
