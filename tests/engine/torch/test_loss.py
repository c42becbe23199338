from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from spillover.engine.torch.loss import HeadLoss

VOCABULARY, WIDTH, TARGETS = 211, 24, 70


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("rows", [16, 32, 1000])
def test_chunks_add_up_to_the_whole_loss(rows, softcap):
    torch.manual_seed(3)
    head = torch.randn(VOCABULARY, WIDTH)
    hidden, targets = torch.randn(80, WIDTH), torch.randint(0, VOCABULARY, (TARGETS,))
    exact = hidden[:TARGETS].double().requires_grad_()
    logits = exact @ head.double().T
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    want = F.cross_entropy(logits, targets, reduction="sum")
    want.backward()
    loss = HeadLoss(head, 4 * VOCABULARY * rows, softcap)
    for _ in range(2):  # the buffers of the first time are used again
        ours = hidden.clone().requires_grad_()
        got = loss(ours, targets)
        got.backward()
        assert got.item() == pytest.approx(want.item(), rel=1e-6)
        torch.testing.assert_close(ours.grad[:TARGETS].double(), exact.grad, rtol=0, atol=2e-5)
        assert not ours.grad[TARGETS:].any()
    with torch.no_grad():
        assert loss(hidden, targets).item() == got.item()


def test_chunks_are_bounded_and_even():
    loss = HeadLoss(torch.zeros(VOCABULARY, WIDTH), 4 * VOCABULARY * 64, None)
    sizes = [part.stop - part.start for part in loss.chunks(208)]
    assert sizes == [64, 64, 64, 16] or max(sizes) - min(sizes) <= 16
    assert sum(sizes) == 208 and max(sizes) <= 64
