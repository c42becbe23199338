"""Cross-entropy over a large vocabulary, a chunk of targets at a time, without the full logits.

The gradient of the hidden states is computed beside the loss, while a chunk's logits are at hand, as in Liger
Kernel (Hsu et al., arXiv 2410.10989).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from spillover.engine.torch.pointwise import capped


def cross_entropy_sum(
    hidden: Tensor, head: Tensor, targets: Tensor, chunk_bytes: int, softcap: float | None
) -> Tensor:
    """The sum over targets of ``-log p(target)``, a float32 scalar.

    ``hidden`` ``[M, H]`` after the final norm, ``head`` ``[V, H]`` frozen, ``targets`` int64 ``[M]``. At most
    `chunk_bytes` of float32 logits are alive at once. They go through `softcap` first, if there is one.
    """
    rows = max(1, chunk_bytes // (4 * len(head)))
    return _CrossEntropy.apply(hidden, head, targets, rows, softcap)  # type: ignore[no-untyped-call, no-any-return]


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor, rows: int, softcap: float | None
    ) -> Tensor:
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        wanted = ctx.needs_input_grad[0]
        grad = torch.empty_like(hidden) if wanted else hidden
        for start in range(0, len(targets), rows):
            part = slice(start, start + rows)
            logits = capped(F.linear(hidden[part], head).float(), softcap)  # [rows, V]
            slope = None if softcap is None or not wanted else 1 - (logits / softcap).square_()
            # relative to the best, because a float32 near 30 has lost two more digits than one near 0
            logits -= logits.amax(dim=-1, keepdim=True)
            chosen = targets[part].unsqueeze(1)
            norm = torch.logsumexp(logits, dim=-1, keepdim=True)
            total += (norm - logits.gather(1, chosen)).sum()
            if wanted:
                logits.sub_(norm).exp_().scatter_add_(1, chosen, torch.full_like(norm, -1.0))
                if slope is not None:
                    logits.mul_(slope)
                torch.matmul(logits.to(head.dtype), head, out=grad[part])
        ctx.save_for_backward(grad)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor, None, None, None, None]:
        (grad,) = ctx.saved_tensors
        return grad * scale.to(grad.dtype), None, None, None, None
