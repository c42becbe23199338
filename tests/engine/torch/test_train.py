from __future__ import annotations

import copy
import sys

import numpy as np
import pytest
import torch

from engine.tiny import answers, loaded, prompt, request
from engine.torch.peer import adapted, leaves, micro_batch, step_loss, tune
from spillover.engine import MicroBatch, Optimizer, Work, engine
from spillover.errors import EngineError
from spillover.models import Adapter, LoraConfig, initial

SMALL = LoraConfig(rank=4, alpha=8.0)
RATES = [2e-3 * min(1.0, (i + 1) / 5) for i in range(50)]


def trainer(model, config=SMALL, *, numerics="float32", batch=4, sequence=200, optimizer=None, seed=0):
    torch_engine = engine("torch")
    plan = torch_engine.plan(model, Work("train", batch, sequence, config, numerics=numerics, device="cpu"))
    return torch_engine.load(model, plan).trainer(
        config, noisy(config, model), optimizer or Optimizer(), seed=seed
    )


def noisy(config, model):
    """Initial tensors whose B is not zero, so that every gradient is alive."""
    source = np.random.default_rng(4)
    return {
        name: value if name.endswith("_a") else source.normal(0, 0.05, value.shape).astype(np.float32)
        for name, value in initial(config, model.config, 1).items()
    }


