"""Low-rank adapters in memory: configuration, initial values, the check against a base.

LoRA (Hu et al. 2021, https://arxiv.org/abs/2106.09685): a linear layer ``y = x W^T`` becomes
``y + scale (x A) B``. Here A is [in, r] and B is [r, out], float32, under the engine-neutral names
``layers.<k>.<module>.lora_a`` and ``.lora_b``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
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
"""The linear layers of a block that an adapter may change, where each has a matrix of its own."""

FUSED_MODULES = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}
"""What some families have in place of several of `MODULES`; an adapter changes them as one."""

ADAPTABLE = (*MODULES, *FUSED_MODULES)

_NAME = re.compile(r"layers\.(\d+)\.([\w.]+)\.lora_[ab]")


@dataclass(frozen=True)
class LoraConfig:
    """What is adapted and how strongly. `dropout` acts on the adapter's input while training."""

    rank: int = 16
    alpha: float = 32.0
    targets: tuple[str, ...] = MODULES
    dropout: float = 0.0

    def __post_init__(self) -> None:
        unknown = next((name for name in self.targets if name not in ADAPTABLE), None)
        if unknown is not None:
            raise ModelError(
                f"an adapter cannot change module {unknown!r}", hint=f"targets are {', '.join(ADAPTABLE)}"
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

    def on(self, model: ModelConfig) -> LoraConfig:
        """The same on `model`, by its own names: one that fuses queries, keys and values adapts them as one.

        `ModelError` for a target that it has in no layer, such as those that only experts have.
        """
        present = {module for layer in range(model.layers) for module in linears(model, layer)}
        targets = set(self.targets)
        for whole, parts in FUSED_MODULES.items():
            if whole in present and targets.issuperset(parts):
                targets = targets.difference(parts) | {whole}
        if targets == set(self.targets) <= present:
            return self
        for name in ADAPTABLE:
            if name in targets and name not in present:
                raise _missing(model, name, present)
        return replace(self, targets=tuple(name for name in ADAPTABLE if name in targets))

    def sites(self, model: ModelConfig) -> Iterator[tuple[int, str, int, int]]:
        """(layer, module, inputs, outputs) of everything that an adapter of `model` changes."""
        for layer in range(model.layers):
            sizes = linears(model, layer)
            yield from ((layer, module, *sizes[module]) for module in self.targets if module in sizes)


def _missing(model: ModelConfig, name: str, present: Collection[str]) -> ModelError:
    whole = next((whole for whole, parts in FUSED_MODULES.items() if name in parts), None)
    if whole in present:
        why = f"{name} only as a part of {whole}"
    elif model.experts is not None:
        why = f"no {name} outside its experts, which an adapter cannot change"
    else:
        why = f"no {name}"
    usable = ",".join(module.rpartition(".")[2] for module in ADAPTABLE if module in present)
    return ModelError(f"{model.architecture} has {why}", hint=f"use --targets {usable}")


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
        for key, tensor in self.tensors.items():
            match = _NAME.fullmatch(key)
            if match and int(match[1]) >= config.layers:
                raise ModelError(
                    f"{name} was made for another base: it changes layer {match[1]}, "
                    f"this model has {config.layers} layers"
                )
            sizes = linears(config, int(match[1])) if match else {}
            if match is None or match[2] not in sizes:
                raise ModelError(
                    f"{name} was made for another base: it changes {key}, which {config.family} lacks"
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
    short = {module.rsplit(".", 1)[-1]: module for module in ADAPTABLE}
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = next((name for name in names if name not in short and name not in ADAPTABLE), None)
    if unknown is not None or not names:
        raise ModelError(
            f"{unknown or text!r} is no module to adapt", hint=f"use all, or some of {','.join(short)}"
        )
    chosen = {short.get(name, name) for name in names}
    return tuple(module for module in ADAPTABLE if module in chosen)


def initial(config: LoraConfig, model: ModelConfig, seed: int) -> dict[str, Array]:
    """The tensors of an untrained adapter: A uniform in +-1/sqrt(in), B zero, so that it changes nothing yet.

    The bound is that of ``kaiming_uniform_(a=sqrt(5))``, which PEFT uses. Each A is a pure function of
    (seed, layer, module): a Philox stream of its own, keyed through ``SeedSequence``.
    """
    import numpy as np

    tensors = {}
    for layer, module, inputs, outputs in config.on(model).sites(model):
        source = np.random.SeedSequence([seed, layer, ADAPTABLE.index(module)])
        bits = np.random.Philox(source).random_raw(inputs * config.rank) >> np.uint64(40)
        bound = 1.0 / math.sqrt(inputs)
        values = (bits * np.float32(2**-24)).astype(np.float32).reshape(inputs, config.rank)  # in [0, 1)
        tensors[f"layers.{layer}.{module}.lora_a"] = (values * np.float32(2) - np.float32(1)) * np.float32(
            bound
        )
        tensors[f"layers.{layer}.{module}.lora_b"] = np.zeros((config.rank, outputs), np.float32)
    return tensors


def targets_of(tensors: Mapping[str, Array]) -> tuple[str, ...]:
    """The modules that `tensors` change, in the order of `ADAPTABLE`."""
    found = {match[2] for key in tensors if (match := _NAME.fullmatch(key))}
    return tuple(module for module in ADAPTABLE if module in found)
