"""What jobs and engines say to each other. Nothing here imports an engine's library.

An `Engine` plans and loads; what it loads is a `LoadedModel`, which makes a `Session` (rows being generated,
with their KV cache), scores given tokens, or makes a `Trainer`. All arrays that cross this border are numpy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from spillover.engine.estimate import Speed

if TYPE_CHECKING:
    from spillover.engine.ring import Drive, Layout
    from spillover.models import Adapter, Model
    from spillover.models.lora import LoraConfig

Numerics: TypeAlias = Literal["float32", "bf16"]
Kind: TypeAlias = Literal["generate", "train"]
Finish: TypeAlias = Literal["stop", "length"]
Placement: TypeAlias = Literal["resident", "streamed"]
Floats: TypeAlias = NDArray[np.float32]
Ids: TypeAlias = NDArray[np.int64]

MAX_LOGPROBS = 64


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen: temperature 0 is greedy; ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 are off."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0


@dataclass(frozen=True)
class Request:
    """One row to generate.

    ``tokens`` is the prompt and ``generated`` what an earlier run already answered; both are prefilled, and
    ``max_tokens`` counts both runs. ``logprobs`` is the number of alternatives to report per token (0 reports
    the chosen token alone, -1 nothing). ``adapter`` is an index into those the model was loaded with, -1 for
    the base alone; without any, 0 is the base too. ``draws`` decides the random numbers in place of the id,
    for ids that are of one process.
    """

    id: str
    tokens: tuple[int, ...]
    max_tokens: int
    sampling: Sampling
    stop_ids: frozenset[int]
    stop: tuple[str, ...] = ()
    logprobs: int = 0
    generated: tuple[int, ...] = ()
    adapter: int = 0
    draws: str | None = None


@dataclass(frozen=True)
class TokenLogprob:
    """Natural log-probability of ``token`` at temperature 1, and of the most likely tokens, best first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass
class Completion:
    """A finished row. ``tokens`` ends with the stop id, or with the token that completed a stop string.

    ``seconds`` runs from the row's admission to its last token.
    """

    id: str
    tokens: list[int]
    finish: Finish
    logprobs: list[TokenLogprob] | None
    prompt_tokens: int
    seconds: float


@dataclass(frozen=True)
class Work:
    """What a job is about to ask of an engine.

    ``batch`` is the wanted number of rows at once (generate) or sequences in a micro-batch (train),
    ``sequence`` the most tokens a row may have, prompt and answer together. ``memory`` is the bytes that may
    be used, None for most of what the machine has. ``numerics``, ``device`` and ``placement`` None mean:
    choose. ``report`` hears how far planning is where it takes long: what, seconds done and in all.
    """

    kind: Kind
    batch: int
    sequence: int
    lora: LoraConfig | None = None
    numerics: Numerics | None = None
    device: str | None = None
    memory: int | None = None
    placement: Placement | None = None
    report: Callable[[str, float, float], None] | None = None


@dataclass(frozen=True)
class Plan:
    """What an engine will do and what it takes. ``parts`` names the bytes that add up to ``memory_bytes``.

    A model is resident, or its layers are streamed from the drive in every pass through buffers of a
    ``layout``, which keeps some of them in memory; ``drive`` is how it is read.
    ``batch`` is at most the wanted one, ``cache_tokens`` the positions of all rows together. ``pass_tokens``
    bounds the tokens of one forward pass: newcomers in a prefill, sequences of a micro-batch in training.
    ``kernels`` says what computes, ``why`` is one printable line. In training, ``two_layouts`` lays weights
    out for both directions, at twice their bytes, and ``recompute`` keeps only the inputs of layers for the
    backward; of these inputs ``saved_bytes`` stay in memory and the rest waits on disk, None where all stay.
    ``read_bytes`` come from the drive in a pass, about, there and back in training. ``speed`` is what is
    known of how fast it goes.
    """

    engine: str
    device: str
    numerics: Numerics
    placement: Placement
    batch: int
    sequence: int
    pass_tokens: int
    weights_bytes: int
    memory_bytes: int
    parts: tuple[tuple[str, int], ...]
    why: str
    cache_tokens: int = 0
    kernels: str = ""
    two_layouts: bool = False
    recompute: bool = False
    saved_bytes: int | None = None
    read_bytes: int = 0
    layout: Layout | None = None
    drive: Drive | None = None
    speed: Speed | None = None


class NextLogits(Protocol):
    """The next-token logits of each row of a session, still on the engine's device.

    They belong to the pass that made them: read them before the session's next call.
    """

    def argmax(self) -> Ids:
        """The most likely token per row, int64 ``[rows]``; the lowest id of equals."""
        ...

    def numpy(self, row: int) -> Floats:
        """The logits of one row, float32 ``[vocab]``."""
        ...

    def logprobs(self, rows: Sequence[int], tokens: Sequence[int], top: int) -> list[TokenLogprob]:
        """The log-probability of one token in each of `rows`, and of the `top` most likely tokens there."""
        ...