def data(step: int, count: int = 2) -> list[MicroBatch]:
    """Micro-batches of uneven rows, some longer than one tile of queries."""
    lengths = [[9 + step % 5, 9, 17 + step], [150, 31]]
    return [
        micro_batch([prompt(n, 10 * step + n) for n in lengths[i % 2]], [n // 3 for n in lengths[i % 2]])
        for i in range(count)
    ]


def test_gradients_are_pefts(llama):
    model, theirs = llama
    ours = trainer(model, optimizer=Optimizer(clip=0.0))
    result = ours.step(data(0), lr=0.0)
    peer = adapted(copy.deepcopy(theirs), SMALL, noisy(SMALL, model))
    loss = step_loss(peer, data(0))
    loss.backward()
    assert result.loss == pytest.approx(loss.item(), rel=1e-6)
    # after one step from zero, AdamW's first moment is a tenth of the gradient
    for name, leaf in leaves(peer).items():
        np.testing.assert_allclose(ours.state().m[name] * 10, leaf.grad.T.numpy(), rtol=2e-3, atol=2e-6)
    norm = torch.linalg.vector_norm(torch.stack([leaf.grad.norm() for leaf in leaves(peer).values()]))
    assert result.grad_norm == pytest.approx(norm.item(), rel=1e-5)


def test_fifty_steps_follow_peft_and_torch_adamw(llama):
    model, theirs = llama
    steps = [data(i % 4) for i in range(50)]
    ours = trainer(model)
    losses = [ours.step(batches, lr=rate).loss for batches, rate in zip(steps, RATES, strict=True)]
    peer = adapted(copy.deepcopy(theirs), SMALL, noisy(SMALL, model))
    np.testing.assert_allclose(losses, tune(peer, steps, RATES), rtol=1e-5)
    assert losses[-1] < 0.9 * losses[0]
    mine = ours.state().params
    yours = {name: leaf.detach().T.numpy() for name, leaf in leaves(peer).items()}
    assert cosine(flat(mine), flat(yours, mine)) > 0.9999


def test_the_update_is_torch_adamws(llama):
    ours = trainer(llama[0], optimizer=Optimizer(clip=0.0))
    before = ours.state()
    ours.step(data(0), lr=3e-3)
    after = ours.state()
    name = "layers.1.mlp.down_proj.lora_b"
    leaf = torch.from_numpy(before.params[name].copy()).requires_grad_()
    optimizer = torch.optim.AdamW([leaf], lr=3e-3, weight_decay=0.01, foreach=False)
    leaf.grad = torch.from_numpy(after.m[name]) / (1 - 0.9)
    optimizer.step()
    np.testing.assert_allclose(after.params[name], leaf.detach().numpy(), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_restored_state_continues_bit_for_bit(llama, dropout):
    config = LoraConfig(rank=4, alpha=8.0, dropout=dropout)
    whole = trainer(llama[0], config)
    losses = [whole.step(data(i), lr=1e-2).loss for i in range(6)]
    for stop in range(1, 6):
        first = trainer(llama[0], config)
        for i in range(stop):
            first.step(data(i), lr=1e-2)
        second = trainer(llama[0], config)
        second.restore(first.state())
        assert second.completed == stop
        assert [second.step(data(i), lr=1e-2).loss for i in range(stop, 6)] == losses[stop:]
        assert all(np.array_equal(a, whole.state().params[k]) for k, a in second.state().params.items())


def test_the_gradient_norm_is_exact_over_millions_of_parameters(llama):
    config = LoraConfig(rank=512, alpha=8.0)
    ours = trainer(llama[0], config, optimizer=Optimizer(clip=0.0))
    result = ours.step(data(0), lr=0.0)
    exact = np.linalg.norm(flat(ours.state().m).astype(np.float64) / (1 - 0.9))
    assert result.grad_norm == pytest.approx(exact, rel=1e-6)


def test_a_copy_of_the_state_does_not_move(llama):
    ours = trainer(llama[0])
    kept = ours.state()
    frozen = copy.deepcopy(kept)
    for i in range(3):
        ours.step(data(i), lr=1e-2)
    assert all(np.array_equal(value, frozen.params[name]) for name, value in kept.params.items())


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_the_split_into_micro_batches_and_passes_does_not_change_a_step(llama, dropout):
    config = LoraConfig(rank=4, alpha=8.0, dropout=dropout)
    rows, starts = [prompt(n, n) for n in (20, 21, 22, 23, 40, 41, 42, 43)], [2, 15, 3, 3, 9, 30, 1, 5]
    shapes = {
        "8": [micro_batch(rows, starts)],
        "2 x 4": [micro_batch(rows[:4], starts[:4]), micro_batch(rows[4:], starts[4:])],
    }
    results = {}
    for name, batches in shapes.items():
        results[name] = trainer(llama[0], config, batch=8).step(batches, lr=1e-3)
    split = trainer(llama[0], config, batch=8)
    split._pass_tokens = 60
    results["several passes"] = split.step(shapes["8"], lr=1e-3)
    for result in results.values():
        assert result.loss == pytest.approx(results["8"].loss, rel=1e-6)
        assert result.grad_norm == pytest.approx(results["8"].grad_norm, rel=1e-5)
        assert result.tokens == results["8"].tokens


def test_dropout_changes_steps_and_seeds_and_keeps_the_mean(llama):
    config = LoraConfig(rank=4, alpha=8.0, dropout=0.3)
    losses = {trainer(llama[0], config, seed=seed).step(data(0), lr=1e-3).loss for seed in range(4)}
    assert len(losses) == 4
    ours = trainer(llama[0], config)
    assert ours.evaluate(data(0)) == pytest.approx(trainer(llama[0]).step(data(0), lr=0.0).loss, rel=1e-6)


class Interrupted(BaseException):
    pass


def test_an_interruption_anywhere_leaves_a_whole_step(llama):
    """Raise at every line of the trainer in turn: the state is that before the step or that after it."""
    batches = data(0)
    before = trainer(llama[0]).state()
    done = trainer(llama[0])
    done.step(batches, lr=1e-2)
    after = done.state()

    def interrupt_at(line: int) -> bool:
        ours, seen = trainer(llama[0]), 0

        def local(frame, event, arg):
            nonlocal seen
            seen += event == "line"
            if seen == line:
                sys.settrace(None)
                raise Interrupted
            return local

        def watch(frame, event, arg):
            return local if frame.f_code.co_filename.endswith("engine/torch/train.py") else None

        sys.settrace(watch)
        try:
            ours.step(batches, lr=1e-2)
            return False
        except Interrupted:
            pass
        finally:
            sys.settrace(None)
        now = ours.state()
        want = before if now.step == 0 else after
        for kind in ("params", "m", "v"):
            for name, value in getattr(now, kind).items():
                assert np.array_equal(value, getattr(want, kind)[name])
        return True

    line = 1
    while interrupt_at(line):
        line += 1
    assert line > 50


def test_bf16_gradients_are_as_near_float32_as_pefts(llama):
    model, theirs = llama
    wide, narrow = trainer(model), trainer(model, numerics="bf16")
    wide.step(data(0), lr=0.0)
    narrow.step(data(0), lr=0.0)
    peer = adapted(copy.deepcopy(theirs).bfloat16(), SMALL, noisy(SMALL, model))
    step_loss(peer, data(0)).backward()
    exact = flat(wide.state().m)
    other = {name: leaf.grad.T.float().numpy() for name, leaf in leaves(peer).items()}
    assert cosine(flat(narrow.state().m), exact) > min(
        0.99, cosine(flat(other, wide.state().m), exact) - 0.01
    )


def flat(arrays, order=None):
    return np.concatenate([arrays[name].ravel() for name in order or arrays])


def cosine(a, b):
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


@pytest.mark.parametrize("kernels", ["", "torch packed", "torch"])
def test_a_trained_adapter_generates_as_peft_does(trained, kernels, monkeypatch):
    case, model, theirs = trained
    monkeypatch.setattr("spillover.engine.torch.engine.measured", lambda _: _Speeds("packed" in kernels))
    every = LoraConfig(rank=4, alpha=8.0, targets=case.targets).on(model.config).targets
    config = LoraConfig(rank=4, alpha=8.0, targets=every[::2])
    tensors = noisy(config, model)
    asked = prompt(case.lengths[1])
    own = {"sequence": case.sequence, "kernels": kernels.partition(" ")[0]}
    ours = loaded(model, adapters=[Adapter(config, tensors)], **own)
    peer = adapted(copy.deepcopy(theirs), config, tensors)
    got = ours.session().admit([asked]).numpy(0)
    with torch.no_grad():
        want = peer(torch.tensor([asked])).logits[0, -1].numpy()
        plain = theirs(torch.tensor([asked])).logits[0, -1].numpy()
    np.testing.assert_allclose(got, want, atol=1e-4)
    assert np.abs(want - plain).max() > 0.01
    assert len(answers(ours, [request("a", asked, 5)])["a"].tokens) == 5


class _Speeds:
    def __init__(self, packed: bool) -> None:
        self.packed = packed


def test_a_state_of_another_adapter_is_refused(llama):
    other = trainer(llama[0], LoraConfig(rank=8, alpha=8.0)).state()
    with pytest.raises(
        EngineError, match=r"layers.0.mlp.down_proj.lora_a has shape \(128, 8\), not \(128, 4\)"
    ):
        trainer(llama[0]).restore(other)


def test_a_step_without_targets_is_refused(llama):
    empty = micro_batch([prompt(5)], [5])
    with pytest.raises(EngineError, match="no target token"):
        trainer(llama[0]).step([empty], lr=1e-3)
