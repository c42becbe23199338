"""AdamW over flat arrays, from the old state into new arrays (Loshchilov and Hutter, arXiv 1711.05101)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from spillover.engine.protocol import Optimizer

_PART = 1 << 17  # elements at once: what a chain of elementwise operators touches stays in the cache


@torch.no_grad()
def update(
    rule: Optimizer,
    old: Sequence[Tensor],
    new: Sequence[Tensor],
    grad: Tensor,
    *,
    step: int,
    lr: float,
    clip: float,
) -> None:
    """`new` parameters and moments from `old` ones, in the order of operations of ``torch.optim.AdamW``.

    All are float32 ``[P]``. `grad` is multiplied by `clip` in place; `step` counts from 1.
    """
    beta1, beta2 = rule.betas
    root_correction = math.sqrt(1 - beta2**step)
    split = [torch.split(one, _PART) for one in (*old, *new, grad)]
    for old_p, old_m, old_v, p, m, v, g in zip(*split, strict=True):
        if clip != 1.0:
            g.mul_(clip)
        torch.mul(old_p, 1 - lr * rule.weight_decay, out=p)
        torch.lerp(old_m, g, 1 - beta1, out=m)
        torch.mul(old_v, beta2, out=v).addcmul_(g, g, value=1 - beta2)
        root = v.sqrt().div_(root_correction).add_(rule.eps)
        p.addcdiv_(m, root, value=-lr / (1 - beta1**step))
