"""What bounds a model on this machine, and what its passes cost there."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from spillover import __version__
from spillover.engine.estimate import Limits, Shape, Speed
from spillover.engine.speeds import Machine, machine_key, recall
from spillover.engine.torch.device import limits
from spillover.engine.torch.native.library import BLOCK, library
from spillover.models.index import layer_tensors, linears

if TYPE_CHECKING:
    from spillover.engine.protocol import Kind, Numerics
    from spillover.models import ModelConfig

_WIDTHS = {"float32": 4, "bf16": 2}
_DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}


def speed_of(config: ModelConfig, kind: Kind, numerics: Numerics, kernels: str) -> Speed | None:
    """What is known of a model's speed on the CPU; None when nothing was measured. Measures nothing."""
    shape, block = shape_of(config, numerics), BLOCK if kernels != "torch" else 0
    key = machine_key(torch.get_num_threads(), str(torch.__version__))
    machine = recall(key, Machine)
    if machine is None:
        quick = limits(_DTYPES[numerics])
        return Speed(shape, quick, block=block) if quick else None
    rates = machine.rates[numerics]
    fastest = 1e9 * max(rates.gflops, rates.passes_gflops)
    known = Limits(machine.memory.gbs * 1e9, fastest)
    costs = rates.generation if kind == "generate" else rates.training
    other = machine.version != __version__ or (kind == "generate" and rates.code != code_of(kernels))
    return Speed(shape, known, None if other or config.experts else costs, block)


def shape_of(config: ModelConfig, numerics: Numerics) -> Shape:
    """The numbers of `config` that count."""
    met = sum(a * b for n in range(config.layers) for a, b in linears(config, n).values())
    stored = sum(math.prod(s) for n in range(config.layers) for s in layer_tensors(config, n).values())
    if config.experts is not None:
        experts = config.experts
        met += len(experts.layers) * experts.per_token * 3 * config.hidden_size * experts.intermediate_size
    return Shape(
        layers=config.layers,
        hidden=config.hidden_size,
        queries=config.heads * config.head_dim,
        weights=met,
        stored=stored,
        head=config.vocab_size * config.hidden_size,
        width=_WIDTHS[numerics],
        cache=_WIDTHS[numerics] * 2 * config.layers * config.kv_heads * config.head_dim,
    )


def code_of(kernels: str) -> str:
    """The name of what computes passes: it changes with the kernels' sources and their compiler."""
    native = library() if kernels != "torch" else None
    return Path(native._name).stem if native is not None else "torch"
