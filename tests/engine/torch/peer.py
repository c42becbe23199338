"""The same adapter and the same training in PEFT and ``torch.optim.AdamW``."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
import transformers

from spillover.engine import MicroBatch
from spillover.models import LoraConfig


def micro_batch(rows: Sequence[Sequence[int]], starts: Sequence[int]) -> MicroBatch:
    """Right-padded rows; the loss covers each row from its start."""
    lengths = np.array([len(row) for row in rows])
    tokens = np.zeros((len(rows), lengths.max()), dtype=np.int64)
    mask = np.zeros(tokens.shape, dtype=np.bool_)
    for i, (row, start) in enumerate(zip(rows, starts, strict=True)):
        tokens[i, : len(row)] = row
        mask[i, start : len(row)] = True
    return MicroBatch(tokens, mask, lengths)


def adapted(theirs, config: LoraConfig, tensors) -> peft.PeftModel:
    """`theirs` with PEFT's LoRA layers holding `tensors`."""
    lora = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        target_modules=sorted({name.rpartition(".")[0] for name in tensors}),
        task_type="CAUSAL_LM",
    )
    # of a model that it knows to have experts, PEFT adapts those and not the dense layers between them
    theirs.config.model_type = "unknown"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PEFT asks transformers 5 by an old name
        model = peft.get_peft_model(theirs, lora)
    for name, leaf in leaves(model).items():
        leaf.data = torch.from_numpy(tensors[name].T.copy())
    return model


def leaves(model: peft.PeftModel) -> dict[str, torch.nn.Parameter]:
    """PEFT's trainable parameters, each the transpose of ours, by our names."""
    found = {}
    for name, leaf in model.named_parameters():
        if "lora_" in name:
            short = name.removeprefix("base_model.model.model.").replace(".default.weight", "")
            found[short.replace("lora_A", "lora_a").replace("lora_B", "lora_b")] = leaf
    return found


def step_loss(model: peft.PeftModel, batches: Sequence[MicroBatch]) -> torch.Tensor:
    """Mean over all targets of all micro-batches, from transformers' full logits."""
    total, count = torch.zeros(()), 0
    for batch in batches:
        ids = torch.from_numpy(batch.tokens)
        present = (torch.arange(ids.shape[1]) < torch.from_numpy(batch.lengths)[:, None]).long()
        logits = model(input_ids=ids, attention_mask=present).logits[:, :-1]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        wanted = torch.from_numpy(batch.mask)[:, 1:]
        total = total + torch.nn.functional.cross_entropy(logits[wanted], ids[:, 1:][wanted], reduction="sum")
        count += int(wanted.sum())
    return total / count


def tune(model: peft.PeftModel, steps: Sequence[Sequence[MicroBatch]], rates: Sequence[float]) -> list[float]:
    """Losses of a float32 tune."""
    trained = leaves(model)
    optimizer = torch.optim.AdamW(trained.values(), lr=0.0, weight_decay=0.01)
    losses = []
    for batches, rate in zip(steps, rates, strict=True):
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        loss = step_loss(model, batches)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained.values(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def peer_gradient(
    path: Path, config: LoraConfig, batch: MicroBatch, start: dict[str, np.ndarray], dtype: torch.dtype
) -> dict[str, np.ndarray]:
    """The gradient that PEFT computes in ``dtype``, by our names."""
    peer = peer_in(path, config, start, dtype)
    ids, mask = torch.from_numpy(batch.tokens), torch.from_numpy(batch.mask)[:, 1:]
    present = (torch.arange(ids.shape[1]) < torch.from_numpy(batch.lengths)[:, None]).long()
    logits = peer(input_ids=ids, attention_mask=present).logits[:, :-1]
    # the logits stay in `dtype`: rounding them would hide what is measured
    torch.nn.functional.cross_entropy(logits[mask], ids[:, 1:][mask]).backward()
    return {name: leaf.grad.T.numpy().astype(np.float64) for name, leaf in leaves(peer).items()}


def peer_in(path: Path, config: LoraConfig, start: dict[str, np.ndarray], dtype: torch.dtype) -> Any:
    """PEFT's model in ``dtype``, its adapter at ``start``."""
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    if dtype == torch.float64:
        for module in theirs.modules():
            if type(module).__name__.endswith("RMSNorm"):
                module.forward = partial(_norm, module)
    return adapted(theirs.requires_grad_(False).eval(), config, start).to(dtype)


def _norm(module: Any, x: torch.Tensor) -> torch.Tensor:
    """The norm in the dtype of its input: transformers rounds to float32 there."""
    return module.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + module.variance_epsilon)
