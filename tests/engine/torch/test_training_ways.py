"""How a step is computed changes its speed and memory, not what it computes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.tiny import prompt
from engine.torch.peer import micro_batch
from spillover.engine import MicroBatch, Optimizer, Work, engine
from spillover.engine.torch import adamw
from spillover.engine.torch.linear import Frozen
from spillover.models import LoraConfig, initial

SMALL = LoraConfig(rank=4, alpha=8.0)


@pytest.fixture(autouse=True)
def one_thread(two_threads):
    """What is this small is slower on two."""
    torch.set_num_threads(1)


def planned(model, **more):
    work = {
        "kind": "train",
        "batch": 4,
        "sequence": 400,
        "lora": SMALL,
        "numerics": "float32",
        "device": "cpu",
    }
    return engine("torch").plan(model, Work(**{**work, **more}))


def trainer(model, config=SMALL, *, numerics="float32", **way):
    source = np.random.default_rng(4)
    start = {
        name: value if name.endswith("_a") else source.normal(0, 0.05, value.shape).astype(np.float32)
        for name, value in initial(config, model.config, 1).items()
    }
    plan = replace(planned(model, lora=config, numerics=numerics), **way)
    return engine("torch").load(model, plan).trainer(config, start, Optimizer(), seed=3)


def ragged() -> MicroBatch:
    """One row longer than what attention keeps for the backward, others far shorter."""
    lengths = [300, 17, 70, 150]
    return micro_batch([prompt(n, n) for n in lengths], [n // 3 for n in lengths])


def padded(batch: MicroBatch) -> MicroBatch:
    """The same targets, every row of the full width."""
    return replace(batch, lengths=np.full(len(batch.lengths), batch.tokens.shape[1]))


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("numerics", ["float32", "bf16"])
def test_layers_that_are_computed_again_change_no_bit(llama, numerics, dropout):
    config = replace(SMALL, dropout=dropout)
    ways = [trainer(llama[0], config, numerics=numerics, recompute=again) for again in (False, True)]
    for _ in range(3):
        first, second = (one.step([ragged()], lr=1e-2) for one in ways)
        assert first == second
    states = [one.state() for one in ways]
    for kind in ("params", "m", "v"):
        one, other = (getattr(state, kind) for state in states)
        assert all(np.array_equal(value, other[name]) for name, value in one.items())


def test_packed_rows_have_the_losses_of_padded_ones(llama):
    whole, alone = trainer(llama[0]), trainer(llama[0], pass_tokens=1)
    losses = [
        one.step([batch], lr=0.0)
        for one, batch in ((whole, ragged()), (whole, padded(ragged())), (alone, ragged()))
    ]
    for one in losses[1:]:
        assert one.loss == pytest.approx(losses[0].loss, rel=1e-6)
        assert one.grad_norm == pytest.approx(losses[0].grad_norm, rel=1e-5)
        assert one.tokens == losses[0].tokens


def test_no_padding_is_computed(llama, monkeypatch):
    rows = []
    product = Frozen.product
    monkeypatch.setattr(Frozen, "product", lambda self, x: rows.append(len(x)) or product(self, x))
    trainer(llama[0]).step([ragged()], lr=0.0)
    batch = ragged()
    total, targets = int(batch.lengths.sum()), int(batch.mask.sum())
    assert max(rows) < 1.04 * total
    # the last layer's attention takes every row, what follows only those that predict a target
    layers = llama[0].config.layers
    assert len([n for n in rows if n == max(rows)]) == 4 * layers - 3
    assert sorted(rows)[:3] == [min(rows)] * 3 and targets <= min(rows) < targets + 32


def test_the_lowest_adapter_has_no_gradient_below_it(llama, monkeypatch):
    taken = []
    back = Frozen.back
    monkeypatch.setattr(Frozen, "back", lambda self, grad: taken.append(self) or back(self, grad))
    trainer(llama[0]).step([ragged()], lr=0.0)
    assert len(taken) == 4 * llama[0].config.layers - 1
    taken.clear()
    trainer(llama[0], replace(SMALL, targets=("mlp.down_proj",))).step([ragged()], lr=0.0)
    assert len(taken) == 4 * llama[0].config.layers - 4


@pytest.mark.parametrize("numerics, rel", [("float32", 1e-6), ("bf16", 2e-2)])
def test_a_weight_laid_out_once_or_for_both_directions(llama, numerics, rel):
    ways = [trainer(llama[0], numerics=numerics, two_layouts=two) for two in (True, False)]
    first, second = (one.step([ragged()], lr=0.0) for one in ways)
    assert first.loss == pytest.approx(second.loss, rel=rel)
    assert first.grad_norm == pytest.approx(second.grad_norm, rel=10 * rel)


@pytest.mark.parametrize("dtype, atol", [(torch.float32, 1e-4), (torch.bfloat16, 0.3)])
@pytest.mark.parametrize("packed", [True, False])
def test_a_frozen_weight_multiplies_both_ways(packed, dtype, atol):
    torch.manual_seed(0)
    weight, bias = torch.randn(48, 80, dtype=dtype), torch.randn(48, dtype=dtype)
    frozen = Frozen(weight, bias, packed=packed)
    x = torch.randn(21, 80, dtype=dtype, requires_grad=True)
    pull = torch.randn(21, 48, dtype=dtype)
    y = frozen(x)
    y.backward(pull)
    want = x.detach().double() @ weight.double().T + bias.double()
    torch.testing.assert_close(y.double(), want, rtol=0, atol=atol)
    torch.testing.assert_close(x.grad.double(), pull.double() @ weight.double(), rtol=0, atol=atol)
    assert frozen.outputs == 48


def test_memory_chooses_the_way(llama, monkeypatch):
    model = llama[0]

    def plan(limit):
        monkeypatch.setattr("spillover.engine.torch.plan.memory_limit", lambda _: limit)
        return planned(model, batch=1)

    ample = plan(1 << 40)
    assert (ample.two_layouts, ample.recompute) == (True, False)
    once = plan(ample.memory_bytes - 1)
    assert (once.two_layouts, once.recompute) == (False, False)
    again = plan(once.memory_bytes - 1)
    assert (again.two_layouts, again.recompute) == (False, True)
    assert ample.memory_bytes > once.memory_bytes > again.memory_bytes
    assert "computed again in the backward" in again.why and "computed again" not in once.why


def test_the_update_in_parts_is_torch_adamws(monkeypatch):
    monkeypatch.setattr(adamw, "_PART", 1000)
    torch.manual_seed(5)
    leaf = torch.randn(4321).requires_grad_()
    theirs = torch.optim.AdamW([leaf], lr=3e-3, weight_decay=0.02, foreach=False)
    old = [leaf.detach().clone(), torch.zeros(4321), torch.zeros(4321)]
    for step in range(1, 4):
        grad = torch.randn(4321)
        leaf.grad = grad * 0.25
        theirs.step()
        new = [torch.empty(4321) for _ in range(3)]
        kept = [one.clone() for one in old]
        adamw.update(Optimizer(weight_decay=0.02), old, new, grad, step=step, lr=3e-3, clip=0.25)
        assert all(torch.equal(one, before) for one, before in zip(old, kept, strict=True))
        old = new
    torch.testing.assert_close(old[0], leaf.detach(), rtol=1e-6, atol=1e-8)
