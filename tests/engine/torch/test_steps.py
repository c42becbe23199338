"""Decode steps that are recorded and replayed answer as those that run one operator after the other."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import create_autospec

import numpy as np
import pytest
import torch

from engine.tiny import FAMILIES, answers, loaded, prompt, ready, request
from engine.torch.tape import Tape
from engine.torch.verification import alive
from spillover.engine import Work, engine
from spillover.engine.torch import plan, pointwise, steps
from spillover.engine.torch.session import TorchSession
from spillover.engine.torch.steps import Bucket, CudaCapture, Eager, Recorded, rounded
from spillover.models import Adapter, LoraConfig

RECORDABLE = [name for name, case in FAMILIES.items() if case.kind not in ("Mixtral", "Qwen3Moe")]


@pytest.fixture(autouse=True)
def one_thread(two_threads):
    """What is this small is slower on two."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def as_on_a_device(monkeypatch):
    """Steps are recorded where torch's operators compute; a recorder of these sees no compiled function."""
    monkeypatch.setattr(pointwise, "kernels", lambda _: None)


@pytest.fixture
def tape():
    return Tape()


def eager(model, slots=None) -> TorchSession:
    """A session of `model`, whose steps are not recorded."""
    return TorchSession(model._decoder, model._worn, slots or model.plan.batch, model.plan.sequence, Eager())


def recorded(model, capture, failed=pytest.fail, slots=None) -> TorchSession:
    slots = slots or model.plan.batch
    out = torch.full((slots, model._decoder.config.vocab_size), torch.nan)
    runner = Recorded(capture, out, failed)
    return TorchSession(model._decoder, model._worn, slots, model.plan.sequence, runner)


def moves(longest=256):
    """Three rows share a bucket of four; rows leave and the last takes their numbers; all grow beyond 64."""
    first, last = min(60, longest - 20), min(61, longest - 20)
    return [[5, 40, first], 3, -1, 2, [9], 4, -2, -1, 2, [30, last, 1], 4]


def follow(session, script, adapters=()):
    """The logits of every step of `script`: prompts come, a row leaves (negative), or steps follow."""
    worn, lines, rows = list(adapters), [], 0
    for number, order in enumerate(script):
        if isinstance(order, list):
            chosen, worn = worn[: len(order)], worn[len(order) :]
            lines.append(session.admit([prompt(length, length) for length in order], chosen)._logits.clone())
            rows += len(order)
        elif order < 0:
            session.release(-order - 1)
            rows -= 1
        for step in range(order if isinstance(order, int) else 0):
            tokens = [(7 * step + 3 * row + number) % 200 + 1 for row in range(rows)]
            lines.append(session.decode(tokens)._logits.clone())
    return lines


def same(some, others, atol=2e-5):
    assert len(some) == len(others)
    for one, other in zip(some, others, strict=True):
        torch.testing.assert_close(one, other, atol=atol, rtol=0)


MOVES = moves()


@pytest.mark.parametrize("name", RECORDABLE)
def test_replayed_steps_are_the_steps(name, built, tape):
    case, (model, _) = FAMILIES[name], built(name)
    ours = ready(replace(case, kernels="torch"), model, batch=6)
    script = moves(case.sequence)
    session = recorded(ours, tape)
    same(follow(session, script), follow(eager(ours), script))
    assert tape.replayed == 15 > tape.recorded == len(session._steps._made)
    assert {bucket.rows for bucket in session._steps._made} == {1, 2, 4}
    assert {bucket.seen for bucket in session._steps._made} == {64, 96} - {96 * (case.sequence == 64)}


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in RECORDABLE])
def test_what_cannot_be_recorded_runs_eagerly_and_says_why(name, built, tape):
    """Experts are chosen on the host."""
    ours, reasons = loaded(built(name)[0], batch=6, kernels="torch"), []
    session = recorded(ours, tape, reasons.append)
    same(follow(session, MOVES), follow(eager(ours), MOVES))
    assert (tape.recorded, reasons) == (0, ["aten::bincount is not permitted while recording"])
    assert len(session._steps._made) == 1