class Session(Protocol):
    """Rows being generated and their KV cache. Rows are numbered 0..n-1 without gaps.

    ``shared`` counts tokens of prompts that were not computed again, because an earlier one began alike.
    ``joins`` says that newcomers can share a pass with the rows that are there. After a pass that raised or
    was interrupted a session is of no more use.
    """

    slots: int
    length: int
    shared: int
    joins: bool

    def reserve(self, tokens: int) -> bool:
        """Keep room for a row of up to `tokens` tokens, which the next `admit` brings; False: none now.

        A session without rows has room for one of `length` tokens.
        """
        ...

    def admit(self, prompts: Sequence[Sequence[int]], adapters: Sequence[int] = ()) -> NextLogits:
        """Prefill reserved rows after the present ones, in order; logits of the new rows only.

        `adapters` are indices into those the model was loaded with, -1 for the base alone; left out, every
        row wears the first there is.
        """
        ...

    def decode(
        self, tokens: Sequence[int], prompts: Sequence[Sequence[int]] = (), adapters: Sequence[int] = ()
    ) -> NextLogits:
        """Append one token to every row; logits of every row.

        A session that ``joins`` admits `prompts` in the same pass; their rows' logits come last.
        """
        ...

    def release(self, row: int) -> None:
        """Drop a row. The last row takes its number."""
        ...


@dataclass(frozen=True)
class Likely:
    """What a teacher held for the most likely tokens in the place of each of M targets.

    ``tokens`` int64 ``[M, K]``, K different ones each; ``logprobs`` float32 ``[M, K]``, natural logarithms.
    """

    tokens: Ids
    logprobs: Floats


@dataclass(frozen=True)
class MicroBatch:
    """Training sequences, right-padded. ``mask[b, t]`` is true where the token *at* ``t`` is a target.

    ``tokens`` int64 ``[B, T]``, ``mask`` bool ``[B, T]``, ``lengths`` int64 ``[B]``. With `likely` a target's
    loss is the distance from the teacher's distribution: one entry for each true element of ``mask``, row by
    row. Over the teacher's K tokens and all others as one, that is ``KL(teacher || student)``.
    """

    tokens: NDArray[np.int64]
    mask: NDArray[np.bool_]
    lengths: NDArray[np.int64]
    likely: Likely | None = None


@dataclass(frozen=True)
class Optimizer:
    """AdamW with decoupled weight decay (Loshchilov and Hutter, arXiv 1711.05101), and clipping.

    ``clip`` 0 turns clipping off.
    """

    weight_decay: float = 0.01
    clip: float = 1.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8


@dataclass(frozen=True)
class StepResult:
    """``loss`` is the mean over the step's ``tokens`` targets; ``grad_norm`` is the norm before clipping."""

    loss: float
    grad_norm: float
    tokens: int


@dataclass(frozen=True)
class TrainState:
    """Everything a tune needs to continue: float32 arrays by adapter tensor name and the steps made so far.

    Names and shapes are those of `spillover.models.Adapter.tensors`; ``m`` and ``v`` are AdamW's moments.
    """

    params: dict[str, Floats]
    m: dict[str, Floats]
    v: dict[str, Floats]
    step: int


class Trainer(Protocol):
    """A LoRA tune in memory; an exception at any instruction leaves a whole number of steps."""

    protected: Callable[[], AbstractContextManager[object]]

    @property
    def completed(self) -> int:
        """Optimizer steps made so far, those of a restored state included."""
        ...

    def step(self, micro_batches: Sequence[MicroBatch], *, lr: float) -> StepResult:
        """One optimizer step over all micro-batches, their losses weighted by token."""
        ...

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> float:
        """The mean loss over all targets, without dropout; changes nothing."""
        ...

    def state(self) -> TrainState:
        """A copy that later steps do not change."""
        ...

    def restore(self, state: TrainState) -> None:
        """Continue from `state`; `EngineError` names the first tensor that does not fit."""
        ...


class LoadedModel(Protocol):
    """A model in memory, with adapters that rows may wear."""

    plan: Plan

    def session(self) -> Session:
        """An empty session of up to ``plan.batch`` rows of up to ``plan.sequence`` tokens."""
        ...

    def score(
        self,
        sequences: Sequence[Sequence[int]],
        starts: Sequence[int],
        *,
        top: int = 0,
        adapters: Sequence[int] = (),
    ) -> list[list[TokenLogprob]]:
        """Log-probabilities of ``sequence[start:]`` of each sequence, each token given all before it.

        ``adapters`` are as for `Session.admit`.
        """
        ...

    def trainer(
        self, config: LoraConfig, initial: Mapping[str, Floats], optimizer: Optimizer, *, seed: int = 0
    ) -> Trainer:
        """A trainer of a new adapter that starts from `initial`; `seed` decides dropout."""
        ...


class Engine(Protocol):
    """A way to compute. Engines know nothing of where state lives."""

    name: str
    version: str

    def plan(self, model: Model, work: Work) -> Plan:
        """Decide device, numerics and batch; `EngineError` in one line when it does not fit."""
        ...

    def load(self, model: Model, plan: Plan, adapters: Sequence[Adapter] = ()) -> LoadedModel:
        """Read the weights into memory as `plan` says."""
        ...
