"""Attention for training, tiled and compiled, and its gradient against one softmax in float64."""

from __future__ import annotations

import math

import pytest
import torch

from spillover.engine.torch import tiles
from spillover.engine.torch.attention import Scoring
from spillover.engine.torch.native.training import Within, kernels
from spillover.engine.torch.sequences import attended
from spillover.engine.torch.tiles import groups, tiled

HEADS, KV_HEADS = 4, 2


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


def compiled(heads, lengths, scoring):
    native = kernels(heads)
    assert native is not None, "this machine has no compiler"
    return attended(native, heads, Within(lengths), KV_HEADS, scoring)


def by_tiles(heads, lengths, scoring):
    return tiled(heads, groups(lengths), KV_HEADS, scoring)


LENGTHS = [[1], [64], [65, 64, 63, 128], [3, 130, 70, 9, 130, 1], [tiles.KEPT_LENGTH + 45, 290, 20]]
RULES = [(None, None), (7, None), (70, None), (None, 2.0), (40, 1.5)]


@pytest.mark.parametrize("width", [16, 20, 64])
@pytest.mark.parametrize("attend", [compiled, by_tiles])
@pytest.mark.parametrize("window, softcap", RULES)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_output_and_gradient_are_exact(lengths, window, softcap, attend, width):
    scoring = Scoring(window, 0.3, softcap)
    source = torch.Generator().manual_seed(1)
    rows = sum(lengths)
    heads = torch.randn(rows + 5, HEADS + 2 * KV_HEADS, width, generator=source)
    pull = torch.randn(rows + 5, HEADS * width, generator=source)
    exact = heads[:rows].double().requires_grad_()
    want = reference(exact, lengths, scoring)
    want.backward(pull[:rows].double())
    ours = heads.clone().requires_grad_()
    got = attend(ours, lengths, scoring)
    got.backward(pull)
    torch.testing.assert_close(got[:rows].double(), want, rtol=0, atol=4e-6)
    torch.testing.assert_close(ours.grad[:rows].double(), exact.grad, rtol=0, atol=4e-5)
    assert not got[rows:].any() and not ours.grad[rows:].any()
    assert torch.equal(ours, heads)


@pytest.mark.parametrize("threads", [1, 2])
def test_compiled_attention_has_the_same_bits_on_any_number_of_threads(threads):
    heads = torch.randn(330, HEADS + 2 * KV_HEADS, 64, generator=torch.Generator().manual_seed(2)).bfloat16()
    pull = torch.ones(330, HEADS * 64, dtype=torch.bfloat16)
    found = []
    for count in (threads, 3):
        torch.set_num_threads(count)
        leaf = heads.clone().requires_grad_()
        out = compiled(leaf, [200, 33, 90], Scoring(None, 0.125, None))
        out.backward(pull)
        found.append((out.detach(), leaf.grad))
    (one, by_one), (other, by_other) = found
    assert torch.equal(one, other) and torch.equal(by_one, by_other)


def test_compiled_attention_in_bf16_is_as_close_as_rounding_allows():
    heads = torch.randn(150, HEADS + 2 * KV_HEADS, 64, generator=torch.Generator().manual_seed(3)).bfloat16()
    pull = torch.randn(150, HEADS * 64, generator=torch.Generator().manual_seed(4)).bfloat16()
    scoring, lengths = Scoring(40, 0.125, None), [97, 53]
    exact, ours = heads.double().requires_grad_(), heads.clone().requires_grad_()
    want = reference(exact, lengths, scoring)
    want.backward(pull.double())
    got = compiled(ours, lengths, scoring)
    got.backward(pull)
    torch.testing.assert_close(got.double(), want, rtol=0.01, atol=0.01)
    torch.testing.assert_close(ours.grad.double(), exact.grad, rtol=0.02, atol=0.02)


def test_sequences_of_similar_length_go_together():
    found = groups([10, 100, 55, 49, 3, 100])
    assert [group.lengths for group in found] == [[100, 100, 55], [49], [10], [3]]
    assert [group.starts for group in found] == [[10, 217, 110], [165], [0], [214]]
