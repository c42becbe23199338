"""A model of ours against transformers' own, in float32: what the tests bound and ``docs/models.md`` has."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
import torch

from engine.tiny import Case, answers, prompt, ready, request
from engine.torch.peer import adapted, leaves, micro_batch, step_loss
from spillover.engine import Optimizer, Work, engine
from spillover.models import LoraConfig, Model, initial

TOKENS = 20


def greedy(case: Case, model: Model, theirs) -> tuple[int, int]:
    """(equal answers, answers) of a batch of prompts of different lengths, against ``generate``."""
    prompts = {str(n): prompt(length, n) for n, length in enumerate(case.lengths)}
    ours = answers(
        ready(case, model),
        [request(name, tokens, TOKENS) for name, tokens in prompts.items()],
    )
    longest = max(case.lengths)
    ids = torch.tensor([[0] * (longest - len(tokens)) + list(tokens) for tokens in prompts.values()])
    mask = torch.tensor([[0] * (longest - len(tokens)) + [1] * len(tokens) for tokens in prompts.values()])
    full = theirs.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=TOKENS)
    wanted = full[:, longest:].tolist()
    equal = sum(ours[name].tokens == row for name, row in zip(prompts, wanted, strict=True))
    return equal, len(prompts)


def prefill(case: Case, model: Model, theirs) -> float:
    """The largest difference of the logits after prompts."""
    prompts = [prompt(length, length) for length in case.lengths]
    logits = ready(case, model, batch=len(prompts)).session().admit(prompts)
    return _apart(logits, theirs, prompts)


def decode(case: Case, model: Model, theirs) -> float:
    """The largest difference of the logits after decoded tokens, in slots of which one was used before."""
    session = ready(case, model, batch=3).session()
    first, second, third, fourth = (list(prompt(length, length)) for length in case.lengths[1:5])
    session.admit([first, second, third])
    session.release(0)
    rows = [third, second, fourth]
    session.admit([fourth])
    for step in range(4):
        added = [step + 1, step + 20, step + 50]
        logits = session.decode(added)
        for row, token in zip(rows, added, strict=True):
            row.append(token)
    return _apart(logits, theirs, rows)


def scores(case: Case, model: Model, theirs) -> float:
    """The largest difference of the log-probabilities of given tokens and of the most likely three."""
    long, short = sorted(case.lengths)[-1], sorted(case.lengths)[-2]
    sequences, starts = [prompt(short, 1), prompt(long, 2)], [1, long // 2]
    worst = 0.0
    scored = ready(case, model).score(sequences, starts, top=3)
    for tokens, start, row in zip(sequences, starts, scored, strict=True):
        want = torch.log_softmax(theirs_logits(theirs, tokens), dim=-1)[start - 1 : -1]
        assert [one.token for one in row] == list(tokens[start:])
        for one, distribution in zip(row, want, strict=True):
            found = [(one.token, one.logprob), *one.top]
            worst = max(worst, *(abs(value - distribution[token].item()) for token, value in found))
    return worst


def training(case: Case, model: Model, theirs) -> tuple[float, float]:
    """One step of LoRA against PEFT: the loss's relative difference, and that of the whole gradient."""
    config = LoraConfig(rank=4, alpha=8.0, targets=case.targets).on(model.config)
    start = alive(config, model)
    batches = [micro_batch([prompt(n, n) for n in case.lengths], [n // 3 for n in case.lengths])]
    computing = engine("torch")
    work = Work("train", len(case.lengths), case.sequence, config, numerics="float32", device="cpu")
    trainer = computing.load(model, computing.plan(model, work)).trainer(config, start, Optimizer(clip=0.0))
    result = trainer.step(batches, lr=0.0)
    peer = adapted(copy.deepcopy(theirs), config, start)
    loss = step_loss(peer, batches)
    loss.backward()
    # after one step from zero, AdamW's first moment is a tenth of the gradient
    found = {name: value * 10 for name, value in trainer.state().m.items()}
    wanted = {name: leaf.grad.T.numpy() for name, leaf in leaves(peer).items()}
    assert found.keys() == wanted.keys()
    apart = np.sqrt(sum(np.square(found[name] - wanted[name]).sum() for name in wanted))
    size = np.sqrt(sum(np.square(one).sum() for one in wanted.values()))
    return abs(result.loss / loss.item() - 1), float(apart / size)


def alive(config: LoraConfig, model: Model) -> dict[str, np.ndarray]:
    """Initial tensors whose B is not zero, so that every gradient is alive."""
    source = np.random.default_rng(4)
    return {
        name: value if name.endswith("_a") else source.normal(0, 0.05, value.shape).astype(np.float32)
        for name, value in initial(config, model.config, 1).items()
    }


def theirs_logits(theirs, tokens: Sequence[int]) -> torch.Tensor:
    with torch.no_grad():
        return theirs(torch.tensor([tokens])).logits[0]


def _apart(logits, theirs, rows: Sequence[Sequence[int]]) -> float:
    return max(
        float(np.abs(logits.numpy(row) - theirs_logits(theirs, tokens)[-1].numpy()).max())
        for row, tokens in enumerate(rows)
    )