def test_bf16_steps_are_replayed_too(llama, tape):
    ours = loaded(llama[0], batch=6, numerics="bf16", kernels="torch")
    same(follow(recorded(ours, tape), MOVES), follow(eager(ours), MOVES), atol=0.1)


def test_what_fills_up_a_bucket_disturbs_no_row(llama, tape):
    """Not even where the slots that it uses were left broken."""
    ours = loaded(llama[0], batch=8, kernels="torch")
    session = recorded(ours, tape)
    session.admit([prompt(length, length) for length in (5, 40, 60, 50)])
    session.decode([9, 9, 9, 9])
    session.release(3)
    session._steps.cache[:, 3:] = torch.nan
    found = [session.decode([1, 4, 7])._logits.clone() for _ in range(3)]
    assert session._steps._made.keys() == {Bucket(4, 64, False)}
    assert session._steps._inputs[:, 3].tolist() == [0, 0, 0]
    session = eager(ours)
    session.admit([prompt(length, length) for length in (5, 40, 60)])
    session.decode([9, 9, 9])
    same(found, [session.decode([1, 4, 7])._logits for _ in range(3)])


def test_each_row_wears_its_own_adapter_in_a_replay(llama, tape):
    config = LoraConfig(rank=4, alpha=8.0)
    worn = [Adapter(config, alive(config, llama[0])) for _ in range(2)]
    for name, value in worn[1].tensors.items():
        value[:] = np.random.default_rng(len(name)).normal(0, 0.1, value.shape)
    both = loaded(llama[0], batch=6, adapters=worn, kernels="torch")
    choice = [0, 1, -1, 1, -1, 0, 0]
    made = follow(recorded(both, tape), MOVES, choice)
    same(made, follow(eager(both), MOVES, choice))
    assert tape.recorded < tape.replayed
    # the step's masks against prefills, which pick rows: what follows 40 tokens under each adapter
    for one in (0, 1, -1):
        session = recorded(both, Tape())
        session.admit([prompt(9), prompt(40)], [1 - abs(one), one])
        found = session.decode([5, 6])._logits[1]
        wanted = eager(both).admit([(*prompt(40), 6)], [one])._logits[0]
        torch.testing.assert_close(found, wanted, atol=2e-5, rtol=0)


def test_one_adapter_is_left_out_where_a_row_has_none(llama, tape):
    config = LoraConfig(rank=4, alpha=8.0)
    ours = loaded(llama[0], batch=6, adapters=[Adapter(config, alive(config, llama[0]))], kernels="torch")
    every, some = [0] * 7, [0, 0, -1, 0, -1, 0, 0]
    session = recorded(ours, tape)
    same(follow(session, MOVES, every), follow(eager(ours), MOVES, every))
    assert {bucket.differ for bucket in session._steps._made} == {False}
    session = recorded(ours, tape)
    same(follow(session, MOVES, some), follow(eager(ours), MOVES, some))
    assert {bucket.differ for bucket in session._steps._made} == {True, False}


def test_a_session_of_the_engine_replays(llama, tape, monkeypatch):
    """Many rows over few slots, as the scheduler moves them, and the plan's word for it."""
    monkeypatch.setattr("spillover.engine.torch.engine.CudaCapture", lambda _: tape)
    rows = [request(f"r{i}", prompt(3 + 11 * i % 70, i), 3 + 7 * i % 19, logprobs=2) for i in range(16)]
    ours, plain = (loaded(llama[0], batch=5, kernels=one) for one in ("graphs", "torch"))
    found, wanted = answers(ours, rows), answers(plain, rows)
    assert {name: one.tokens for name, one in found.items()} == {k: one.tokens for k, one in wanted.items()}
    for name, one in found.items():
        assert [x.logprob for x in one.logprobs] == pytest.approx(
            [x.logprob for x in wanted[name].logprobs], abs=1e-5
        )
    assert tape.replayed > 3 * tape.recorded > 0
    assert ours.plan.kernels == "graphs"


