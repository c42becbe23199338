"""One LoRA step on the demo model against PEFT on transformers with ``torch.optim.AdamW``: the same batch.

Rank 16 on all seven linear layers, a micro-batch of 4 sequences of about 128 tokens, loss on the last half of
each.

    python benchmarks/tune_step.py [--quick] [--json FILE]
"""

from __future__ import annotations

import time
import warnings

import numpy as np
import torch
from report import Report, alternate, arguments

from spillover.engine import MicroBatch, Optimizer, Work, engine
from spillover.models import LoraConfig, Model, initial, resolve

BATCH, LENGTH = 4, 128


def micro_batch(vocabulary: int) -> MicroBatch:
    """Random tokens: the time of a step does not depend on which they are."""
    source = np.random.default_rng(0)
    tokens = source.integers(0, vocabulary, (BATCH, LENGTH))
    mask = np.zeros((BATCH, LENGTH), dtype=np.bool_)
    mask[:, LENGTH // 2 :] = True
    return MicroBatch(tokens, mask, np.array([LENGTH, LENGTH - 3, LENGTH - 6, LENGTH - 9]))


def ours(model: Model, batch: MicroBatch, numerics: str):
    """A function that makes one step and returns its seconds."""
    config, torch_engine = LoraConfig(), engine("torch")
    plan = torch_engine.plan(model, Work("train", BATCH, LENGTH, config, numerics=numerics, device="cpu"))
    trainer = torch_engine.load(model, plan).trainer(config, initial(config, model.config, 0), Optimizer())

    def run() -> float:
        start = time.perf_counter()
        trainer.step([batch], lr=1e-4)
        return time.perf_counter() - start

    return run


def peer(model: Model, batch: MicroBatch, dtype: torch.dtype):
    """The same step as a PEFT user writes it."""
    import peft
    import transformers

    transformers.logging.set_verbosity_error()
    base = transformers.AutoModelForCausalLM.from_pretrained(model.path, dtype=dtype)
    lora = peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    theirs = peft.get_peft_model(base, lora).train()
    leaves = [value for value in theirs.parameters() if value.requires_grad]
    optimizer = torch.optim.AdamW(leaves, lr=1e-4, weight_decay=0.01)
    ids = torch.from_numpy(batch.tokens)
    present = torch.arange(LENGTH) < torch.from_numpy(batch.lengths)[:, None]
    labels = torch.where(torch.from_numpy(batch.mask) & present, ids, -100)

    def run() -> float:
        start = time.perf_counter()
        theirs(input_ids=ids, attention_mask=present.long(), labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(leaves, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - start

    return run


def main() -> None:
    warnings.simplefilter("ignore")
    args = arguments(__doc__)
    model, report = resolve("demo"), Report()
    batch = micro_batch(model.config.vocab_size)
    for numerics, dtype in (("bf16", torch.bfloat16), ("float32", torch.float32)):
        mine, other = ours(model, batch, numerics), peer(model, batch, dtype)
        mine(), other()
        result = alternate(mine, other, 2 if args.quick else 9)
        report.add(f"LoRA step, {numerics}", *result, "s", higher_is_better=False)
    report.save(args.json)


if __name__ == "__main__":
    main()
