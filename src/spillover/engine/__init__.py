"""Engines compute: generation, scoring, LoRA steps. They know nothing of jobs or of where state lives.

Importing this imports no engine's library; `engine("torch")` does.
"""

from __future__ import annotations

from spillover.engine.generate import Scheduler
from spillover.engine.protocol import (
    MAX_LOGPROBS,
    Completion,
    Engine,
    Likely,
    LoadedModel,
    MicroBatch,
    Optimizer,
    Placement,
    Plan,
    Request,
    Sampling,
    Session,
    StepResult,
    TokenLogprob,
    Trainer,
    TrainState,
    Work,
)
from spillover.engine.stopping import Withheld, cut
from spillover.errors import EngineError

__all__ = [
    "MAX_LOGPROBS",
    "Completion",
    "Engine",
    "Likely",
    "LoadedModel",
    "MicroBatch",
    "Optimizer",
    "Placement",
    "Plan",
    "Request",
    "Sampling",
    "Scheduler",
    "Session",
    "StepResult",
    "TokenLogprob",
    "TrainState",
    "Trainer",
    "Withheld",
    "Work",
    "cut",
    "engine",
]


def engine(name: str = "torch") -> Engine:
    """The engine called `name`; `EngineError` when there is none."""
    if name == "torch":
        from spillover.engine.torch import TorchEngine

        return TorchEngine()
    raise EngineError(f"there is no engine {name!r}", hint="use --engine torch")
