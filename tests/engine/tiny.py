"""Tiny random models of every family, saved as transformers saves them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from spillover.engine import Completion, Request, Sampling, Scheduler, Work, engine
from spillover.models import MODULES, Model, ModelConfig, parse

SIZES = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
WINDOW = 24
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
GEMMA = {"tie_word_embeddings": True, "head_dim": 32, "query_pre_attn_scalar": 20, "sliding_window": WINDOW}
EXPERTS = {"tie_word_embeddings": False, "num_experts_per_tok": 2}
ATTENTION = MODULES[:4]


def longrope(pairs: int) -> dict[str, Any]:
    """LongRoPE over an original context of 64 tokens."""
    source = np.random.default_rng(3)
    return {
        "original_max_position_embeddings": 64,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": source.uniform(1.0, 1.5, pairs).tolist(),
            "long_factor": source.uniform(2.0, 8.0, pairs).tolist(),
        },
    }


@dataclass(frozen=True)
class Case:
    """One variation of a family: how transformers makes it, and with what it is verified.

    `lengths` are those of prompts, in tokens, and `sequence` is the context that is planned for. `targets`
    are the modules of the adapter that is trained; empty where another case trains the same decoder.
    `kernels` is what generates and scores, or empty for what is planned.
    """

    family: str
    kind: str
    extra: dict[str, Any]
    exercised: str
    sequence: int = 256
    lengths: tuple[int, ...] = (5, 40, 40, 9, 130, 1)
    targets: tuple[str, ...] = MODULES
    kernels: str = ""

    @property
    def architecture(self) -> str:
        return self.kind if self.kind.startswith("Gemma3For") else f"{self.kind}ForCausalLM"


LONG = {"sequence": 256, "lengths": (66, 90, 90, 70, 130, 65)}
FAMILIES = {
    "llama": Case("Llama, SmolLM", "Llama", {"tie_word_embeddings": True}, "tied head, grouped queries"),
    "llama-untied": Case(
        "Llama, SmolLM",
        "Llama",
        {"tie_word_embeddings": False, "num_key_value_heads": 4},
        "untied head, a key head per query head",
    ),
    "llama3": Case(
        "Llama, SmolLM",
        "Llama",
        {"tie_word_embeddings": True, "rope_parameters": LLAMA3},
        "`llama3` positions beyond the original context",
    ),
    "mistral": Case(
        "Mistral",
        "Mistral",
        {"tie_word_embeddings": False, "sliding_window": WINDOW, "head_dim": 32},
        "sliding window, heads wider than the model",
    ),
    "qwen2": Case("Qwen2, Qwen2.5", "Qwen2", {"tie_word_embeddings": True}, "biases"),
    "qwen2-mixed": Case(
        "Qwen2, Qwen2.5",
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
        "sliding windows from `max_window_layers` on",
    ),
    "qwen2-yarn": Case(
        "Qwen2, Qwen2.5",
        "Qwen2",
        {"rope_parameters": {"rope_theta": 1e6, **YARN}},
        "`yarn` positions beyond the original context",
    ),
    "qwen3": Case(
        "Qwen3", "Qwen3", {"tie_word_embeddings": False, "head_dim": 32}, "norms of queries and keys"
    ),
    "qwen3-mixed": Case(
        "Qwen3",
        "Qwen3",
        {
            "tie_word_embeddings": True,
            "head_dim": 16,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        "sliding windows by `layer_types`",
    ),
    "phi3": Case(
        "Phi-3, Phi-4-mini", "Phi3", {"sliding_window": WINDOW}, "fused projections, sliding window"
    ),
    "phi3-short": Case(
        "Phi-3, Phi-4-mini",
        "Phi3",
        longrope(8),
        "`longrope` within the original context",
        sequence=64,
        lengths=(5, 40, 40, 9, 43, 1),
    ),
    "phi3-long": Case(
        "Phi-3, Phi-4-mini", "Phi3", longrope(8), "`longrope` beyond the original context", **LONG
    ),
    "phi4": Case(
        "Phi-3, Phi-4-mini",
        "Phi3",
        {"tie_word_embeddings": True, "partial_rotary_factor": 0.75, **longrope(6)},
        "partly rotated heads",
        **LONG,
    ),
    "gemma2": Case(
        "Gemma 2",
        "Gemma2",
        {**GEMMA, "num_hidden_layers": 4, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0},
        "soft-caps that bind, alternating sliding windows, output norms",
    ),
    "gemma3": Case(
        "Gemma 3",
        "Gemma3",
        {
            **GEMMA,
            "num_hidden_layers": 4,
            "sliding_window_pattern": 2,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
        "alternating sliding windows with other positions, `linear` positions, norms of queries and keys",
    ),
    "gemma3-multimodal": Case(
        "Gemma 3",
        "Gemma3ForConditionalGeneration",
        {**GEMMA, "sliding_window_pattern": 2},
        "the language model of a multimodal file",
        targets=(),
    ),
    "mixtral": Case(
        "Mixtral",
        "Mixtral",
        {**EXPERTS, "num_local_experts": 4, "sliding_window": WINDOW},
        "2 of 4 experts, sliding window",
        targets=ATTENTION,
    ),
    "qwen3-moe": Case(
        "Qwen3-MoE",
        "Qwen3Moe",
        {**EXPERTS, "num_experts": 6, "moe_intermediate_size": 48, "head_dim": 32, "mlp_only_layers": [0],
         "norm_topk_prob": True},
        "2 of 6 experts, `norm_topk_prob`, a dense layer by `mlp_only_layers`",
    ),
    "qwen3-moe-sparse-step": Case(
        "Qwen3-MoE",
        "Qwen3Moe",
        {**EXPERTS, "num_experts": 4, "moe_intermediate_size": 48, "head_dim": 16, "decoder_sparse_step": 2,
         "norm_topk_prob": False, "use_sliding_window": True, "sliding_window": WINDOW},
        "dense layers by `decoder_sparse_step`, sliding window",
        targets=ATTENTION,
    ),
}  # fmt: skip


def build(folder: Path, name: str) -> tuple[Model, transformers.PreTrainedModel]:
    """A random float32 model of the case `name` in `folder`, ours and transformers' (eager attention)."""
    case = FAMILIES[name]
    config = _config(case)
    config._attn_implementation = "eager"
    torch.manual_seed(11)
    theirs = getattr(transformers, case.architecture)(config).eval()
    for key, value in theirs.named_parameters():
        if "norm" in key or key.endswith("bias"):
            centre = float("norm" in key and not case.kind.startswith("Gemma"))
            torch.nn.init.normal_(value, mean=centre, std=0.3)
    theirs.requires_grad_(False)
    theirs.save_pretrained(folder)
    theirs.generation_config.eos_token_id = None  # tests compare answers of one length
    return ours(folder), theirs


