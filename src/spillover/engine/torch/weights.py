"""Base weights from safetensors: views of mapped files, converted straight to the dtype that computes."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from spillover.errors import ModelError
from spillover.models.index import expert_names, head_name, linears, norm_names

if TYPE_CHECKING:
    from spillover.models import ModelConfig, WeightIndex

_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}

# modules whose outputs share an input, so that one product computes them; a model has them apart or fused
FUSED: dict[str, tuple[str, ...]] = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.qkv_proj"),
    "out": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj", "mlp.gate_up_proj"),
    "down": ("mlp.down_proj",),
}


@dataclass(frozen=True)
class ExpertWeights:
    """The feed-forward experts of one layer."""

    router: Tensor  # [E, H]
    gate_up: list[Tensor]  # E of [2 I, H], gate first
    down: list[Tensor]  # E of [H, I]


@dataclass(frozen=True)
class LayerWeights:
    """One layer. Matrices are ``[outputs, inputs]``; the fused ones stack the outputs of `FUSED`.

    `input_norm` comes before attention, `post_norm` before the feed-forward part; the output norms of some
    families normalise what either adds to the residual. Norms have the model's offset added, and are float32
    if there is one. A layer with experts has no ``gate_up`` and ``down``.
    """

    input_norm: Tensor  # [H]
    post_norm: Tensor  # [H]
    attention_output_norm: Tensor | None  # [H]
    feedforward_output_norm: Tensor | None  # [H]
    q_norm: Tensor | None  # [D]
    k_norm: Tensor | None  # [D]
    matrices: dict[str, Tensor]
    biases: dict[str, Tensor | None]
    experts: ExpertWeights | None


class Weights:
    """Reads the tensors of one model in a compute dtype and onto a device."""

    def __init__(
        self, index: WeightIndex, config: ModelConfig, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.device = device
        self._index = index
        self._maps: dict[str, mmap.mmap] = {}

    @cached_property
    def embedding(self) -> Tensor:
        """The embedding, ``[V, H]``; on the CPU a view of the file when dtypes agree."""
        return self._view(f"{self.config.prefix}embed_tokens.weight").to(self.device, self.dtype)

    @property
    def head(self) -> Tensor:
        """The output matrix, ``[V, H]``: the embedding itself when the model ties them."""
        return self.embedding if self.config.tied else self._read(head_name(self.config))

    @property
    def norm(self) -> Tensor:
        """The final norm's weight, ``[H]``."""
        return self._norm(f"{self.config.prefix}norm.weight")

    def layer(self, number: int, *, matrices: bool = True) -> LayerWeights:
        """Read layer `number`, its matrices fused; or its norms and biases alone."""
        read = self._layer(number, matrices)
        self._forget()
        return read

    def _layer(self, number: int, matrices: bool) -> LayerWeights:
        config, prefix = self.config, f"{self.config.prefix}layers.{number}."
        names = {role: f"{prefix}{name}.weight" for role, name in norm_names(config).items()}
        norms = {role: self._norm(name) for role, name in names.items()}
        modules = linears(config, number)
        parts = {name: [one for one in FUSED[name] if one in modules] for name in FUSED}
        heads = {name: f"{prefix}self_attn.{name}.weight" for name in ("q_norm", "k_norm")}
        return LayerWeights(
            input_norm=norms["attention_input"],
            post_norm=norms["feedforward_input"],
            attention_output_norm=norms.get("attention_output"),
            feedforward_output_norm=norms.get("feedforward_output"),
            q_norm=self._norm(heads["q_norm"]) if config.qk_norm else None,
            k_norm=self._norm(heads["k_norm"]) if config.qk_norm else None,
            matrices={
                name: self._stack([f"{prefix}{one}.weight" for one in group])
                for name, group in parts.items()
                if group and matrices
            },
            biases={
                name: self._stack([f"{prefix}{one}.bias" for one in group])
                if name == "qkv" and config.attention_bias
                else None
                for name, group in parts.items()
            },
            experts=self._experts(prefix, number) if matrices and config.sparse(number) else None,
        )

    def router(self, number: int) -> Tensor:
        """The router of a layer with experts, ``[E, H]``."""
        return self._read(f"{self.config.prefix}layers.{number}.{expert_names(self.config).router}.weight")

    def _experts(self, prefix: str, number: int) -> ExpertWeights:
        names, count = expert_names(self.config), self.config.experts.count if self.config.experts else 0
        return ExpertWeights(
            router=self.router(number),
            gate_up=[
                self._stack([f"{prefix}{names.of(one, part)}" for part in (names.gate, names.up)])
                for one in range(count)
            ],
            down=[self._read(f"{prefix}{names.of(one, names.down)}") for one in range(count)],
        )

    def _forget(self) -> None:
        """Let go of what the files' maps have brought into memory: it was copied, or is read again on use."""
        if hasattr(mmap, "MADV_DONTNEED"):
            for mapped in self._maps.values():
                mapped.madvise(mmap.MADV_DONTNEED)

    def _norm(self, name: str) -> Tensor:
        if not self.config.norm_offset:
            return self._read(name)
        # in float32: bf16 would round one plus a small weight to few steps
        return self._view(name).to(self.device, torch.float32) + self.config.norm_offset

    def _stack(self, names: Sequence[str]) -> Tensor:
        views = [self._view(name) for name in names]
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
            with part.file.open("rb") as opened:
                # copy-on-write: torch warns of read-only buffers, and nothing here may write to the file
                self._maps[file] = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
        data = torch.frombuffer(self._maps[file], dtype=torch.uint8)[part.start : part.stop]
        if data.storage_offset() % 4:
            data = data.clone()  # a view needs elements at multiples of their size
        return data.view(_DTYPES[part.dtype]).view(part.shape)
