"""``spill doctor --measure`` and what plans make of it: real passes, of models that take no time."""

from __future__ import annotations

import functools

import msgspec
import pytest
import torch

from spillover import __version__
from spillover.engine import Work, engine
from spillover.engine.estimate import Costs, Generation, Limits, Tuning
from spillover.engine.ring import known_drive, measure_drive
from spillover.engine.speeds import Machine, Memory, Rates, Speeds, keep, machine_key, recall
from spillover.engine.torch import bound, device
from spillover.engine.torch import measure as measuring
from spillover.models import LoraConfig, models_home

SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 512,
         "num_attention_heads": 2, "num_key_value_heads": 1}  # fmt: skip


@pytest.fixture
def quick(tmp_path, monkeypatch):
    """A home of its own, and measurements that take a moment."""
    monkeypatch.setenv("SPILL_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(measuring, "LARGE", SMALL | {"hidden_size": 128})
    monkeypatch.setattr(measuring, "SMALL", SMALL)
    monkeypatch.setattr(measuring, "_RUNS", 2)
    monkeypatch.setattr(measuring, "_PRODUCT", 256)
    monkeypatch.setattr(device, "_measure", lambda dtype: Speeds(100.0 * dtype.itemsize, packed=True))
    torch.set_num_threads(1)
    monkeypatch.setattr(measuring, "_MEMORY_BYTES", 1 << 24)
    monkeypatch.setattr(device, "_QUICK_BYTES", 1 << 24)
    monkeypatch.setattr(measuring, "sample", functools.partial(measuring.sample, large=1 << 25))
    monkeypatch.setattr(measuring, "_DRIVE_SECONDS", 0.1)
    return tmp_path / "home"


def planned(model, kind="generate", numerics="float32", placement="resident"):
    lora = LoraConfig(rank=4) if kind == "train" else None
    work = Work(kind, 8, 128, lora, numerics=numerics, device="cpu", placement=placement)
    return engine("torch").plan(model, work)


def test_everything_is_measured_told_and_kept(quick, llama):
    told = []
    machine, kept = measuring.measure(lambda *part: told.append(part))
    assert kept and recall(machine_key(machine.threads, machine.torch), Machine) == machine
    assert [number for number, _, _ in told] == list(range(len(told)))
    assert {total for _, total, _ in told} == {len(told)}
    assert machine.threads == torch.get_num_threads()
    assert machine.memory.gbs > 0 and machine.drive.rate > 0
    assert machine.drive == known_drive(models_home())
    assert machine.drive.source == "0.0 GB written for it"
    for rates in machine.rates.values():
        assert min(rates.gflops, rates.passes_gflops, rates.alone_gbs) > 0
        assert rates.training.products[0][1] > 0 and rates.generation.layer > 0
    speed = planned(llama[0]).speed
    assert speed.costs == machine.rates["float32"].generation
    assert speed.limits.drive is None  # of what is resident nothing is read
    assert not speed.generation(Generation(8, 64, 64, 8, 2048)).rough
    trained = planned(llama[0], "train", "bf16").speed
    assert trained.costs == machine.rates["bf16"].training
    assert trained.tuning(Tuning(1, 1, 2, 64, 64, 1000, 1 << 20)).seconds > 0


def test_costs_of_other_code_are_not_believed(quick, llama):
    costs = Costs(((1, 1e-10), (64, 1e-9)), 1e-5, 1e-9, 1e-11, 1e-11, 0.0, 1e-10)
    code = bound.code_of(planned(llama[0]).kernels)
    rates = {"float32": Rates(100.0, 200.0, 30.0, code, costs, costs)}
    machine = Machine(
        "here", 1, str(torch.__version__), __version__, 1.0, 20.0, Memory(30.0), None, "", rates
    )
    key = machine_key(1, machine.torch)
    keep(key, machine)
    assert planned(llama[0]).speed.costs == planned(llama[0], "train").speed.costs == costs
    assert planned(llama[0]).speed.limits == Limits(30e9, 200e9)
    keep(key, msgspec.structs.replace(machine, version="0.0.1"))
    assert planned(llama[0]).speed.costs is None
    assert planned(llama[0], "train").speed.costs is None
    other = {name: msgspec.structs.replace(one, code="other") for name, one in machine.rates.items()}
    keep(key, msgspec.structs.replace(machine, rates=other))
    assert planned(llama[0]).speed.costs is None
    assert planned(llama[0], "train").speed.costs is not None


def test_an_unwritable_home_still_gets_figures(quick):
    quick.write_text("a file, where the folder would be")
    machine, kept = measuring.measure(lambda *_: None)
    assert not kept and machine.memory.gbs > 0
    assert machine.drive is None and machine.without_drive


def test_a_plan_measures_nothing_for_its_estimate(quick, llama, monkeypatch):
    monkeypatch.setattr(device, "_measure", lambda _: pytest.fail("measured"))
    monkeypatch.setattr(device, "measure_memory", lambda _: pytest.fail("measured"))
    assert planned(llama[0], numerics="float32").speed is None


def test_what_chose_the_numerics_gives_a_rough_estimate(quick, llama):
    speed = planned(llama[0], numerics=None).speed
    assert speed.costs is None and speed.limits.drive is None
    assert speed.generation(Generation(8, 64, 64, 8, 2048)).rough
    drive = measure_drive([*llama[0].path.glob("*.safetensors")], seconds=0.1)
    streamed = planned(llama[0], numerics=None, placement="streamed")
    assert streamed.drive == drive
    assert streamed.speed.limits.drive == drive.rate > 0


def test_the_shape_counts_what_a_token_meets(built):
    config = built("llama")[0].config
    shape = bound.shape_of(config, "bf16")
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    layer = config.hidden_size * (2 * queries + 2 * keys + 3 * config.intermediate_size)
    assert shape.weights == config.layers * layer
    assert shape.stored == shape.weights + config.layers * 2 * config.hidden_size  # norms
    assert shape.cache == 2 * 2 * config.layers * keys


def test_of_experts_a_token_meets_some(built):
    config = built("mixtral")[0].config
    shape = bound.shape_of(config, "bf16")
    experts = config.experts
    one = 3 * config.hidden_size * experts.intermediate_size
    unused = (experts.count - experts.per_token) * one * len(experts.layers)
    small = config.layers * (2 + experts.count) * config.hidden_size  # norms and routers
    assert shape.stored == shape.weights + unused + small
