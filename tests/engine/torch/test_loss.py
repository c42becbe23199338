from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from spillover.engine.torch.loss import Chosen, Distribution, HeadLoss

VOCABULARY, WIDTH, TARGETS = 211, 24, 70


def taught(count: int, kept: int, spread: float = 2.0) -> tuple[torch.Tensor, Distribution]:
    """A teacher's whole distribution, float64 ``[count, V]`` logarithms, and the part of it that is known."""
    whole = torch.log_softmax(spread * torch.randn(count, VOCABULARY, dtype=torch.float64), dim=-1)
    best = whole.topk(kept, dim=-1)
    return whole, Distribution(best.indices, best.values.float())


def exact(goal: Chosen | Distribution, logits: torch.Tensor) -> torch.Tensor:
    """The loss of a goal by torch's own functions."""
    if isinstance(goal, Chosen):
        return F.cross_entropy(logits, goal.tokens, reduction="sum")
    log_q = torch.log_softmax(logits, dim=-1)
    p = goal.logprobs.to(logits.dtype).exp()
    rest_p = (1 - p.sum(-1)).clamp(min=0)
    hidden = torch.zeros_like(log_q).scatter(1, goal.tokens, -torch.inf)
    rest_q = torch.logsumexp(log_q + hidden, dim=-1)
    known = F.kl_div(
        log_q.gather(1, goal.tokens), goal.logprobs.to(logits.dtype), log_target=True, reduction="sum"
    )
    return known + (torch.xlogy(rest_p, rest_p) - rest_p * rest_q).sum()


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("rows", [16, 32, 1000])
@pytest.mark.parametrize("kind", ["chosen", "distribution"])
def test_chunks_add_up_to_the_whole_loss(kind, rows, softcap):
    torch.manual_seed(3)
    head, hidden = torch.randn(VOCABULARY, WIDTH), torch.randn(80, WIDTH)
    goal = (
        taught(TARGETS, 9)[1] if kind == "distribution" else Chosen(torch.randint(0, VOCABULARY, (TARGETS,)))
    )
    precise = hidden[:TARGETS].double().requires_grad_()
    logits = precise @ head.double().T
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    want = exact(goal, logits)
    want.backward()
    loss = HeadLoss(head, 4 * VOCABULARY * rows, softcap)
    for _ in range(2):  # the buffers of the first time are used again
        ours = hidden.clone().requires_grad_()
        got = loss(ours, goal)
        got.backward()
        assert got.item() == pytest.approx(want.item(), rel=1e-6)
        torch.testing.assert_close(ours.grad[:TARGETS].double(), precise.grad, rtol=0, atol=2e-5)
        assert not ours.grad[TARGETS:].any()
    with torch.no_grad():
        assert loss(hidden, goal).item() == got.item()


def test_with_the_whole_distribution_the_divergence_is_the_whole_one():
    torch.manual_seed(4)
    whole, goal = taught(7, VOCABULARY)
    logits = torch.randn(7, VOCABULARY)
    want = F.kl_div(torch.log_softmax(logits.double(), -1), whole, log_target=True, reduction="sum")
    assert goal.loss(logits.clone(), wanted=False).item() == pytest.approx(want.item(), rel=1e-5)


@pytest.mark.parametrize("kept", [1, 20, VOCABULARY])
@pytest.mark.parametrize("spread", [0.1, 2.0, 40.0])
def test_a_student_that_agrees_has_nothing_to_learn(kept, spread):
    torch.manual_seed(5)
    whole, goal = taught(7, kept, spread)
    logits = whole.float()
    assert goal.loss(logits, wanted=True).item() == pytest.approx(0, abs=1e-4)
    assert logits.abs().max() < 1e-5


def test_what_the_teacher_thinks_impossible_is_unlearned_and_nothing_is_infinite():
    """One token has all of the teacher's probability; the student gives it next to none."""
    goal = Distribution(torch.tensor([[3]]), torch.zeros(1, 1))
    logits = torch.zeros(1, VOCABULARY)
    logits[0, 5] = 200.0
    assert goal.loss(logits, wanted=True).item() == pytest.approx(200.0)
    assert logits[0, 3].item() == pytest.approx(-1) and logits[0, 5].item() == pytest.approx(1)
    certain = torch.zeros(1, VOCABULARY)
    certain[0, 3] = 200.0
    doubt = Distribution(torch.tensor([[3]]), torch.tensor([[0.5]]).log())
    found = doubt.loss(certain, wanted=True)
    assert torch.isfinite(found) and torch.isfinite(certain).all()


def test_chunks_are_bounded_and_even():
    loss = HeadLoss(torch.zeros(VOCABULARY, WIDTH), 4 * VOCABULARY * 64, None)
    sizes = [part.stop - part.start for part in loss.chunks(208)]
    assert sizes == [64, 64, 64, 16] or max(sizes) - min(sizes) <= 16
    assert sum(sizes) == 208 and max(sizes) <= 64
