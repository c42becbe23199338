"""Losses over a large vocabulary, a chunk of targets at a time, without the full logits.

The gradient of the hidden states is computed beside the loss, while a chunk's logits are at hand, as in Liger
Kernel (Hsu et al., arXiv 2410.10989).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from spillover.engine.torch.packing import GRAIN, whole
from spillover.engine.torch.pointwise import capped

_TINY = torch.finfo(torch.float32).tiny


class Goal(Protocol):
    """What logits are to become, a row of them for each of M targets."""

    def part(self, rows: slice) -> Goal:
        """The goal of some rows; there may be fewer of it than of those."""
        ...

    def loss(self, logits: Tensor, wanted: bool) -> Tensor:
        """The sum of the losses of the first rows of float32 ``[rows, V]``, a float32 scalar.

        The logits are used up; if `wanted` they become their own gradient, zero in rows beyond the goal.
        """
        ...


@dataclass(frozen=True)
class Chosen:
    """One token each: ``-log p(target)``. ``tokens`` is int64 ``[M]``."""

    tokens: Tensor

    def part(self, rows: slice) -> Chosen:
        return Chosen(self.tokens[rows])

    def loss(self, logits: Tensor, wanted: bool) -> Tensor:
        count, chosen = len(self.tokens), self.tokens.unsqueeze(1)
        picked = _relative(logits)[:count].gather(1, chosen)
        total = logits.exp_().sum(dim=-1, keepdim=True)
        loss = (total[:count].log() - picked).sum()
        if wanted:
            logits.mul_(total.reciprocal_())
            logits[:count].scatter_add_(1, chosen, torch.full_like(picked, -1.0))
            logits[count:] = 0
        return loss


@dataclass(frozen=True)
class Distribution:
    """A teacher's distribution p, known for its K most likely tokens: ``KL(p || q)``.

    The divergence is that of K + 1 outcomes, the last of which is any other token, so that nothing is lost
    of what is known and nothing made up: with ``K = V`` it is the whole one, and it is 0 only where the
    student agrees on all that is known. ``tokens`` is int64 ``[M, K]``, ``logprobs`` float32 ``[M, K]``.
    """

    tokens: Tensor
    logprobs: Tensor

    def part(self, rows: slice) -> Distribution:
        return Distribution(self.tokens[rows], self.logprobs[rows])

    def loss(self, logits: Tensor, wanted: bool) -> Tensor:
        count, p = len(self.tokens), self.logprobs.exp()
        others = (1 - p.sum(dim=-1, keepdim=True)).clamp_(min=0)  # [M, 1], the teacher's for all the rest
        picked = _relative(logits)[:count].gather(1, self.tokens)  # [M, K]
        likely = logits.exp_()[:count].gather(1, self.tokens)
        logits[:count].scatter_(1, self.tokens, 0)  # not by a difference, which would lose a small rest
        rest = logits[:count].sum(dim=-1, keepdim=True).clamp_(min=_TINY)
        total = rest + likely.sum(dim=-1, keepdim=True)
        known = (p * (self.logprobs - picked + total.log())).sum()
        loss = known + (torch.xlogy(others, others) - others * (rest / total).log()).sum()
        if wanted:
            # of the tokens that are not known: q_j (1 - others / sum of their q)
            logits[:count].mul_(total.reciprocal() - others / rest)
            logits[:count].scatter_(1, self.tokens, likely / total - p)
            logits[count:] = 0
        return loss


class HeadLoss:
    """The head and the loss on its logits; keeps the buffers of a chunk from step to step.

    ``head`` ``[V, H]`` is frozen. At most `chunk_bytes` of float32 logits are alive at once (but one grain of
    rows at least). They go through `softcap` first, if there is one.
    """

    def __init__(self, head: Tensor, chunk_bytes: int, softcap: float | None) -> None:
        self._head = head
        self._softcap = softcap
        self._rows = max(GRAIN, chunk_bytes // (4 * len(head)) // GRAIN * GRAIN)
        self._narrow = self._wide = head.new_empty(0)

    def __call__(self, hidden: Tensor, goal: Goal) -> Tensor:
        """The sum of the losses of `goal`, a float32 scalar.

        ``hidden`` ``[M', H]`` after the final norm, of M targets and padding.
        """
        return _GoalLoss.apply(hidden, goal, self)  # type: ignore[no-untyped-call, no-any-return]

    def chunks(self, count: int) -> list[slice]:
        """`count` rows in as few chunks as fit, of about the same size."""
        parts = -(-count // self._rows)
        size = whole(-(-count // max(1, parts)))
        return [slice(start, min(start + size, count)) for start in range(0, count, max(1, size))]

    def logits(self, hidden: Tensor) -> Tensor:
        """Float32 logits ``[rows, V]`` in this object's buffer, capped."""
        wide, narrow = self._buffers(len(hidden))
        torch.mm(hidden, self._head.t(), out=narrow)
        if wide is not narrow:
            wide.copy_(narrow)
        return capped(wide, self._softcap)

    def back(self, logits: Tensor, out: Tensor) -> None:
        """Write the gradient of the hidden states, ``[rows, H]``, from that of the logits in the buffer."""
        wide, narrow = self._buffers(len(logits))
        if wide is not narrow:
            narrow.copy_(wide)
        torch.mm(narrow, self._head, out=out)

    def slope(self, logits: Tensor) -> Tensor | None:
        """The derivative of the soft-cap at `logits`, which have gone through it; None without one."""
        return None if self._softcap is None else 1 - (logits / self._softcap).square_()

    def _buffers(self, rows: int) -> tuple[Tensor, Tensor]:
        if len(self._wide) < rows:
            shape = (rows, len(self._head))
            self._wide = self._head.new_empty(shape, dtype=torch.float32)
            same = self._head.dtype == torch.float32
            self._narrow = self._wide if same else self._head.new_empty(shape)
        wide = self._wide[:rows]
        return wide, wide if self._narrow is self._wide else self._narrow[:rows]


class _GoalLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, goal: Goal, head: HeadLoss) -> Tensor:
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        wanted = ctx.needs_input_grad[0]
        grad = torch.empty_like(hidden) if wanted else hidden
        for part in head.chunks(len(hidden)):
            logits = head.logits(hidden[part])
            slope = head.slope(logits) if wanted else None
            total += goal.part(part).loss(logits, wanted)
            if wanted:
                if slope is not None:
                    logits.mul_(slope)
                head.back(logits, grad[part])
        ctx.save_for_backward(grad)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor, None, None]:
        (grad,) = ctx.saved_tensors
        return grad * scale.to(grad.dtype), None, None


def _relative(logits: Tensor) -> Tensor:
    """`logits` less the best of each row: a float32 near 30 has lost two more digits than one near 0."""
    logits -= logits.amax(dim=-1, keepdim=True)
    return logits
