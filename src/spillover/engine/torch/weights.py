"""Base weights from safetensors: views of mapped files, converted straight to the dtype that computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from spillover.errors import ModelError

if TYPE_CHECKING:
    from spillover.models import ModelConfig, WeightIndex

_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}

# modules whose outputs share an input, so that one product computes them
FUSED: dict[str, tuple[str, ...]] = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "out": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}


@dataclass(frozen=True)
class LayerWeights:
    """One layer. Matrices are ``[outputs, inputs]``; the fused ones stack the outputs of `FUSED`."""

    input_norm: Tensor  # [H]
    post_norm: Tensor  # [H]
    q_norm: Tensor | None  # [D]
    k_norm: Tensor | None  # [D]
    matrices: dict[str, Tensor]
    biases: dict[str, Tensor | None]


class Weights:
    """Reads the tensors of one model in a compute dtype and onto a device."""

    def __init__(
        self, index: WeightIndex, config: ModelConfig, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.device = device
        self._index = index
        self._maps: dict[str, Tensor] = {}

    @cached_property
    def embedding(self) -> Tensor:
        """The embedding, ``[V, H]``; on the CPU a view of the file when dtypes agree."""
        return self._view("model.embed_tokens.weight").to(self.device, self.dtype)

    @property
    def head(self) -> Tensor:
        """The output matrix, ``[V, H]``: the embedding itself when the model ties them."""
        return self.embedding if self.config.tied else self._read("lm_head.weight")

    @property
    def norm(self) -> Tensor:
        """The final norm's weight, ``[H]``."""
        return self._read("model.norm.weight")

    def layer(self, number: int) -> LayerWeights:
        """Read layer `number`, its matrices fused."""
        prefix = f"model.layers.{number}."
        attention = f"{prefix}self_attn."
        biased = ("qkv",) if self.config.attention_bias else ()
        normed = self.config.qk_norm
        return LayerWeights(
            input_norm=self._read(f"{prefix}input_layernorm.weight"),
            post_norm=self._read(f"{prefix}post_attention_layernorm.weight"),
            q_norm=self._read(f"{attention}q_norm.weight") if normed else None,
            k_norm=self._read(f"{attention}k_norm.weight") if normed else None,
            matrices={name: self._stack(prefix, parts, "weight") for name, parts in FUSED.items()},
            biases={
                name: self._stack(prefix, parts, "bias") if name in biased else None
                for name, parts in FUSED.items()
            },
        )

    def _stack(self, prefix: str, parts: Sequence[str], kind: str) -> Tensor:
        views = [self._view(f"{prefix}{part}.{kind}") for part in parts]
        shape = (sum(view.shape[0] for view in views), *views[0].shape[1:])
        fused = torch.empty(shape, dtype=self.dtype, device=self.device)
        torch._foreach_copy_(list(torch.split(fused, [view.shape[0] for view in views])), views)
        return fused

    def _read(self, name: str) -> Tensor:
        return self._view(name).to(self.device, self.dtype, copy=True)

    def _view(self, name: str) -> Tensor:
        part = self._index.tensors.get(name)
        if part is None:
            raise ModelError(f"the model has no tensor {name}")
        if part.dtype not in _DTYPES:
            raise ModelError(f"tensor {name} has dtype {part.dtype}; bf16, f16 and f32 can be loaded")
        file = str(part.file)
        if file not in self._maps:
            # copy-on-write: torch refuses read-only buffers, and nothing here may write to the file
            self._maps[file] = torch.from_numpy(np.memmap(part.file, dtype=np.uint8, mode="c"))
        data = self._maps[file][part.start : part.stop]
        if data.storage_offset() % 4:
            data = data.clone()  # a view needs elements at multiples of their size
        return data.view(_DTYPES[part.dtype]).view(part.shape)
