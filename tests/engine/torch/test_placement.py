"""Streamed placement: planned from a memory budget, and to the bit what resident placement computes."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import replace

import numpy as np
import pytest

from engine.tiny import FAMILIES, answers, build, prompt, request
from engine.torch.peer import micro_batch
from spillover.engine import Optimizer, Scheduler, Work, engine
from spillover.engine.ring import Drive, LayerIndex, Layout, Ring
from spillover.engine.torch.fit import Streaming
from spillover.engine.torch.layers import Streamed
from spillover.engine.torch.lora import parameters
from spillover.engine.torch.native.decoder import NativeDecoder
from spillover.engine.torch.native.session import NativeSession
from spillover.engine.torch.recompute import Inputs
from spillover.engine.torch.weights import Weights
from spillover.errors import EngineError, ModelError
from spillover.models import MODULES, LoraConfig, initial

TRAINED = [name for name, case in FAMILIES.items() if case.targets]


def planned(model, kind="generate", placement="streamed", **more):
    work = {"kind": kind, "batch": 4, "sequence": 200, "numerics": "float32", "device": "cpu", **more}
    return engine("torch").plan(model, Work(placement=placement, **work))


def tight(model, kind="generate", **more):
    """A streamed plan that reads in every pass: there is room for two layers on their way."""
    layers = LayerIndex(model.index(), model.config)
    layout = Layout.of(layers, Drive(), slots=2, expert_slots=2)
    return replace(planned(model, kind, **more), layout=layout)


def both(model, **more):
    """The model resident and streamed."""
    plans = planned(model, placement="resident", **more), tight(model, **more)
    return [engine("torch").load(model, plan) for plan in plans]


def requests():
    return [request(f"r{n}", prompt(n, n), 12 + n % 5, logprobs=3) for n in (5, 40, 1, 33, 90, 17, 64)]


@pytest.mark.parametrize("numerics", ["float32", "bf16"])
@pytest.mark.parametrize("name", FAMILIES)
def test_answers_and_log_probabilities_are_the_same_bits(built, name, numerics):
    resident, streamed = both(built(name)[0], numerics=numerics)
    assert (resident.plan.placement, streamed.plan.placement) == ("resident", "streamed")
    expected, found = answers(resident, requests()), answers(streamed, requests())
    assert [found[key].tokens for key in expected] == [one.tokens for one in expected.values()]
    assert [found[key].logprobs for key in expected] == [one.logprobs for one in expected.values()]


def test_scores_are_the_same_bits(llama):
    resident, streamed = both(llama[0])
    sequences, starts = [prompt(n, n) for n in (9, 70, 33)], [1, 20, 5]
    assert streamed.score(sequences, starts, top=2) == resident.score(sequences, starts, top=2)


def test_layers_are_streamed_without_compiled_kernels_too(built, monkeypatch):
    monkeypatch.setattr("spillover.engine.torch.native.decoder.why_not", lambda: "not here")
    for name in ("llama", "mixtral", "gemma3"):
        resident, streamed = both(built(name)[0])
        assert streamed.plan.kernels == "torch"
        expected, found = answers(resident, requests()), answers(streamed, requests())
        assert [found[key].tokens for key in expected] == [one.tokens for one in expected.values()]
        assert [found[key].logprobs for key in expected] == [one.logprobs for one in expected.values()]


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe"])
def test_an_expert_with_one_token_is_the_same_bits(built, name):
    """A product of a single row has a kernel of its own."""
    resident, streamed = (
        trainer(built(name)[0], one, FAMILIES[name].targets) for one in ("resident", "streamed")
    )
    for step in range(12):
        short = [micro_batch([prompt(3 + step % 4, step)], [1])]
        assert streamed.step(short, lr=1e-2) == resident.step(short, lr=1e-2)


def batches(step, rows=2):
    lengths = [[9 + step % 5, 9, 17 + step], [150, 31]]
    return [
        micro_batch([prompt(n, 10 * step + n) for n in part], [n // 3 for n in part])
        for part in lengths[:rows]
    ]


def trainer(model, placement, targets=MODULES, **more):
    lora = LoraConfig(rank=4, alpha=8.0, targets=targets, dropout=more.pop("dropout", 0.0)).on(model.config)
    plan = tight(model, "train", lora=lora, **more)
    if placement == "resident":
        plan = planned(model, "train", placement, lora=lora, **more)
    source = np.random.default_rng(4)
    start = {
        name: value if name.endswith("_a") else source.normal(0, 0.05, value.shape).astype(np.float32)
        for name, value in initial(lora, model.config, 1).items()
    }
    return engine("torch").load(model, plan).trainer(lora, start, Optimizer(), seed=3)


@pytest.mark.parametrize("name", TRAINED)
def test_every_loss_of_a_tune_is_the_same_bits(built, name):
    model, targets = built(name)[0], FAMILIES[name].targets
    resident, streamed = (trainer(model, placement, targets) for placement in ("resident", "streamed"))
    for step in range(20):
        expected, found = (one.step(batches(step), lr=3e-3) for one in (resident, streamed))
        assert found == expected
        if step % 5 == 4:
            assert streamed.evaluate(batches(0)) == resident.evaluate(batches(0))
    expected, found = resident.state(), streamed.state()
    assert all(np.array_equal(found.params[key], value) for key, value in expected.params.items())


@pytest.mark.parametrize("numerics", ["float32", "bf16"])
def test_inputs_that_wait_on_disk_change_nothing(llama, numerics):
    """With dropout, whose masks a layer makes again."""
    resident = trainer(llama[0], "resident", dropout=0.1, numerics=numerics)
    for room in (0, 30_000):
        streamed = trainer(llama[0], "streamed", dropout=0.1, numerics=numerics)
        streamed._inputs = Inputs(room)
        resident.restore(trainer(llama[0], "resident").state())
        for step in range(3):
            expected, found = (one.step(batches(step), lr=3e-3) for one in (resident, streamed))
            assert found == expected
        assert streamed._inputs._file is not None


def test_a_full_disk_under_the_inputs_is_one_line_and_no_step(llama, monkeypatch):
    streamed, expected = (trainer(llama[0], "streamed") for _ in range(2))
    before = streamed.state()

    def full(*args, **more):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        streamed._inputs = Inputs(0)
        broken.setattr("spillover.engine.torch.recompute.tempfile.TemporaryFile", full)
        with pytest.raises(EngineError, match=r"cannot be kept in .*: No space left") as caught:
            streamed.step(batches(0), lr=1e-2)
    assert "--memory" in caught.value.hint
    assert streamed.completed == 0
    assert all(np.array_equal(streamed.state().params[key], value) for key, value in before.params.items())
    assert streamed.step(batches(0), lr=1e-2) == expected.step(batches(0), lr=1e-2)


@pytest.mark.parametrize("layer", range(6))
@pytest.mark.parametrize("place", [(Streamed, "__getitem__"), (Ring, "layer"), (Weights, "streamed")])
def test_a_step_that_was_given_up_anywhere_leaves_nothing_behind(llama, monkeypatch, place, layer):
    """At any layer of the forward pass and of the backward pass, before, while and after it is waited for."""
    streamed, expected = (trainer(llama[0], "streamed") for _ in range(2))
    taken, usual = iter(range(100)), getattr(*place)

    def given_up(*args):
        if next(taken) == layer:
            raise KeyboardInterrupt
        return usual(*args)

    for name, more in (("evaluate", {}), ("step", {"lr": 1e-2})):
        perform = functools.partial(getattr(streamed, name), batches(0)[:1], **more)
        with monkeypatch.context() as broken:
            broken.setattr(*place, given_up)
            with contextlib.suppress(KeyboardInterrupt):  # an evaluation has only half as many
                perform()
        taken = iter(range(100))
        streamed.restore(expected.state())
        # the next pass is of the same kind, whose order the ring may be following already
        assert perform() == getattr(expected, name)(batches(0)[:1], **more)


def test_memory_decides_the_placement(llama):
    whole = planned(llama[0], placement=None, batch=1)
    assert whole.placement == "resident"
    less = planned(llama[0], placement=None, batch=1, memory=whole.memory_bytes - 1)
    assert (less.placement, less.memory_bytes <= whole.memory_bytes - 1) == ("streamed", True)
    assert "streamed on cpu" in less.why and "a pass reads" in less.why
    with pytest.raises(EngineError, match=r"needs .*as asked"):
        planned(llama[0], placement="resident", batch=1, memory=whole.memory_bytes - 1)


@pytest.mark.parametrize("kind", ["generate", "train"])
def test_a_plan_takes_what_it_says_and_uses_what_is_left(llama, kind):
    """First rows, then layers that stay; with all of them there is nothing left to read."""
    more = {"lora": LoraConfig(rank=4, alpha=8.0)} if kind == "train" else {}
    some = planned(llama[0], kind, memory=10**9, **more)
    assert sum(size for _, size in some.parts) == some.memory_bytes <= 10**9
    assert some.layout.pass_bytes == 0 and len(some.layout.pinned) == llama[0].config.layers
    least = some.memory_bytes
    with pytest.raises(EngineError, match="even with its layers streamed"):
        while True:  # what does not fit is left out: rows, tokens of a pass, layers that stay
            tight = planned(llama[0], kind, memory=least - 1, **more)
            least = tight.memory_bytes
            assert sum(size for _, size in tight.parts) == least
    assert (tight.layout.slots, tight.layout.pinned) == (2, frozenset())
    assert tight.pass_tokens < some.pass_tokens


def test_a_shorter_pass_is_planned_before_a_row_is_refused(llama):
    large = planned(llama[0], batch=16)
    assert large.pass_tokens == 2048
    tokens = dict(large.parts)["activations"]
    row = dict(large.parts)["cache"] // 16
    fixed = large.memory_bytes - dict(large.parts)["layers kept"] - 15 * row
    tight = planned(llama[0], batch=16, memory=fixed - 1)
    assert tight.pass_tokens < 2048 and dict(tight.parts)["activations"] < tokens


def test_a_pass_is_no_longer_than_all_rows_together(llama):
    assert planned(llama[0], batch=1).pass_tokens == 256
    assert planned(llama[0], batch=4).pass_tokens == 800


@pytest.mark.parametrize("kind", ["generate", "train"])
def test_a_shard_that_shrinks_meanwhile_is_one_line(tmp_path, kind):
    """Not a signal from a mapped page, and not wrong numbers."""
    more = {"lora": LoraConfig(rank=4, alpha=8.0)} if kind == "train" else {}
    model = build(tmp_path, "llama")[0]
    loaded = engine("torch").load(model, tight(model, kind, batch=1, **more))
    work = trainer(model, "streamed") if kind == "train" else loaded.session()
    for file in model.index().files:
        with file.open("r+b") as opened:
            opened.truncate(file.stat().st_size // 2)
    with pytest.raises(ModelError, match=r"layer|tensor") as caught:
        for step in range(8):
            if kind == "train":
                work.step(batches(step), lr=1e-3)
            elif step:
                work.decode([5])
            else:
                work.admit([prompt(20, 1)])
    assert "\n" not in str(caught.value)


def test_newcomers_join_the_pass_of_the_rows_that_are_there(llama, monkeypatch):
    """As many passes as the longest chain of rows that follow one another has tokens."""
    loaded, passes = both(llama[0])[1], []
    usual = NativeDecoder.forward

    def counted(decoder, stretches, cache):
        passes.append(len(stretches))
        return usual(decoder, stretches, cache)

    monkeypatch.setattr(NativeDecoder, "forward", counted)
    lengths = (6, 5, 4, 3, 2, 6, 5, 4)
    answers(loaded, [request(f"r{n}", prompt(9 + n, n), count) for n, count in enumerate(lengths)])
    ends = [0] * loaded.plan.batch
    for count in lengths:
        ends[ends.index(min(ends))] += count
    assert len(passes) == max(ends)
    assert max(passes) == loaded.plan.batch


def test_newcomers_leave_room_for_the_rows_that_are_there(llama, monkeypatch):
    """In a short pass too: what did not fit would be another pass over all layers."""
    plan = replace(tight(llama[0], batch=8), pass_tokens=40)
    sweeps, asked = [], []
    usual, decode, admit = NativeDecoder.forward, NativeSession.decode, NativeSession.admit
    monkeypatch.setattr(NativeDecoder, "forward", lambda *args: (sweeps.append(1), usual(*args))[1])
    monkeypatch.setattr(NativeSession, "decode", lambda *args: (asked.append(1), decode(*args))[1])
    monkeypatch.setattr(NativeSession, "admit", lambda *args: (asked.append(1), admit(*args))[1])
    answers(engine("torch").load(llama[0], plan), [request(f"r{n}", prompt(19, n), 9) for n in range(12)])
    assert len(sweeps) == len(asked) > 12


@pytest.mark.parametrize("kind", ["read", "open"])
def test_an_embedding_that_cannot_be_read_is_one_line(llama, monkeypatch, kind):
    def broken(*args):
        raise OSError(5, "Input/output error")

    model = engine("torch").load(llama[0], tight(llama[0]))
    with monkeypatch.context() as failing:
        failing.setattr(f"spillover.engine.torch.rows.os.{'preadv' if kind == 'read' else 'open'}", broken)
        with pytest.raises(ModelError, match=r"safetensors cannot be read for tensor .*: Input/output"):
            model.session().admit([prompt(9, 1)])


def test_a_session_says_that_a_pass_was_given_up(llama, monkeypatch):
    session = engine("torch").load(llama[0], tight(llama[0])).session()
    session.admit([prompt(9, 1)])
    with monkeypatch.context() as broken:
        broken.setattr(Ring, "layer", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            session.decode([3])
    with pytest.raises(EngineError, match="given up"):
        session.decode([3])


def test_rows_that_were_begun_keep_their_tokens_wherever_a_pass_is_given_up(llama, monkeypatch):
    """Also while what they came with is scored."""
    model = engine("torch").load(llama[0], tight(llama[0]))
    begun = [replace(one, generated=prompt(3, n)) for n, one in enumerate(requests())]
    for place in ("score", "session"):
        scheduler = Scheduler(model)
        with monkeypatch.context() as broken:
            if place == "score":
                broken.setattr(type(model), "score", lambda *_, **__: 1 / 0)
            else:
                broken.setattr(type(scheduler._session), "admit", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                next(scheduler.run(iter(begun[:3])))
        assert scheduler.partials() == {one.id: list(one.generated) for one in begun[:3]}


def test_what_rows_came_with_is_scored_in_one_pass(llama, monkeypatch):
    model, scored = engine("torch").load(llama[0], tight(llama[0])), []
    usual = type(model).score
    monkeypatch.setattr(
        type(model), "score", lambda *args, **more: (scored.append(1), usual(*args, **more))[1]
    )
    begun = [replace(one, generated=prompt(3, n)) for n, one in enumerate(requests()[:4])]
    assert len(answers(model, begun)) == 4
    assert len(scored) == 1


def test_an_adapter_counts(llama):
    lora = LoraConfig(rank=64, alpha=8.0)
    bare, worn = planned(llama[0]), planned(llama[0], lora=lora)
    adapter = dict(worn.parts)["adapter"]
    assert worn.memory_bytes - bare.memory_bytes == adapter > 4 * parameters(llama[0].config, lora)


def test_a_tune_reads_there_and_back_and_a_mixture_what_is_routed_to(built):
    model = built("qwen3-moe")[0]
    layers = LayerIndex(model.index(), model.config)
    layout = Layout.of(layers, Drive(), slots=2)
    streaming = Streaming(layers, Drive(), 0, rule=model.config.experts)
    one, many = (streaming.read(layout, tokens) for tokens in (1, 1000))
    assert one < many <= layout.pass_bytes
    assert streaming.read_twice(layout) == round(2 * layout.pass_bytes * (1 - 2 / model.config.layers))
