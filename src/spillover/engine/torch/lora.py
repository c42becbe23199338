"""LoRA (Hu et al., arXiv 2106.09685) beside frozen linear layers that are fused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from spillover.engine.torch.dropout import Dropout
from spillover.engine.torch.weights import FUSED
from spillover.models.index import linears

if TYPE_CHECKING:
    from spillover.models import ModelConfig
    from spillover.models.lora import LoraConfig


@dataclass(frozen=True)
class Span:
    """The columns ``[start, stop)`` of a fused layer's output that belong to `module`."""

    module: str
    start: int
    stop: int


def spans(config: ModelConfig, layer: int, name: str, targets: Sequence[str]) -> list[Span]:
    """The modules of `targets` inside the product `name` of `layer`: ``self_attn.q_proj`` inside ``qkv``.

    None inside an expert's products.
    """
    found, start = [], 0
    modules = linears(config, layer)
    for module in FUSED[name]:
        if module not in modules:
            continue
        stop = start + modules[module][1]
        if module in targets:
            found.append(Span(module, start, stop))
        start = stop
    return found


def present(
    config: ModelConfig, layer: int, name: str, lora: LoraConfig, tensors: Mapping[str, Tensor]
) -> list[Span]:
    """The modules of a product that an adapter changes: some adapters leave layers out."""
    if layer < 0:
        return []
    found = [one for one in lora.targets if f"layers.{layer}.{one}.lora_a" in tensors]
    return spans(config, layer, name, found)


def parameters(config: ModelConfig, lora: LoraConfig) -> int:
    """How many numbers an adapter has."""
    return lora.rank * sum(inputs + outputs for _, _, inputs, outputs in lora.on(config).sites(config))


def fuse(
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    columns: Sequence[Span],
    outputs: int,
    scale: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """All adapters of a fused layer as one pair: ``[in, R]``, and ``[R, outputs]`` with `scale` in it.

    The second is block-diagonal: each adapter reaches its own columns.
    """
    wide = torch.zeros(sum(len(one) for one in b), outputs, dtype=dtype, device=b[0].device)
    row = 0
    for one, span in zip(b, columns, strict=True):
        wide[row : row + len(one), span.start : span.stop] = one * scale
        row += len(one)
    return torch.cat(list(a), dim=1).to(dtype), wide


def adapter_matrices(
    tensors: Mapping[str, Tensor], layer: int, columns: Sequence[Span]
) -> tuple[list[Tensor], list[Tensor]]:
    """The ``a`` ``[in, r]`` and ``b`` ``[r, out]`` of each span, by the names of `Adapter.tensors`."""
    names = [f"layers.{layer}.{span.module}" for span in columns]
    return [tensors[f"{name}.lora_a"] for name in names], [tensors[f"{name}.lora_b"] for name in names]


@dataclass
class LoraLinear:
    """A frozen fused layer with trainable float32 adapters; the trainer binds `a` and `b` before a step."""

    layer: int
    weight: Tensor  # [out, in]
    bias: Tensor | None
    columns: Sequence[Span]
    scale: float
    dropout: Dropout
    a: list[Tensor] = field(default_factory=list)  # [in, r] each
    b: list[Tensor] = field(default_factory=list)  # [r, out of the span] each

    def __call__(self, x: Tensor) -> Tensor:
        return _LoraProduct.apply(x, self, *self.a, *self.b)  # type: ignore[no-untyped-call, no-any-return]

    def onto(self, residual: Tensor, x: Tensor) -> Tensor:
        return residual + self(x)

    def masks(self, x: Tensor) -> list[Tensor] | None:
        """Scaled dropout masks of the adapters' inputs, one per span; None without dropout."""
        if not self.dropout.rate:
            return None
        return [self.dropout.mask(self.layer, span.module, x) for span in self.columns]


class _LoraProduct(torch.autograd.Function):
    """``x @ W.T + bias + scale * dropout(x) @ a @ b`` with gradients of ``x``, ``a`` and ``b`` only.

    The input is saved once for all adapters of the layer; products run in its dtype, and the adapters'
    gradients leave as float32. Dropout masks are made again in the backward.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, linear: LoraLinear, *leaves: Tensor) -> Tensor:
        a, b = fuse(linear.a, linear.b, linear.columns, len(linear.weight), linear.scale, x.dtype)
        masks = linear.masks(x)
        inner = x @ a if masks is None else _project(x, a, masks)  # [N, R]
        ctx.save_for_backward(x, inner, a, b)
        ctx.linear = linear
        return F.linear(x, linear.weight, linear.bias).addmm_(inner, b)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, inner, a, b = ctx.saved_tensors
        linear: LoraLinear = ctx.linear
        masks = linear.masks(x)
        by_inner = grad @ b.t()  # [N, R]
        if masks is None:
            by_a = list((x.t() @ by_inner).float().chunk(len(linear.columns), dim=1))
        else:
            pieces = by_inner.chunk(len(masks), dim=1)
            by_a = [((x * mask).t() @ piece).float() for mask, piece in zip(masks, pieces, strict=True)]
        by_b = [
            (piece.t() @ grad[:, span.start : span.stop]).float().mul_(linear.scale)
            for piece, span in zip(inner.chunk(len(linear.columns), dim=1), linear.columns, strict=True)
        ]
        by_x = None
        if ctx.needs_input_grad[0]:
            by_x = grad @ linear.weight
            by_x = by_x.addmm_(by_inner, a.t()) if masks is None else by_x.add_(_spread(by_inner, a, masks))
        return (by_x, None, *by_a, *by_b)


def _project(x: Tensor, a: Tensor, masks: Sequence[Tensor]) -> Tensor:
    """Each adapter's input has its own dropout: ``[N, R]``."""
    pieces = a.chunk(len(masks), dim=1)
    return torch.cat([(x * mask) @ piece for mask, piece in zip(masks, pieces, strict=True)], dim=1)


def _spread(by_inner: Tensor, a: Tensor, masks: Sequence[Tensor]) -> Tensor:
    """The gradient of ``x`` through `_project`: ``[N, in]``."""
    pieces = zip(by_inner.chunk(len(masks), dim=1), a.chunk(len(masks), dim=1), masks, strict=True)
    return sum(
        (piece @ part.t() * mask for piece, part, mask in pieces), start=torch.zeros((), dtype=a.dtype)
    )
