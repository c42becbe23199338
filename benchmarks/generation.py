"""Generation on the demo model against ``transformers.generate``: same prompts, batch and token count.

The peer runs in bf16 and in float32 and the faster of the two counts. Everything runs in one process on the
same threads; ours and the peer's runs alternate, and medians are compared.

    python benchmarks/generation.py [--quick] [--json FILE]
"""

from __future__ import annotations

import time
import warnings

import torch
from report import Report, alternate, arguments

from spillover.engine import Request, Sampling, Scheduler, Work, engine
from spillover.models import Model, resolve

QUESTIONS = (
    "Explain why the sky is blue.",
    "Write a short poem about rain on a tin roof.",
    "How do I cook rice without a rice cooker?",
    "List three uses of a paper clip and say which is the best.",
)


def prompts(model: Model, count: int) -> list[list[int]]:
    """`count` chat prompts of a few lengths."""
    tokenizer = model.tokenizer()
    asked = (f"{QUESTIONS[i % len(QUESTIONS)]} ({i})" for i in range(count))
    return [tokenizer.prompt_ids([{"role": "user", "content": question}]) for question in asked]


def ours(model: Model, batch: list[list[int]], tokens: int):
    """A function that generates and returns tokens per second."""
    torch_engine = engine("torch")
    plan = torch_engine.plan(model, Work("generate", len(batch), max(map(len, batch)) + tokens, device="cpu"))
    loaded = torch_engine.load(model, plan)
    requests = [
        Request(str(i), tuple(prompt), tokens, Sampling(), frozenset(), logprobs=-1)
        for i, prompt in enumerate(batch)
    ]

    def run() -> float:
        scheduler = Scheduler(loaded)
        start = time.perf_counter()
        made = sum(len(done.tokens) for done in scheduler.run(requests))
        return made / (time.perf_counter() - start)

    return run


def peer(model: Model, batch: list[list[int]], tokens: int, dtype: torch.dtype):
    """The same for transformers, left-padded as its documentation says."""
    import transformers

    transformers.logging.set_verbosity_error()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(model.path, dtype=dtype).eval()
    longest = max(map(len, batch))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in batch])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in batch])

    def run() -> float:
        start = time.perf_counter()
        out = theirs.generate(
            ids,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            pad_token_id=0,
        )
        return out[:, longest:].numel() / (time.perf_counter() - start)

    return run


def main() -> None:
    warnings.simplefilter("ignore")
    args = arguments(__doc__)
    model, report = resolve("demo"), Report()
    rounds, tokens = (1, 16) if args.quick else (5, 64)
    for count in (1, 16) if args.quick else (1, 16, 64):
        batch = prompts(model, count)
        mine = ours(model, batch, tokens)
        results = []
        for dtype in (torch.bfloat16, torch.float32):
            other = peer(model, batch, tokens, dtype)
            mine(), other()
            results.append(alternate(mine, other, rounds))
        best = max(results, key=lambda pair: pair[1])
        report.add(f"generation, batch {count}", *best, "tokens/s", higher_is_better=True)
    report.save(args.json)


if __name__ == "__main__":
    main()
