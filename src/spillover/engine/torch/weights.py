"""Base weights from safetensors: views of mapped files, converted straight to the dtype that computes."""

from __future__ import annotations

import itertools
import mmap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from spillover.engine.ring import Layer as Held
from spillover.engine.ring import RawTensor
from spillover.engine.torch.rows import Rows, typed
from spillover.errors import ModelError
from spillover.models.index import expert_names, head_name, linears, norm_names

if TYPE_CHECKING:
    from spillover.models import ModelConfig, TensorSlice, WeightIndex

_Source: TypeAlias = Callable[[str], Tensor]  # a tensor by its full name
Room: TypeAlias = Callable[[str, Sequence[int]], Tensor]  # memory for a matrix of this name and shape

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

    def small(self) -> list[Tensor]:
        """All that is no matrix of a product."""
        norms = (self.input_norm, self.post_norm, self.attention_output_norm, self.feedforward_output_norm)
        router = self.experts.router if self.experts is not None else None
        every = (*norms, self.q_norm, self.k_norm, *self.biases.values(), router)
        return [one for one in every if one is not None]


class Weights:
    """Reads the tensors of one model in a compute dtype and onto a device."""

    def __init__(
        self, index: WeightIndex, config: ModelConfig, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.device = device
        self.index = index
        self._maps: dict[str, mmap.mmap] = {}

    @cached_property
    def embedding(self) -> Tensor:
        """The embedding, ``[V, H]``; on the CPU a view of the file when dtypes agree."""
        return self._view(f"{self.config.prefix}embed_tokens.weight").to(self.device, self.dtype)

    def embed(self, tokens: Tensor) -> Tensor:
        """Rows of the embedding, ``[N, H]``."""
        return torch.nn.functional.embedding(tokens, self.embedding)

    def embed_from_file(self, tokens: Tensor) -> Tensor:
        """The same, but nothing of the embedding stays in the process's memory."""
        return self._rows(tokens.cpu().numpy()).to(self.device, self.dtype)

    @cached_property
    def _rows(self) -> Rows:
        name = f"{self.config.prefix}embed_tokens.weight"
        return Rows(self._part(name), name)

    @property
    def head_in_file(self) -> Tensor:
        """`head` as the file has it, a view."""
        return self._view(self._head_name)

    def open_rows(self) -> None:
        """Open the embedding's file, which `embed_from_file` reads from; `ModelError` if that cannot be."""
        self._rows  # noqa: B018

    def copied_head(self) -> Tensor:
        """`head` in memory of its own."""
        copied = self._read(self._head_name, self._view)
        self.forget()
        return copied

    @property
    def _head_name(self) -> str:
        return f"{self.config.prefix}embed_tokens.weight" if self.config.tied else head_name(self.config)

    @property
    def head(self) -> Tensor:
        """The output matrix, ``[V, H]``: the embedding itself when the model ties them."""
        return self.embedding if self.config.tied else self._read(head_name(self.config), self._view)

    @property
    def norm(self) -> Tensor:
        """The final norm's weight, ``[H]``."""
        return self._norm(f"{self.config.prefix}norm.weight", self._view)

    def layer(self, number: int, *, matrices: bool = True) -> LayerWeights:
        """Read layer `number` from the files, its matrices fused; or its norms and biases alone."""
        experts = itertools.repeat(self._view, self._expert_count(number))
        read = self._layer(number, matrices, self._view, experts, self._new)
        self.forget()
        return read

    def streamed(self, held: Held, room: Room, settle: Callable[[], None]) -> LayerWeights:
        """The layer that a ring holds, copied out of its buffer; matrices into what `room` gives for them.

        Experts come through few buffers: `settle` waits until all was copied that was asked for.
        """
        number = held.number

        def experts() -> Iterator[_Source]:
            for _, tensors in held.experts(range(self._expert_count(number))):
                yield self._held(number, tensors)
                settle()

        return self._layer(number, True, self._held(number, held.tensors), experts(), room)

    def _layer(
        self, number: int, matrices: bool, view: _Source, experts: Iterable[_Source], room: Room
    ) -> LayerWeights:
        config, prefix = self.config, f"{self.config.prefix}layers.{number}."
        routed = matrices and config.sparse(number)
        names = {role: f"{prefix}{name}.weight" for role, name in norm_names(config).items()}
        norms = {role: self._norm(name, view) for role, name in names.items()}
        modules = linears(config, number)
        parts = {name: [one for one in FUSED[name] if one in modules] for name in FUSED}
        heads = {name: f"{prefix}self_attn.{name}.weight" for name in ("q_norm", "k_norm")}
        return LayerWeights(
            input_norm=norms["attention_input"],
            post_norm=norms["feedforward_input"],
            attention_output_norm=norms.get("attention_output"),
            feedforward_output_norm=norms.get("feedforward_output"),
            q_norm=self._norm(heads["q_norm"], view) if config.qk_norm else None,
            k_norm=self._norm(heads["k_norm"], view) if config.qk_norm else None,
            matrices={
                name: self._stack([f"{prefix}{one}.weight" for one in group], view, name, room)
                for name, group in parts.items()
                if group and matrices
            },
            biases={
                name: self._stack([f"{prefix}{one}.bias" for one in group], view, name, self._new)
                if name == "qkv" and config.attention_bias
                else None
                for name, group in parts.items()
            },
            experts=self._experts(number, view, experts, room) if routed else None,
        )

    def router(self, number: int) -> Tensor:
        """The router of a layer with experts, ``[E, H]``."""
        return self._router(number, self._view)

    def _router(self, number: int, view: _Source) -> Tensor:
        return self._read(
            f"{self.config.prefix}layers.{number}.{expert_names(self.config).router}.weight", view
        )

    def _experts(self, number: int, view: _Source, experts: Iterable[_Source], room: Room) -> ExpertWeights:
        names, prefix = expert_names(self.config), f"{self.config.prefix}layers.{number}."
        read = ExpertWeights(self._router(number, view), [], [])
        for one, own in enumerate(experts):
            pair = [f"{prefix}{names.of(one, part)}" for part in (names.gate, names.up)]
            read.gate_up.append(self._stack(pair, own, f"gate_up {one}", room))
            down = f"{prefix}{names.of(one, names.down)}"
            read.down.append(self._stack([down], own, f"down {one}", room))
        return read

    def _expert_count(self, number: int) -> int:
        experts = self.config.experts
        return experts.count if experts is not None and self.config.sparse(number) else 0

    def _held(self, number: int, tensors: Mapping[str, RawTensor]) -> _Source:
        """Views of what a ring holds of layer `number`."""
        prefix = f"{self.config.prefix}layers.{number}."

        def view(name: str) -> Tensor:
            raw = tensors[name.removeprefix(prefix)]
            return typed(torch.from_numpy(raw.data), name, raw.dtype, raw.shape)

        return view

    def forget(self) -> None:
        """Let go of what the files' maps have brought into memory: it was copied, or is read again on use."""
        if hasattr(mmap, "MADV_DONTNEED"):
            for mapped in self._maps.values():
                mapped.madvise(mmap.MADV_DONTNEED)

    def _norm(self, name: str, view: _Source) -> Tensor:
        if not self.config.norm_offset:
            return self._read(name, view)
        # in float32: bf16 would round one plus a small weight to few steps
        return view(name).to(self.device, torch.float32) + self.config.norm_offset

    def _new(self, name: str, shape: Sequence[int]) -> Tensor:
        return torch.empty(*shape, dtype=self.dtype, device=self.device)

    def _stack(self, names: Sequence[str], view: _Source, name: str, room: Room) -> Tensor:
        views = [view(one) for one in names]
        fused = room(name, (sum(one.shape[0] for one in views), *views[0].shape[1:]))
        parts = list(torch.split(fused, [one.shape[0] for one in views]))
        torch._foreach_copy_(parts, views, non_blocking=True)  # to a GPU, on the stream of the moment
        return fused

    def _read(self, name: str, view: _Source) -> Tensor:
        return view(name).to(self.device, self.dtype, copy=True)

    def _view(self, name: str) -> Tensor:
        part = self._part(name)
        file = str(part.file)
        if file not in self._maps:
            with part.file.open("rb") as opened:
                # copy-on-write: torch warns of read-only buffers, and nothing here may write to the file
                self._maps[file] = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
        data = torch.frombuffer(self._maps[file], dtype=torch.uint8)[part.start : part.stop]
        return typed(data, name, part.dtype, part.shape)

    def _part(self, name: str) -> TensorSlice:
        part = self.index.tensors.get(name)
        if part is None:
            raise ModelError(f"the model has no tensor {name}")
        return part
