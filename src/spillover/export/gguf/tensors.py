"""Where each tensor of a model goes in a GGUF file, and back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spillover.models.index import expert_names, head_name, layer_tensors, norm_names

if TYPE_CHECKING:
    from spillover.export.gguf.architecture import Architecture
    from spillover.export.rounding import Floats
    from spillover.models import ModelConfig

__all__ = ["Target", "interleaved", "separated", "targets"]

_MODULES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_NORMS = {
    "attention_input": "attn_norm",
    "attention_output": "post_attention_norm",
    "feedforward_input": "ffn_norm",
    "feedforward_output": "post_ffw_norm",
}
_ROTATED = ("self_attn.q_proj", "self_attn.k_proj")


@dataclass(frozen=True)
class Target:
    """One tensor of a GGUF file.

    `sources` are the model's tensors that it is made of, stacked where there are several; `shape` is that of
    the whole, as numpy says it. `head` is the number of rows whose order changes together, 0 where none does;
    `offset` is added. `exact` tensors stay float32: vectors, and the routers of experts.
    """

    name: str
    sources: tuple[str, ...]
    shape: tuple[int, ...]
    head: int = 0
    offset: float = 0.0
    exact: bool = False


def targets(config: ModelConfig, found: Architecture) -> Iterator[Target]:
    """The tensors of the file, in the order in which they are used; a tied head is left out."""
    hidden, prefix = config.hidden_size, config.prefix
    yield Target("token_embd.weight", (f"{prefix}embed_tokens.weight",), (config.vocab_size, hidden))
    for layer in range(config.layers):
        yield from _layer(config, found, layer)
    norm = (f"{prefix}norm.weight",)
    yield Target("output_norm.weight", norm, (hidden,), offset=config.norm_offset, exact=True)
    if not config.tied:
        yield Target("output.weight", (head_name(config),), (config.vocab_size, hidden))


def interleaved(rows: Floats, head: int) -> Floats:
    """Rows of whole heads of `head` rows each, as llama.cpp rotates them: neighbouring pairs, not halves."""
    return rows.reshape(-1, 2, head // 2, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)


def separated(rows: Floats, head: int) -> Floats:
    """What `interleaved` was given."""
    return rows.reshape(-1, head // 2, 2, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)


def _layer(config: ModelConfig, found: Architecture, layer: int) -> Iterator[Target]:
    start = f"{config.prefix}layers.{layer}."
    norms = {name: _NORMS[what] for what, name in norm_names(config).items()}
    shapes = layer_tensors(config, layer)
    for name, shape in shapes.items():
        module, _, kind = name.rpartition(".")
        mine = norms.get(module) or _MODULES.get(module)
        if mine is None:  # experts follow together
            continue
        is_norm = module in norms or module.endswith("_norm")
        yield Target(
            f"blk.{layer}.{mine}.{kind}",
            (start + name,),
            shape,
            head=config.head_dim if found.interleaved and module in _ROTATED else 0,
            offset=config.norm_offset if is_norm else 0.0,
            exact=len(shape) == 1,
        )
    if config.experts is not None and config.sparse(layer):
        yield from _experts(config, layer, start, shapes)


def _experts(
    config: ModelConfig, layer: int, start: str, shapes: dict[str, tuple[int, ...]]
) -> Iterator[Target]:
    names, experts = expert_names(config), config.experts
    assert experts is not None
    router = f"{names.router}.weight"
    yield Target(f"blk.{layer}.ffn_gate_inp.weight", (start + router,), shapes[router], exact=True)
    for module, kind in ((names.gate, "gate"), (names.up, "up"), (names.down, "down")):
        sources = [names.of(expert, module) for expert in range(experts.count)]
        shape = (experts.count, *shapes[sources[0]])
        yield Target(f"blk.{layer}.ffn_{kind}_exps.weight", tuple(start + name for name in sources), shape)
