"""One side of `tune_step.py`, in a process of its own: ours, or PEFT on transformers.

    tune_side.py ours|peft  NUMERICS

It answers one JSON request a line.
"""

from __future__ import annotations

import json
import re
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import torch

from spillover.engine import MicroBatch, Optimizer, Work, engine
from spillover.models import LoraConfig, Model, initial, resolve

BATCH, LENGTH = 4, 128
DTYPES = {"bf16": torch.bfloat16, "float32": torch.float32}


def micro_batch(vocabulary: int) -> MicroBatch:
    """Random tokens: the time of a step does not depend on which they are."""
    source = np.random.default_rng(0)
    tokens = source.integers(0, vocabulary, (BATCH, LENGTH))
    mask = np.zeros((BATCH, LENGTH), dtype=np.bool_)
    mask[:, LENGTH // 2 :] = True
    return MicroBatch(tokens, mask, np.array([LENGTH, LENGTH - 3, LENGTH - 6, LENGTH - 9]))


def ours(model: Model, batch: MicroBatch, numerics: str):
    """A function that makes one step and returns its loss."""
    config, torch_engine = LoraConfig(), engine("torch")
    plan = torch_engine.plan(model, Work("train", BATCH, LENGTH, config, numerics=numerics, device="cpu"))
    trainer = torch_engine.load(model, plan).trainer(config, initial(config, model.config, 0), Optimizer())
    return lambda: trainer.step([batch], lr=1e-4).loss


def peft(model: Model, batch: MicroBatch, numerics: str):
    """The same step as a PEFT user writes it."""
    import peft
    import transformers

    transformers.logging.set_verbosity_error()
    base = transformers.AutoModelForCausalLM.from_pretrained(model.path, dtype=DTYPES[numerics])
    lora = peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    theirs = peft.get_peft_model(base, lora).train()
    leaves = [value for value in theirs.parameters() if value.requires_grad]
    optimizer = torch.optim.AdamW(leaves, lr=1e-4, weight_decay=0.01)
    ids = torch.from_numpy(batch.tokens)
    present = torch.arange(LENGTH) < torch.from_numpy(batch.lengths)[:, None]
    labels = torch.where(torch.from_numpy(batch.mask) & present, ids, -100)

    def step() -> float:
        loss = theirs(input_ids=ids, attention_mask=present.long(), labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(leaves, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


class Calls:
    """What the benchmark may ask."""

    def __init__(self, side: str, numerics: str) -> None:
        model = resolve("demo")
        build = {"ours": ours, "peft": peft}[side]
        self._step = build(model, micro_batch(model.config.vocab_size), numerics)

    def step(self) -> list[float]:
        """Seconds and loss of one step."""
        start = time.perf_counter()
        loss = self._step()
        return [time.perf_counter() - start, loss]

    def peak_mb(self) -> float:
        """The most memory this process has had resident, in MB."""
        status = Path("/proc/self/status").read_text()
        found = re.search(r"VmHWM:\s+(\d+) kB", status)
        if found is None:
            raise OSError("/proc/self/status has no VmHWM")
        return int(found[1]) * 1024 / 1e6


def main() -> None:
    warnings.simplefilter("ignore")
    calls = Calls(*sys.argv[1:])
    for line in sys.stdin:
        request = json.loads(line)
        call = getattr(calls, request.pop("call"))
        print(json.dumps({"value": call(**request)}), flush=True)


if __name__ == "__main__":
    main()
