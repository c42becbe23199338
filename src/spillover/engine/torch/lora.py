"""LoRA (Hu et al., arXiv 2106.09685) beside frozen linear layers that are fused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from spillover.engine.torch.dropout import Dropout
from spillover.engine.torch.linear import Frozen
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
class Site:
    """The trainable adapters beside one fused layer; the trainer binds them before a step.

    Gradients are added to `grads` during the backward and reach nothing through autograd, which sees only
    `anchor`: a scalar that requires a gradient, so that a first layer has a backward at all.
    """

    layer: int
    columns: Sequence[Span]
    scale: float
    dropout: Dropout
    a: Tensor = field(default_factory=lambda: torch.empty(0))  # [in, R], the spans side by side
    b: Sequence[Tensor] = ()  # [r, out of the span] each, with `scale` in it
    grads: tuple[list[Tensor], list[Tensor]] = ([], [])  # float32, of the unscaled a and b of each span
    anchor: Tensor | None = None

    def masks(self, x: Tensor) -> list[Tensor] | None:
        """Scaled dropout masks of the adapters' inputs, one per span; None without dropout."""
        if not self.dropout.rate:
            return None
        return [self.dropout.mask(self.layer, span.module, x) for span in self.columns]

    def parts(self, x: Tensor) -> list[Tensor]:
        """The columns of each span of ``[N, out]``, views."""
        return [x[:, span.start : span.stop] for span in self.columns]


@dataclass(frozen=True)
class LoraLinear:
    """A frozen fused layer with trainable adapters beside it."""

    frozen: Frozen
    site: Site

    def __call__(self, x: Tensor) -> Tensor:
        return _LoraProduct.apply(x, self, self.site.anchor)  # type: ignore[no-untyped-call, no-any-return]

    def onto(self, residual: Tensor, x: Tensor) -> Tensor:
        return residual + self(x)


class _LoraProduct(torch.autograd.Function):
    """``x @ W.T + bias + scale * dropout(x) @ a @ b`` with gradients of ``x``, ``a`` and ``b`` only.

    The input is saved once for all adapters of the layer; products run in its dtype. Dropout masks are made
    again in the backward.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, linear: LoraLinear, anchor: Tensor | None) -> Tensor:
        site = linear.site
        masks = site.masks(x)
        inner = x @ site.a if masks is None else _project(x, site.a, masks)  # [N, R]
        ctx.save_for_backward(x, inner)
        ctx.linear = linear
        y = linear.frozen.product(x)
        for part, low, b in zip(site.parts(y), inner.chunk(len(site.b), dim=1), site.b, strict=True):
            part.addmm_(low, b)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None]:
        x, inner = ctx.saved_tensors
        linear: LoraLinear = ctx.linear
        site = linear.site
        masks, parts = site.masks(x), site.parts(grad)
        by_b = [low.t() @ part for low, part in zip(inner.chunk(len(parts), dim=1), parts, strict=True)]
        by_low = [part @ b.t() for part, b in zip(parts, site.b, strict=True)]  # [N, r] each
        by_inner = by_low[0] if len(by_low) == 1 else torch.cat(by_low, dim=1)  # [N, R]
        if masks is None:
            by_a = (x.t() @ by_inner).chunk(len(parts), dim=1)
        else:
            by_a = tuple((x * mask).t() @ one for mask, one in zip(masks, by_low, strict=True))
        torch._foreach_add_(site.grads[0], by_a)
        torch._foreach_add_(site.grads[1], by_b, alpha=site.scale)
        if not ctx.needs_input_grad[0]:
            return None, None, None
        by_x = linear.frozen.back(grad)
        if masks is None:
            return by_x.addmm_(by_inner, site.a.t()), None, None
        for low, a, mask in zip(by_low, site.a.chunk(len(masks), dim=1), masks, strict=True):
            by_x.addcmul_(low @ a.t(), mask)
        return by_x, None, None


def _project(x: Tensor, a: Tensor, masks: Sequence[Tensor]) -> Tensor:
    """Each adapter's input has its own dropout: ``[N, R]``."""
    pieces = a.chunk(len(masks), dim=1)
    return torch.cat([(x * mask) @ piece for mask, piece in zip(masks, pieces, strict=True)], dim=1)
