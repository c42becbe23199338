from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from spillover.engine import Work, engine
from spillover.engine.torch import device
from spillover.errors import EngineError
from spillover.models import LoraConfig


def plan(model, **more):
    work = {"kind": "generate", "batch": 16, "sequence": 256, "device": "cpu", **more}
    return engine("torch").plan(model, Work(**work))


def test_the_plan_says_what_it_takes_and_why(llama):
    made = plan(llama[0])
    assert made.memory_bytes == sum(size for _, size in made.parts)
    assert {"weights", "cache"} <= {name for name, _ in made.parts}
    assert (made.engine, made.placement, made.batch) == ("torch", "resident", 16)
    assert "GFLOP/s measured" in made.why and "\n" not in made.why
    assert "as asked" in plan(llama[0], numerics="float32").why


def test_memory_bounds_the_batch(llama, monkeypatch):
    fixed = plan(llama[0], batch=1)
    row = dict(fixed.parts)["cache"]
    monkeypatch.setattr(
        "spillover.engine.torch.plan.memory_limit", lambda _: fixed.memory_bytes + 4 * row + row // 2
    )
    assert plan(llama[0], batch=1000).batch == 5


def test_memory_bounds_the_sequences_of_one_training_pass(llama, monkeypatch):
    lora = LoraConfig(rank=4, alpha=8.0)
    one = plan(llama[0], kind="train", batch=1, lora=lora)
    assert (one.batch, one.pass_tokens) == (1, 256)
    sequence = dict(one.parts)["activations"]
    monkeypatch.setattr(
        "spillover.engine.torch.plan.memory_limit", lambda _: one.memory_bytes + 2 * sequence + 1
    )
    made = plan(llama[0], kind="train", batch=8, lora=lora)
    assert (made.batch, made.pass_tokens) == (8, 3 * 256)


def test_what_does_not_fit_is_refused_in_one_line(llama, monkeypatch):
    monkeypatch.setattr("spillover.engine.torch.plan.memory_limit", lambda _: 1 << 20)
    with pytest.raises(
        EngineError,
        match=r"needs .* GB \(buffers .*\) even with its layers streamed .*, but 1 MB may be used \(75% ",
    ) as caught:
        plan(llama[0])
    assert caught.value.hint


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for what this machine lacks")
def test_a_gpu_that_is_not_there_is_refused(llama):
    with pytest.raises(EngineError, match="no CUDA device"):
        plan(llama[0], device="cuda")


def test_an_unknown_device_is_refused(llama):
    with pytest.raises(EngineError, match="no device tpu"):
        plan(llama[0], device="tpu")


def test_a_context_beyond_the_models_is_refused(llama):
    with pytest.raises(EngineError, match="at most 512 tokens, not 513"):
        plan(llama[0], sequence=513)


@pytest.mark.parametrize(
    ("line", "file", "none"),
    [
        ("0::/jobs/mine", "jobs/memory.max", "max"),
        ("4:cpu,memory:/jobs/mine", "memory/jobs/memory.limit_in_bytes", str((1 << 63) - 4096)),
        ("0::/a/path/of/the/host", "memory.max", "max"),
    ],
)
def test_a_cgroup_limit_below_the_ram_counts(tmp_path, monkeypatch, line, file, none):
    """Of either version, and of a group above this process's own."""
    groups, limit = tmp_path / "groups", tmp_path / file
    groups.write_text(f"7:cpu:/else\n{line}\n")
    limit.parent.mkdir(parents=True, exist_ok=True)
    monkeypatch.setattr(device, "_CGROUPS", tmp_path)
    monkeypatch.setattr(device, "_OWN_GROUPS", groups)
    limit.write_text("1000000\n")
    assert device.memory_limit(torch.device("cpu")) == 750_000
    limit.write_text(f"{none}\n")
    assert device.memory_limit(torch.device("cpu")) > 100_000_000


def test_speeds_are_measured_once(session_home, monkeypatch):
    first = device.measured(torch.float32)
    monkeypatch.setattr(device, "_measure", lambda _: pytest.fail("measured again"))
    assert device.measured(torch.float32) == first
    assert (session_home / "speeds.json").exists()


def test_importing_the_engine_package_imports_no_torch():
    code = "import sys, spillover.engine; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_unknown_engine_is_refused():
    with pytest.raises(EngineError, match="'jax'"):
        engine("jax")
