"""Adapters trained by other tools compute here what they compute there, in float32, and ours there."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig as PeftConfig
from peft import PeftModel, get_peft_model
from safetensors.numpy import save_file
from transformers import AutoModelForCausalLM

from engine import tiny
from engine.torch.peer import micro_batch
from export.families import adapter_for, rows
from spillover.engine import Optimizer, Work, engine
from spillover.models import MODULES, Adapter, LoraConfig, Model, initial, resolve
from spillover.models.adapters import load, save

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
SEQUENCES = rows(4, 40)


@pytest.fixture
def model(base: Path, home: Path) -> Model:
    return resolve(str(base))


def theirs(model: Model) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(model.path, dtype=torch.float32)


def ours(model: Model, adapter: Adapter | None) -> np.ndarray:
    """Log-probabilities of `SEQUENCES` by our engine."""
    loaded = tiny.loaded(model, adapters=[adapter] if adapter else [])
    scored = loaded.score(SEQUENCES, [1] * len(SEQUENCES))
    return np.array([[one.logprob for one in row] for row in scored])


def by_transformers(wrapped: torch.nn.Module) -> np.ndarray:
    ids = torch.tensor(SEQUENCES)
    with torch.no_grad():
        logprobs = wrapped.eval()(ids).logits[:, :-1].double().log_softmax(-1)
    return logprobs.gather(-1, ids[:, 1:, None])[..., 0].numpy()


def same(one: np.ndarray, other: np.ndarray, plain: np.ndarray) -> None:
    np.testing.assert_allclose(one, other, rtol=0, atol=1e-4)
    assert np.abs(other - plain).max() > 0.1, "the adapter does something"


@pytest.mark.parametrize("rslora", [False, True])
def test_what_peft_trained_computes_the_same_here(model: Model, tmp_path: Path, rslora: bool) -> None:
    torch.manual_seed(0)
    targets = ["q_proj", "v_proj", "up_proj", "down_proj"]
    wrapped = get_peft_model(
        theirs(model),
        PeftConfig(r=6, lora_alpha=9, target_modules=targets, use_rslora=rslora, task_type="CAUSAL_LM"),
    )
    trained = [leaf for leaf in wrapped.parameters() if leaf.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=2e-2)
    ids, losses = torch.tensor(SEQUENCES), []
    for _ in range(8):
        loss = wrapped(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5
    wrapped.save_pretrained(tmp_path / "peft")
    adapter = load(str(tmp_path / "peft"))
    assert adapter.config.scale == pytest.approx(9 / (6**0.5 if rslora else 6))
    same(ours(model, adapter), by_transformers(wrapped), ours(model, None))


def test_what_we_trained_computes_the_same_in_peft(model: Model) -> None:
    config = LoraConfig(6, 9.0)
    torch_engine = engine("torch")
    plan = torch_engine.plan(model, Work("train", 4, 64, config, numerics="float32", device="cpu"))
    trainer = torch_engine.load(model, plan).trainer(config, initial(config, model.config, 0), Optimizer())
    for _ in range(8):
        trainer.step([micro_batch(SEQUENCES, [1] * 4)], lr=2e-2)
    adapter = Adapter(config, trainer.state().params, "tiny", model.fingerprint)
    folder = save("mine", adapter)
    with pytest.warns(UserWarning, match="Unexpected keyword arguments"):  # the fields of mlx-lm
        wrapped = PeftModel.from_pretrained(theirs(model), folder)
    same(by_transformers(wrapped), ours(model, adapter), ours(model, None))


def test_what_mlx_lm_writes_computes_the_same_here(model: Model, tmp_path: Path) -> None:
    """The files as mlx-lm's trainer leaves them: its names and shapes, and ``scale`` in place of alpha."""
    source = adapter_for(model.config, MODULES)
    config = {
        "fine_tune_type": "lora",
        "num_layers": 3,
        "lora_parameters": {"rank": 4, "dropout": 0.0, "scale": 2.0},
        "model": "tiny",
        "optimizer": "adam",
    }
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    save_file(
        {f"model.{key}": value for key, value in source.tensors.items()}, tmp_path / "adapters.safetensors"
    )
    with torch.no_grad():
        merged = theirs(model)
        for key, a in source.tensors.items():
            if key.endswith(".lora_a"):
                weight = merged.get_submodule(f"model.{key.removesuffix('.lora_a')}").weight
                weight += torch.from_numpy(2.0 * (a @ source.tensors[key[:-1] + "b"]).T)
    same(ours(model, load(str(tmp_path))), by_transformers(merged), ours(model, None))


def test_our_folder_has_what_vllm_asks_of_an_adapter(model: Model) -> None:
    """vLLM reads PEFT's layout strictly: module names by their last part, no bias, a rank for all."""
    folder = save("mine", adapter_for(model.config, MODULES))
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"], config["bias"]) == (
        "LORA",
        4,
        8.0,
        "none",
    )
    assert config["target_modules"] == [module.rpartition(".")[2] for module in MODULES]
    assert (config["modules_to_save"], config["use_dora"], config["use_rslora"]) == (None, False, False)
