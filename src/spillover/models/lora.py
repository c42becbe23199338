"""Low-rank adapters in memory: configuration, initial values, the check against a base.

LoRA (Hu et al. 2021, https://arxiv.org/abs/2106.09685): a linear layer ``y = x W^T`` becomes
``y + scale (x A) B``. Here A is [in, r] and B is [r, out], float32, under the engine-neutral names
``layers.<k>.<module>.lora_a`` and ``.lora_b``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from spillover.errors import ModelError
from spillover.models.config import ModelConfig
from spillover.models.index import linears

if TYPE_CHECKING:
    import numpy as np

    Array: TypeAlias = np.ndarray[Any, np.dtype[np.float32]]

MODULES = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
"""The linear layers of a block that an adapter may change."""

_NAME = re.compile(r"layers\.(\d+)\.([\w.]+)\.lora_[ab]")


@dataclass(frozen=True)
class LoraConfig:
    """What is adapted and how strongly. `dropout` acts on the adapter's input while training."""

    rank: int = 16
    alpha: float = 32.0
    targets: tuple[str, ...] = MODULES
    dropout: float = 0.0

    def __post_init__(self) -> None:
        unknown = next((name for name in self.targets if name not in MODULES), None)
        if unknown is not None:
            raise ModelError(
                f"an adapter cannot change module {unknown!r}", hint=f"targets are {', '.join(MODULES)}"
            )
        if self.rank < 1 or not self.targets or not 0.0 <= self.dropout < 1.0:
            raise ModelError(
                f"rank {self.rank}, {len(self.targets)} targets, dropout {self.dropout} make no adapter",
                hint="rank is at least 1, dropout at least 0 and below 1, and one module is named",
            )

    @property
    def scale(self) -> float:
        """What the product ``A B`` is multiplied with: alpha / rank."""
        return self.alpha / self.rank


@dataclass(frozen=True)
class Adapter:
    """An adapter in memory. `base` and `fingerprint` say what it was trained on; '' where that is unknown."""

    config: LoraConfig
    tensors: dict[str, Array]
    base: str = ""
    fingerprint: str = ""

    def check(self, config: ModelConfig, *, fingerprint: str = "", name: str = "adapter") -> None:
        """Raise `ModelError` naming the first fact in which the adapter does not fit a model.

        With the model's `fingerprint`, an adapter trained on other weights of the same shape is refused too.
        """
        sizes = linears(config)
        for key, tensor in self.tensors.items():
            match = _NAME.fullmatch(key)
            if match is None or match[2] not in sizes:
                raise ModelError(
                    f"{name} was made for another base: it changes {key}, which {config.family} lacks"
                )
            if int(match[1]) >= config.layers:
                raise ModelError(
                    f"{name} was made for another base: it changes layer {match[1]}, "
                    f"this model has {config.layers} layers"
                )
            inputs, outputs = sizes[match[2]]
            side, size = ("inputs", inputs) if key.endswith("_a") else ("outputs", outputs)
            found = tensor.shape[0 if side == "inputs" else 1]
            if found != size:
                raise ModelError(
                    f"{name} was made for another base: its layers.{match[1]}.{match[2]} has {found} {side}, "
                    f"this model has {size}"
                )
        if fingerprint and self.fingerprint and fingerprint != self.fingerprint:
            raise ModelError(
                f"{name} was made for another base: it was trained on {self.base or 'a model'} "
                f"with fingerprint {self.fingerprint[:12]}, this model has {fingerprint[:12]}"
            )


def parse_targets(text: str) -> tuple[str, ...]:
    """``all``, or module names by their last part: ``q_proj,v_proj``.

    `ModelError` names one that is unknown.
    """
    if text == "all":
        return MODULES
    short = {module.rsplit(".", 1)[-1]: module for module in MODULES}
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = next((name for name in names if name not in short and name not in MODULES), None)
    if unknown is not None or not names:
        raise ModelError(
            f"{unknown or text!r} is no module to adapt", hint=f"use all, or some of {','.join(short)}"
        )
    chosen = {short.get(name, name) for name in names}
    return tuple(module for module in MODULES if module in chosen)


def initial(config: LoraConfig, model: ModelConfig, seed: int) -> dict[str, Array]:
    """The tensors of an untrained adapter: A uniform in +-1/sqrt(in), B zero, so that it changes nothing yet.

    The bound is that of ``kaiming_uniform_(a=sqrt(5))``, which PEFT uses. Each A is a pure function of
    (seed, layer, module): a Philox stream of its own, keyed through ``SeedSequence``.
    """
    import numpy as np

    sizes, tensors = linears(model), {}
    for layer in range(model.layers):
        for module in config.targets:
            inputs, outputs = sizes[module]
            source = np.random.SeedSequence([seed, layer, MODULES.index(module)])
            bits = np.random.Philox(source).random_raw(inputs * config.rank) >> np.uint64(40)
            bound = 1.0 / math.sqrt(inputs)
            values = (bits * np.float32(2**-24)).astype(np.float32).reshape(inputs, config.rank)  # in [0, 1)
            tensors[f"layers.{layer}.{module}.lora_a"] = (
                values * np.float32(2) - np.float32(1)
            ) * np.float32(bound)
            tensors[f"layers.{layer}.{module}.lora_b"] = np.zeros((config.rank, outputs), np.float32)
    return tensors


def targets_of(tensors: Mapping[str, Array]) -> tuple[str, ...]:
    """The modules that `tensors` change, in the order of `MODULES`."""
    found = {match[2] for key in tensors if (match := _NAME.fullmatch(key))}
    return tuple(module for module in MODULES if module in found)
