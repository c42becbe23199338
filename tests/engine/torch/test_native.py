"""The compiled kernels: the same bits in any company, blocks that rows share, adapters side by side."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.tiny import answers, loaded, prompt, request
from spillover.engine import engine
from spillover.engine.torch.native import build
from spillover.engine.torch.native.blocks import Blocks, digests, needed
from spillover.engine.torch.native.library import BLOCK
from spillover.models import Adapter, LoraConfig, initial

LENGTHS = (5, 64, 33, 100, 1, 32)


@pytest.fixture(params=["float32", "bf16"])
def numerics(request):
    return request.param


def session(model, numerics="float32", batch=16, **more):
    return loaded(model, batch=batch, numerics=numerics, **more).session()


def after(opened, tokens, steps=3):
    """The logits that follow `tokens` alone in a session, and those of some steps more."""
    rows = [opened.admit([tokens]).numpy(0).copy()]
    rows += [opened.decode([7 + step]).numpy(0).copy() for step in range(steps)]
    return rows


def test_the_kernels_are_used_here(llama):
    assert loaded(llama[0]).plan.kernels == "compiled"


def test_a_row_is_the_same_bits_alone_and_in_company(llama, numerics):
    together = session(llama[0], numerics)
    prompts = [prompt(length, length) for length in LENGTHS]
    logits = [together.admit(prompts[:4]), together.admit(prompts[4:])]
    steps = [together.decode([7 + step] * len(prompts)) for step in range(3)]
    for row, tokens in enumerate(prompts):
        first = logits[0].numpy(row) if row < 4 else logits[1].numpy(row - 4)
        expected = after(session(llama[0], numerics), tokens)
        assert all(map(np.array_equal, expected, [first, *(one.numpy(row) for one in steps)]))


def test_a_prefill_is_the_same_bits_as_token_by_token(llama, numerics):
    tokens = prompt(100, 1)
    single = session(llama[0], numerics)
    single.admit([tokens[:1]])
    for token in tokens[1:]:
        last = single.decode([token])
    assert np.array_equal(last.numpy(0), after(session(llama[0], numerics), tokens)[0])


def test_a_score_is_the_log_probability_that_generation_reported(llama, numerics):
    model = loaded(llama[0], batch=4, numerics=numerics)
    done = answers(model, [request(f"r{i}", prompt(20 + i, i), 40, logprobs=3) for i in range(4)])
    for number in range(4):
        begin, one = prompt(20 + number, number), done[f"r{number}"]
        assert model.score([[*begin, *one.tokens]], [len(begin)], top=3)[0] == one.logprobs


def test_threads_change_no_bit(llama):
    """More threads than cores, so that they are put aside in the middle of loops."""
    results = []
    for threads in (1, 5):
        torch.set_num_threads(threads)
        opened = session(llama[0])
        opened.admit([prompt(length, length) for length in LENGTHS])
        results.append([opened.decode([step % 200] * len(LENGTHS)).numpy(3).copy() for step in range(120)])
    assert all(map(np.array_equal, *results))


def test_a_shared_beginning_is_computed_once_and_changes_no_bit(llama, numerics):
    begin = prompt(3 * BLOCK + 5, 1)
    opened = session(llama[0], numerics)
    rows = [[*begin, 3], [*begin, 4, 5], begin]
    together = opened.admit(rows)  # in one pass
    assert opened.shared == 2 * 3 * BLOCK
    later = opened.admit([[*begin, 6]])
    assert opened.shared == 3 * 3 * BLOCK
    opened.release(1)
    for row, tokens in enumerate(rows):
        assert np.array_equal(together.numpy(row), after(session(llama[0], numerics), tokens)[0])
    assert np.array_equal(later.numpy(0), after(session(llama[0], numerics), [*begin, 6])[0])


def test_rows_that_left_are_shared_until_their_memory_is_wanted(llama):
    opened = loaded(llama[0], batch=2, sequence=64).session()
    first, second = prompt(40, 1), prompt(40, 2)
    opened.admit([first])
    opened.release(0)
    opened.admit([first])
    assert opened.shared == BLOCK
    opened.release(0)
    for seed in range(2, 12):
        opened.admit([prompt(40, seed)])
        opened.release(0)
    opened.admit([first, second])
    assert opened.shared == BLOCK


def test_what_a_broken_row_left_behind_harms_no_other(llama):
    opened = loaded(llama[0], batch=1, sequence=64).session()
    expected = after(opened, prompt(10, 1))
    opened.release(0)
    opened._cache._data.view(np.float32)[:] = np.nan
    assert all(map(np.array_equal, after(opened, prompt(10, 1)), expected))


def test_rows_are_admitted_by_what_they_may_come_to_use(llama):
    opened = loaded(llama[0], batch=4, sequence=3 * BLOCK).session()
    blocks = opened._blocks.count
    short = 0
    while opened.reserve(BLOCK) and short < 4:
        short += 1
    assert short == 4 <= blocks, "as many as there are slots"
    small = replace(loaded(llama[0], batch=64, sequence=3 * BLOCK).plan, cache_tokens=6 * BLOCK)
    opened = engine("torch").load(llama[0], small).session()
    assert [opened.reserve(3 * BLOCK) for _ in range(3)] == [True, True, False]


def adapter(model, seed):
    config = LoraConfig(rank=4, alpha=8.0)
    source = np.random.default_rng(seed)
    tensors = {
        name: source.normal(0, 0.2, value.shape).astype(np.float32)
        for name, value in initial(config, model.config, seed).items()
    }
    return Adapter(config, tensors)


@pytest.mark.parametrize("kernels", ["compiled", "torch"])
def test_rows_wear_their_own_adapters_in_one_batch(llama, kernels):
    worn = [adapter(llama[0], 1), adapter(llama[0], 2)]
    choice = [0, 1, -1, 1, 0, -1]
    rows = [
        replace(request(f"r{i}", prompt(9 + i, 5), 12, logprobs=0), adapter=one)
        for i, one in enumerate(choice)
    ]
    both = answers(loaded(llama[0], batch=6, adapters=worn, kernels=kernels), rows)
    for row, one in zip(rows, choice, strict=True):
        alone = loaded(llama[0], adapters=[] if one < 0 else [worn[one]], kernels=kernels)
        expected = answers(alone, [replace(row, adapter=0)])[row.id]
        assert both[row.id].tokens == expected.tokens
        if kernels == "compiled":
            assert both[row.id].logprobs == expected.logprobs
    assert len({tuple(done.tokens) for done in both.values()}) == 6
    scored = loaded(llama[0], adapters=worn, kernels=kernels).score(
        [[*row.tokens, *both[row.id].tokens] for row in rows],
        [len(row.tokens) for row in rows],
        adapters=choice,
    )
    for row, one in zip(rows, scored, strict=True):
        assert [x.logprob for x in one] == pytest.approx([x.logprob for x in both[row.id].logprobs], abs=1e-4)


def test_compiled_and_torch_kernels_say_the_same(llama):
    rows = [request(f"r{i}", prompt(5 + 7 * i, i), 20, logprobs=5) for i in range(8)]
    ours, theirs = (answers(loaded(llama[0], batch=8, kernels=one), rows) for one in ("compiled", "torch"))
    for name, done in ours.items():
        assert done.tokens == theirs[name].tokens
        for mine, other in zip(done.logprobs, theirs[name].logprobs, strict=True):
            assert mine.logprob == pytest.approx(other.logprob, abs=1e-4)
            assert [token for token, _ in mine.top] == [token for token, _ in other.top]


def test_blocks_are_free_used_or_idle():
    blocks = Blocks(3)
    names = digests(range(3 * BLOCK), -1)
    assert len(names) == 3 and digests(range(3 * BLOCK), 0) != names
    first = blocks.take()
    blocks.know(first, names[0])
    assert blocks.share(names[0]) == first and blocks.share(names[1]) is None
    blocks.leave(first)
    blocks.leave(first)
    assert blocks.available == 3 and blocks.share(names[0]) == first
    others = [blocks.take(), blocks.take()]
    with pytest.raises(IndexError):
        blocks.take()
    blocks.leave(first)
    assert blocks.take() == first and blocks.share(names[0]) is None
    assert sorted([first, *others]) == [0, 1, 2]
    assert [needed(count) for count in (0, 1, BLOCK, BLOCK + 1)] == [0, 1, 1, 2]


def why(llama, **environment):
    """The plan of a process with these variables."""
    code = (
        "from spillover.engine import Work, engine; from spillover.models import resolve;"
        f"model = resolve({str(llama[0].path)!r});"
        "plan = engine('torch').plan(model, Work('generate', 1, 64, device='cpu'));"
        "print(plan.kernels, plan.why)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | environment, capture_output=True, text=True, check=True
    )
    return done.stdout


def test_without_a_compiler_torch_computes_and_the_plan_says_why(llama, tmp_path):
    fresh = {"XDG_CACHE_HOME": str(tmp_path)}
    assert "no C++ compiler was found" in why(llama, **fresh, PATH=str(tmp_path))
    false = tmp_path / "c++"
    false.write_text("#!/bin/sh\n[ $1 = --version ] && exit 0\necho the disk is full >&2; exit 1\n")
    false.chmod(0o755)
    line = why(llama, **fresh, PATH=f"{tmp_path}:/usr/bin:/bin")
    assert line.startswith("torch ") and "failed: the disk is full" in line
    assert "SPILL_NATIVE=0" in why(llama, SPILL_NATIVE="0")


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    build._scratch.cache_clear()
    assert build._folder() == build._folder() != blocked


FORKED = """
import os, sys, time, pathlib
import numpy as np, torch
from engine.tiny import build, loaded, prompt
torch.set_num_threads(3)
for _ in range(20):
    torch.exp(torch.randn(2_000_000))
opened = loaded(build(pathlib.Path(sys.argv[1]), "llama")[0], batch=16).session()
opened.admit([prompt(40, 1)])
expected = opened.decode([5]).numpy(0).copy()
opened.release(0)
torch.set_num_threads(1)
time.sleep(float(sys.argv[2]))
child = os.fork()
if child == 0:
    opened.admit([prompt(40, 1)])
    same = np.array_equal(opened.decode([5]).numpy(0), expected)
    opened._decoder.__del__()
    os._exit(0 if same else 1)
for _ in range(100):
    ended, status = os.waitpid(child, os.WNOHANG)
    if ended:
        sys.exit(os.waitstatus_to_exitcode(status))
    time.sleep(0.1)
os.kill(child, 9)
sys.exit("the child hangs")
"""


@pytest.mark.parametrize("pause", ["0", "0.3"], ids=["awake", "asleep"])
def test_a_forked_process_computes_and_ends(tmp_path, pause):
    """Whatever the threads that it has no copy of were doing."""
    tests = Path(__file__).parents[2]
    command = [sys.executable, "-c", FORKED, str(tmp_path), pause]
    environment = os.environ | {"PYTHONPATH": str(tests)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=100)
    assert done.returncode == 0, done.stderr[-1000:]