def test_a_capture_that_fails_is_in_the_plans_line(llama, monkeypatch):
    def capture(_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried much\nand a page of advice")

    monkeypatch.setattr("spillover.engine.torch.engine.CudaCapture", lambda _: capture)
    ours = loaded(llama[0], batch=5, kernels="graphs")
    same(follow(ours.session(), MOVES), follow(loaded(llama[0], batch=5, kernels="torch").session(), MOVES))
    assert ours.plan.kernels == "torch"
    assert ours.plan.why.endswith(", without CUDA graphs: CUDA out of memory. Tried much")


def test_the_plan_tries_a_capture_first(built, monkeypatch):
    """On the device that is asked for; here a tape on the CPU stands in for it."""
    work, device = Work("generate", 4, 64, device="cuda"), torch.device("cuda")
    dense, sparse = built("llama")[0].config, built("mixtral")[0].config
    zeros = torch.zeros
    monkeypatch.setattr(steps.torch, "zeros", lambda *shape, device: zeros(*shape))
    monkeypatch.setattr(steps, "CudaCapture", lambda _: Tape())
    assert plan._kernels(dense, device, work) == ("graphs", "")
    assert plan._kernels(dense, device, replace(work, kind="train")) == ("torch", "")
    assert plan._kernels(sparse, device, work) == (
        "torch", ", without CUDA graphs: which experts compute is decided on the host",
    )  # fmt: skip
    monkeypatch.setattr(steps, "CudaCapture", lambda _: _refuse)
    assert plan._kernels(dense, device, work) == ("torch", ", without CUDA graphs: an old driver")


def _refuse(_):
    raise RuntimeError("an old driver\n")


def test_a_capture_is_warmed_up_beside_and_then_recorded_once(monkeypatch):
    """The calls that are made of torch.cuda, by their signatures: there need be no device."""
    happened = []
    cuda = {name: create_autospec(getattr(torch.cuda, name)) for name in ("graph", "stream", "device")}
    cuda["graph"].return_value.__enter__.side_effect = lambda *_: happened.append("capture")
    cuda["stream"].return_value.__enter__.side_effect = lambda *_: happened.append("beside")
    for name in ("CUDAGraph", "Stream", "graph_pool_handle", "current_stream"):
        cuda[name] = create_autospec(getattr(torch.cuda, name))
    for name, stand_in in cuda.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    capture = CudaCapture(torch.device("cuda"))
    replays = [capture(lambda: happened.append("run")) for _ in range(2)]
    assert happened == 2 * ["beside", "run", "run", "capture", "run"]
    first, second = (call.kwargs for call in cuda["graph"].call_args_list)
    assert first == second and first["pool"] is cuda["graph_pool_handle"].return_value
    assert replays[0] is cuda["CUDAGraph"].return_value.replay
    assert cuda["Stream"].call_count == cuda["graph_pool_handle"].call_count == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device")
def test_cuda_graphs_are_the_steps(built):
    for name in RECORDABLE:
        model, script = built(name)[0], moves(FAMILIES[name].sequence)
        work = Work("generate", 6, FAMILIES[name].sequence, numerics="float32", device="cuda")
        ours = engine("torch").load(model, engine("torch").plan(model, work))
        same(follow(ours.session(), script), follow(eager(ours), script))
        assert ours.plan.kernels == "graphs", f"{name}: {ours.plan.why}"


def test_sizes_are_rounded_to_two_per_power_of_two():
    assert [rounded(n) for n in (1, 2, 3, 4, 5, 6, 7, 9, 64, 65, 96, 97, 200)] == [
        1, 2, 3, 4, 6, 6, 8, 12, 64, 96, 96, 128, 256,
    ]  # fmt: skip
    assert all(rounded(n) >= n > rounded(n) / 1.6 for n in range(1, 5000))
