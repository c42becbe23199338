"""How many optimizer steps a job takes, over which micro-batches, at which learning rates."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from spillover.errors import InputError

Schedule = Literal["cosine", "linear", "constant"]


@dataclass(frozen=True)
class Steps:
    """The optimizer steps of a job over the endless sequence of micro-batches.

    Step ``s`` takes the micro-batches from ``s * grad_accum`` on, whatever epoch they fall into: accumulation
    runs across the end of an epoch, so that no step but the last is smaller than the others, each epoch still
    holds every example once, and the number of steps done is all there is to remember. The last step stops at
    the last micro-batch and may be smaller.

    Attributes:
        total: optimizer steps.
        micro_batches: micro-batches over all steps.
        grad_accum: micro-batches a step.
    """

    total: int
    micro_batches: int
    grad_accum: int

    @classmethod
    def of(
        cls,
        per_epoch: int,
        *,
        epochs: float | None = None,
        steps: int | None = None,
        grad_accum: int = 1,
    ) -> Steps:
        """Steps for a number of epochs, which may be a fraction, or for a number of steps.

        A fraction of an epoch is rounded up to whole micro-batches. Raises `InputError` for numbers that are
        not above 0, and unless exactly one of ``epochs`` and ``steps`` is given.
        """
        if (epochs is None) == (steps is None):
            raise InputError("give either --epochs or --steps", hint="--epochs 1")
        if grad_accum < 1:
            raise InputError(f"--grad-accum must be at least 1, not {grad_accum}", hint="--grad-accum 1")
        if steps is not None:
            if steps < 1:
                raise InputError(f"--steps must be at least 1, not {steps}", hint="--steps 100")
            return cls(steps, steps * grad_accum, grad_accum)
        assert epochs is not None
        if not (epochs > 0 and math.isfinite(epochs)):
            raise InputError(f"--epochs must be above 0, not {epochs}", hint="--epochs 1")
        # The decimal that was typed: 1.1 epochs of 50 are 55 micro-batches, in floats 56.
        micro_batches = math.ceil(Fraction(str(epochs)) * per_epoch)
        return cls(-(-micro_batches // grad_accum), micro_batches, grad_accum)

    def micro_batches_of(self, step: int) -> range:
        """Numbers of the micro-batches of a step, counted from 0 as `spillover.jobs.data.Order` does."""
        start = step * self.grad_accum
        return range(start, min(start + self.grad_accum, self.micro_batches))


def warmup_steps(total: int, warmup: float) -> int:
    """Steps that a fraction ``warmup`` of ``total`` comes to, rounded up as transformers does."""
    return math.ceil(Fraction(str(warmup)) * total)


def lr_at(step: int, total: int, base: float, warmup: float, schedule: Schedule) -> float:
    """The learning rate of optimizer step ``step``, counted from 0.

    It rises in a straight line from 0 over the first `warmup_steps`, then follows half a cosine or a line
    down to 0 at ``total``, or stays at ``base``: the values of transformers'
    ``get_cosine_schedule_with_warmup`` and its linear and constant siblings.

    Args:
        total: optimizer steps of the whole job.
        base: the highest learning rate.
        warmup: fraction of the steps, from 0 to 1.
    """
    rising = warmup_steps(total, warmup)
    if step < rising:
        return base * step / rising
    if schedule == "constant":
        return base
    done = (step - rising) / max(1, total - rising)
    if schedule == "linear":
        return base * max(0.0, 1.0 - done)
    return base * max(0.0, 0.5 * (1.0 + math.cos(math.pi * done)))
