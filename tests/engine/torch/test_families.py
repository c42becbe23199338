"""Every family against transformers' own model, in float32."""

from __future__ import annotations

import copy
from dataclasses import replace

import peft
import pytest
import torch

from engine.tiny import FAMILIES, loaded, prompt
from engine.torch import verification
from engine.torch.scripts import DOCS, script
from spillover.models import Adapter, LoraConfig, adapters

BOUND = 1e-4


@pytest.fixture(autouse=True)
def one_thread(two_threads):
    """What is this small is slower on two."""
    torch.set_num_threads(1)


def test_next_token_logits_are_transformers(family):
    assert verification.prefill(*family) <= BOUND


def test_decoded_logits_are_transformers_after_a_slot_was_reused(family):
    assert verification.decode(*family) <= BOUND


def test_greedy_answers_are_transformers_token_for_token(family):
    equal, answers = verification.greedy(*family)
    assert equal == answers == len(family[0].lengths)


def test_scores_are_transformers_log_probabilities(family):
    assert verification.scores(*family) <= BOUND


def test_a_training_step_is_pefts(trained):
    loss, gradient = verification.training(*trained)
    assert loss <= 1e-6
    assert gradient <= 2e-5


def plain_ropes(config):
    return {"ropes": tuple(replace(rope, scaling=None) for rope in config.ropes)}


def one_rope(config):
    return {"ropes": config.ropes[-1:] * config.layers}


def no_windows(config):
    return {"windows": (None,) * config.layers}


def every_window(config):
    return {"windows": (24,) * config.layers}


def other_shares(config):
    return {"experts": replace(config.experts, normalized=not config.experts.normalized)}


CHANGES = [
    ("llama3", plain_ropes),
    ("qwen2-yarn", plain_ropes),
    ("phi3-short", plain_ropes),
    ("phi3-long", plain_ropes),
    ("gemma3", plain_ropes),
    ("gemma3", one_rope),
    ("mistral", no_windows),
    ("qwen2-mixed", no_windows),
    ("qwen2-mixed", every_window),
    ("qwen3-mixed", no_windows),
    ("qwen3-mixed", every_window),
    ("phi3", no_windows),
    ("gemma2", no_windows),
    ("gemma2", every_window),
    ("gemma2", lambda _: {"attention_softcap": None}),
    ("gemma2", lambda _: {"logit_softcap": None}),
    ("gemma2", lambda _: {"attention_scale": 32**-0.5}),
    ("gemma2", lambda _: {"norm_offset": 0.0}),
    ("gemma2", lambda _: {"embedding_scale": 1.0}),
    ("gemma2", lambda _: {"activation": "silu"}),
    ("mixtral", no_windows),
    ("mixtral", other_shares),
    ("qwen3-moe", other_shares),
    ("qwen3-moe-sparse-step", other_shares),
]


@pytest.mark.parametrize(("name", "change"), CHANGES)
def test_what_a_case_exercises_changes_its_logits(name, change, built):
    model, theirs = built(name)
    broken = replace(model, config=replace(model.config, **change(model.config)))
    assert verification.prefill(FAMILIES[name], broken, theirs) > 100 * BOUND


def test_long_positions_are_chosen_by_the_planned_context(built):
    """Within the original context LongRoPE has other angles than beyond it."""
    model, theirs = built("phi3-short")
    case = FAMILIES["phi3-short"]
    assert verification.prefill(replace(case, sequence=65), model, theirs) > 100 * BOUND


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3-moe"])
def test_bf16_stays_near_float32(name, built):
    model, theirs = built(name)
    logits = loaded(model, numerics="bf16").session().admit([prompt(40)])
    want = verification.theirs_logits(theirs, prompt(40))[-1]
    got = torch.from_numpy(logits.numpy(0))
    assert torch.nn.functional.cosine_similarity(got, want, dim=0) > 0.98


def test_the_page_of_families_is_current():
    """All but the measured figures is what the script would write now."""
    families = script("families")
    text = (DOCS / "models.md").read_text(encoding="utf-8")
    measured, versions = families.written(text)
    assert families.page(measured, versions) == text, "python docs/families.py"
    for name, one in measured.items():
        answers = 2 * len(FAMILIES[name].lengths)
        assert one.greedy == f"{answers} of {answers}"
    assert {case.architecture for case in FAMILIES.values()} == set(families.ARCHITECTURES)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.filterwarnings("ignore:Unexpected keyword arguments:UserWarning")  # the fields of mlx-lm
@pytest.mark.parametrize("name", ["phi3", "mixtral", "gemma3"])
def test_peft_loads_our_adapter_of_the_family(name, built):
    model, theirs = built(name)
    config = LoraConfig(rank=4, alpha=8.0, targets=FAMILIES[name].targets).on(model.config)
    folder = adapters.save(name, Adapter(config, verification.alive(config, model)), overwrite=True)
    peer = peft.PeftModel.from_pretrained(copy.deepcopy(theirs), folder)
    ours = loaded(model, adapters=[adapters.load(name)]).session().admit([prompt(40)])
    want = verification.theirs_logits(peer, prompt(40))[-1]
    torch.testing.assert_close(torch.from_numpy(ours.numpy(0)), want, atol=BOUND, rtol=BOUND)
    assert (want - verification.theirs_logits(theirs, prompt(40))[-1]).abs().max() > 100 * BOUND


def test_a_plan_counts_every_expert(built):
    model, _ = built("mixtral")
    planned = loaded(model).plan.weights_bytes
    final_norm = 4 * model.config.hidden_size
    assert planned + final_norm == model.index().bytes  # float32, and a head beside the embedding
