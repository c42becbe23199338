"""Feed-forward experts: a router sends each token through a few of many gated units (arXiv 1701.06538).

Only the experts that a pass routes to are computed, each on its own tokens at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from spillover.engine.torch.linear import Gate, Linear

if TYPE_CHECKING:
    from spillover.models.config import Experts


@dataclass(frozen=True)
class Mixture:
    """The experts of one layer, ``[N, H]`` to ``[N, H]``."""

    router: Tensor  # [E, H]
    gates: Sequence[Gate]
    downs: Sequence[Linear]
    rule: Experts

    def __call__(self, x: Tensor) -> Tensor:
        shares, chosen = self.route(x)
        order = chosen.flatten().argsort(stable=True)  # places in [N, k], those of one expert together
        counts = chosen.flatten().bincount(minlength=len(self.gates)).tolist()
        out = torch.zeros_like(x)
        by_expert = zip(torch.split(order, counts), self.gates, self.downs, strict=True)
        for places, gate, down in by_expert:
            if not len(places):
                continue
            tokens = places // self.rule.per_token
            added = down(gate(x[tokens])) * shares.flatten()[places].unsqueeze(1)
            out = out.index_add(0, tokens, added)
        return out

    def onto(self, residual: Tensor, x: Tensor) -> Tensor:
        """``residual + self(x)``."""
        return residual + self(x)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The weights and the numbers of each token's experts, ``[N, k]`` both."""
        odds = torch.softmax(F.linear(x, self.router).float(), dim=-1)  # [N, E]
        shares, chosen = torch.topk(odds, self.rule.per_token, dim=-1)
        if self.rule.normalized:
            shares = shares / shares.sum(-1, keepdim=True)
        return shares.to(x.dtype), chosen
