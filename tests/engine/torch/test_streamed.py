"""Layers that pass through the ring give the same bits as packed ones, for every family and dtype."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.tiny import FAMILIES, prompt
from spillover.engine.ring import Drive, LayerIndex, Layout, Ring, forward
from spillover.engine.torch.native.decoder import Cache, NativeDecoder, Stretch
from spillover.engine.torch.weights import Weights


def opened(model, pinned=()):
    layers = LayerIndex(model.index(), model.config)
    return Ring(layers, Layout.of(layers, Drive(), pinned=pinned), Drive(), forward(model.config.layers))


def decoder(model, dtype, open_ring=None):
    weights = Weights(model.index(), model.config.within(256), dtype, torch.device("cpu"))
    return NativeDecoder(weights, [], 256, open_ring)


def logits(made, tokens):
    """Of a prefill and of a step."""
    table, cache = np.arange(8, dtype=np.int32), Cache(made, 8)
    hidden = made.forward([Stretch(tokens, 0, table, -1)], cache)
    more = made.forward([Stretch([7], len(tokens), table, -1)], cache)
    return made.logits(np.concatenate([hidden, more]))._logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bf16"])
@pytest.mark.parametrize("name", FAMILIES)
def test_streamed_is_resident_to_the_bit(built, name, dtype):
    model, tokens = built(name)[0], prompt(40, 3)
    expected = logits(decoder(model, dtype), tokens)
    with opened(model) as ring:
        assert np.array_equal(logits(decoder(model, dtype, lambda: ring), tokens), expected)
    with opened(model, pinned=[1]) as ring:
        assert np.array_equal(logits(decoder(model, dtype, lambda: ring), tokens), expected)


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe"])
def test_only_experts_that_a_row_was_routed_to_are_read(built, name):
    model = built(name)[0]
    experts = model.config.experts
    with opened(model) as ring:
        made, read = decoder(model, torch.float32, lambda: ring), ring.layers.experts
        cache, table = Cache(made, 1), np.zeros(1, np.int32)
        before = ring.statistics().bytes_read
        made.forward([Stretch(prompt(1, 3), 0, table, -1)], cache)
        spent = ring.statistics().bytes_read - before
    ahead = sum(part.size for part in ring.layers.layers)
    assert spent <= 2 * ahead + len(experts.layers) * experts.per_token * max(p.size for e in read for p in e)
    assert experts.per_token < experts.count


def test_a_pass_that_was_given_up_does_not_shift_the_next(built, monkeypatch):
    model, tokens = built("llama")[0], prompt(40, 3)
    with opened(model) as ring:
        made = decoder(model, torch.float32, lambda: ring)
        expected = logits(made, tokens)
        layers = iter(made._layers)
        next(layers)
        layers.close()
        assert np.array_equal(logits(made, tokens), expected)
