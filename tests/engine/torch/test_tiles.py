"""Tiled attention and its gradient against one softmax over all keys, in float64."""

from __future__ import annotations

import math

import pytest
import torch

from spillover.engine.torch import tiles
from spillover.engine.torch.attention import Scoring
from spillover.engine.torch.tiles import groups, tiled

HEADS, KV_HEADS, WIDTH = 4, 2, 16


@pytest.fixture(autouse=True)
def one_thread(two_threads):
    """What is this small is slower on two."""
    torch.set_num_threads(1)


def reference(heads, lengths, scoring):
    """Sequence by sequence and head by head."""
    rows, start = [], 0
    for length in lengths:
        part = heads[start : start + length].transpose(0, 1)
        q, k, v = part.split([HEADS, KV_HEADS, KV_HEADS])
        scores = q @ k.repeat_interleave(HEADS // KV_HEADS, 0).transpose(1, 2) * scoring.scale
        if scoring.softcap is not None:
            scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
        back = torch.arange(length)[:, None] - torch.arange(length)
        seen = (back >= 0) & (back < (scoring.window or length))
        mixed = torch.softmax(scores.masked_fill(~seen, -math.inf), -1)
        rows.append((mixed @ v.repeat_interleave(HEADS // KV_HEADS, 0)).transpose(0, 1).flatten(1))
        start += length
    return torch.cat(rows)


LENGTHS = [[1], [64], [65, 64, 63, 128], [3, 130, 70, 9, 130, 1], [tiles.KEPT_LENGTH + 45, 290, 20]]
RULES = [(None, None), (7, None), (70, None), (None, 2.0), (40, 1.5)]


@pytest.mark.parametrize("window, softcap", RULES)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_output_and_gradient_are_exact(lengths, window, softcap):
    scoring = Scoring(window, 0.3, softcap)
    source = torch.Generator().manual_seed(1)
    rows = sum(lengths)
    heads = torch.randn(rows + 5, HEADS + 2 * KV_HEADS, WIDTH, generator=source)
    pull = torch.randn(rows + 5, HEADS * WIDTH, generator=source)
    exact = heads[:rows].double().requires_grad_()
    want = reference(exact, lengths, scoring)
    want.backward(pull[:rows].double())
    ours = heads.clone().requires_grad_()
    got = tiled(ours, groups(lengths), KV_HEADS, scoring)
    got.backward(pull)
    torch.testing.assert_close(got[:rows].double(), want, rtol=0, atol=2e-6)
    torch.testing.assert_close(ours.grad[:rows].double(), exact.grad, rtol=0, atol=2e-5)
    assert not got[rows:].any() and not ours.grad[rows:].any()
    assert torch.equal(ours, heads)


def test_sequences_of_similar_length_go_together():
    found = groups([10, 100, 55, 49, 3, 100])
    assert [group.lengths for group in found] == [[100, 100, 55], [49], [10], [3]]
    assert [group.starts for group in found] == [[10, 217, 110], [165], [0], [214]]