def _config(case: Case) -> transformers.PretrainedConfig:
    settings = {**SIZES, **case.extra}
    if not case.kind.startswith("Gemma3"):
        return getattr(transformers, f"{case.kind}Config")(**settings)
    text = transformers.Gemma3TextConfig(**settings)
    if case.kind == "Gemma3":
        return text
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    return transformers.Gemma3Config(
        text_config=text, vision_config={**vision, "image_size": 28, "patch_size": 14}, mm_tokens_per_image=1
    )


def ours(folder: Path) -> Model:
    """The model in `folder`, without its tokenizer."""
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    return Model(parse(str(folder)), folder, ModelConfig.read(folder), "tiny", size)


def loaded(
    model: Model, *, batch: int = 4, sequence: int = 256, adapters=(), numerics="float32", kernels: str = ""
):
    """`model` ready to generate on the CPU, by `kernels` or the planned ones."""
    torch_engine = engine("torch")
    plan = torch_engine.plan(model, Work("generate", batch, sequence, numerics=numerics, device="cpu"))
    return torch_engine.load(model, replace(plan, kernels=kernels or plan.kernels), adapters)


def ready(case: Case, model: Model, **more):
    """`loaded` as `case` says."""
    return loaded(model, sequence=case.sequence, kernels=case.kernels, **more)


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    """Random token ids without the stop id."""
    return tuple(int(x) for x in np.random.default_rng(seed).integers(1, SIZES["vocab_size"], length))


def request(name: str, tokens: tuple[int, ...], count: int = 20, **more) -> Request:
    """A greedy request without stop ids unless `more` says otherwise."""
    return Request(**{
        "id": name,
        "tokens": tokens,
        "max_tokens": count,
        "sampling": Sampling(),
        "stop_ids": frozenset(),
        "logprobs": -1,
        **more,
    })  # fmt: skip


def answers(model, requests, **more) -> dict[str, Completion]:
    """Run everything and index it by id."""
    return {done.id: done for done in Scheduler(model, **more).run(iter(requests))}
