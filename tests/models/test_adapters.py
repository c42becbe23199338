"""Adapter folders move between spillover, PEFT and mlx-lm without a change."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig as PeftConfig
from peft import PeftModel, get_peft_model
from safetensors.numpy import load_file, save_file
from transformers import LlamaForCausalLM

from spillover.errors import InputError, ModelError
from spillover.models import MODULES, Adapter, LoraConfig, ModelConfig, initial, parse_targets
from spillover.models.adapters import installed_adapters, load, save

peft_asks_transformers = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
IDS = torch.tensor([[5, 9, 40, 7, 300, 2, 11]])


@pytest.fixture
def model_config(tiny: Path) -> ModelConfig:
    return ModelConfig.read(tiny)


def random_adapter(config: ModelConfig, **changes: Any) -> Adapter:
    lora = LoraConfig(**({"rank": 4, "alpha": 12.0} | changes))
    rng = np.random.default_rng(1)
    tensors = initial(lora, config, seed=3)
    for key in tensors:
        if key.endswith("_b"):
            tensors[key] = rng.normal(0, 0.3, tensors[key].shape).astype(np.float32)
    return Adapter(lora, tensors, base="demo", fingerprint="f" * 64)


def base(tiny: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(tiny, dtype=torch.float32).eval()


def merged_logits(tiny: Path, adapter: Adapter) -> torch.Tensor:
    """Logits of the base with ``W + scale (A B)^T`` written into every adapted layer."""
    model = base(tiny)
    with torch.no_grad():
        for key, a in adapter.tensors.items():
            if not key.endswith(".lora_a"):
                continue
            b = adapter.tensors[key[:-1] + "b"]
            weight = model.get_submodule(f"model.{key.removesuffix('.lora_a')}").weight
            weight += torch.from_numpy(adapter.config.scale * (a @ b).T)
        return model(IDS).logits


@peft_asks_transformers
@pytest.mark.parametrize("targets", ["all", "q_proj,v_proj"])
def test_peft_loads_our_folder_as_it_is(
    tiny: Path, home: Path, model_config: ModelConfig, targets: str
) -> None:
    adapter = random_adapter(model_config, targets=parse_targets(targets))
    folder = save("mine", adapter)
    with pytest.warns(UserWarning, match="Unexpected keyword arguments"):  # the fields of mlx-lm
        theirs = PeftModel.from_pretrained(base(tiny), folder)
    with torch.no_grad():
        logits = theirs(IDS).logits
        plain = base(tiny)(IDS).logits
    torch.testing.assert_close(logits, merged_logits(tiny, adapter), atol=1e-5, rtol=1e-5)
    assert (logits - plain).abs().max() > 0.05, "the adapter does something"


@peft_asks_transformers
@pytest.mark.parametrize("rslora", [False, True])
def test_we_load_what_peft_made(tiny: Path, tmp_path: Path, rslora: bool) -> None:
    torch.manual_seed(0)
    config = PeftConfig(
        r=4, lora_alpha=6, target_modules=["q_proj", "down_proj"], use_rslora=rslora, init_lora_weights=False,
        task_type="CAUSAL_LM", layers_to_transform=[1],
    )  # fmt: skip
    theirs = get_peft_model(base(tiny), config).eval()
    theirs.save_pretrained(tmp_path)
    adapter = load(str(tmp_path))
    assert adapter.config.scale == pytest.approx(6 / 2 if rslora else 6 / 4)
    assert adapter.config.targets == ("self_attn.q_proj", "mlp.down_proj")
    assert {key.split(".")[1] for key in adapter.tensors} == {"1"}
    with torch.no_grad():
        torch.testing.assert_close(merged_logits(tiny, adapter), theirs(IDS).logits, atol=1e-5, rtol=1e-5)


def test_a_round_trip_is_exact(home: Path, model_config: ModelConfig) -> None:
    adapter = random_adapter(model_config, dropout=0.1)
    folder = save("mine", adapter)
    again = load("mine")
    assert (again.config, again.base, again.fingerprint) == (adapter.config, "demo", "f" * 64)
    assert again.tensors.keys() == adapter.tensors.keys()
    assert all(np.array_equal(again.tensors[key], adapter.tensors[key]) for key in again.tensors)
    assert sorted(path.name for path in folder.iterdir()) == [
        "adapter_config.json", "adapter_model.safetensors", "adapters.safetensors",
    ]  # fmt: skip
    again.check(model_config)


def test_the_mlx_layout_beside_it_is_the_same_adapter(
    home: Path, tmp_path: Path, model_config: ModelConfig
) -> None:
    adapter = random_adapter(model_config)
    folder = save("mine", adapter)
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["fine_tune_type"], config["num_layers"]) == ("lora", 2)
    assert config["lora_parameters"] == {"rank": 4, "scale": 3.0, "dropout": 0.0, "keys": list(MODULES)}
    alone = tmp_path / "mlx"
    alone.mkdir()
    shutil.copy(folder / "adapters.safetensors", alone)
    keys = ("fine_tune_type", "num_layers", "lora_parameters")
    (alone / "adapter_config.json").write_text(json.dumps({key: config[key] for key in keys}))
    stored = load_file(alone / "adapters.safetensors")
    assert stored["model.layers.0.self_attn.q_proj.lora_a"].shape == (32, 4)
    again = load(str(alone))
    assert again.config.scale == adapter.config.scale
    assert all(np.array_equal(again.tensors[key], adapter.tensors[key]) for key in adapter.tensors)


def test_half_precision_tensors_become_float32(home: Path, model_config: ModelConfig) -> None:
    from safetensors.torch import save_file as save_torch

    adapter = random_adapter(model_config)
    folder = save("mine", adapter)
    tensors = load_file(folder / "adapter_model.safetensors")
    save_torch(
        {key: torch.from_numpy(value).to(torch.bfloat16) for key, value in tensors.items()},
        folder / "adapter_model.safetensors",
    )
    for key, value in load("mine").tensors.items():
        assert value.dtype == np.float32
        assert np.array_equal(
            value, torch.from_numpy(adapter.tensors[key]).to(torch.bfloat16).float().numpy()
        )


def test_names_are_taken_once(home: Path, model_config: ModelConfig) -> None:
    adapter = random_adapter(model_config)
    save("mine", adapter)
    with pytest.raises(InputError, match="'mine' exists already") as caught:
        save("mine", adapter)
    assert "--overwrite" in str(caught.value.hint)
    save("mine", random_adapter(model_config, rank=2), overwrite=True)
    assert load("mine").config.rank == 2
    assert [path.name for path in (home / "adapters").iterdir()] == ["mine"]
    for name in ("", "a/b", "..", ".x", "a b", "x+y"):
        with pytest.raises(InputError, match="no adapter name"):
            save(name, adapter)


def test_listing_and_near_names(home: Path, model_config: ModelConfig) -> None:
    assert installed_adapters() == []
    save("banking", random_adapter(model_config))
    (home / "adapters" / "unfinished").mkdir()
    (home / "adapters" / "broken").mkdir()
    (home / "adapters" / "broken" / "adapter_config.json").write_text("{")
    (found,) = installed_adapters()
    assert (found.name, found.base, found.rank) == ("banking", "demo", 4)
    with pytest.raises(ModelError, match="there is no adapter 'bankin'") as caught:
        load("bankin")
    assert caught.value.hint == "use banking"


def change(folder: Path, **fields: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"use_dora": True}, "uses DoRA"),
        ({"peft_type": "IA3"}, "uses peft_type IA3"),
        ({"bias": "all"}, r"uses trained biases \(bias all\)"),
        ({"modules_to_save": ["lm_head"]}, "uses modules_to_save"),
        ({"rank_pattern": {"q_proj": 8}}, "uses rank_pattern"),
        ({"r": 8}, "says rank 8, but .* has 4"),
        ({"r": "many"}, r"adapter_config\.json holds a value of the wrong kind"),
    ],
)
def test_unsupported_kinds_are_named(
    home: Path, model_config: ModelConfig, fields: dict[str, Any], message: str
) -> None:
    change(save("mine", random_adapter(model_config)), **fields)
    with pytest.raises(ModelError, match=message):
        load("mine")


def test_unknown_tensors_are_named(home: Path, model_config: ModelConfig) -> None:
    folder = save("mine", random_adapter(model_config))
    path = folder / "adapter_model.safetensors"
    good = load_file(path)
    for key in (
        "base_model.model.lm_head.lora_A.weight",
        "base_model.model.model.embed_tokens.lora_embedding_A",
        "base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector.weight",
        "base_model.model.model.layers.0.block_sparse_moe.gate.lora_A.weight",
    ):
        save_file(good | {key: np.zeros((4, 4), np.float32)}, path)
        with pytest.raises(ModelError, match=f"changes {key}, which is not supported"):
            load("mine")
    half = "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"
    save_file({key: value for key, value in good.items() if key != half}, path)
    with pytest.raises(
        ModelError, match=r"has layers\.0\.mlp\.up_proj\.lora_b but no layers\.0\.mlp\.up_proj\.lora_a"
    ):
        load("mine")
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(ModelError, match="is truncated"):
        load("mine")
    path.unlink()
    with pytest.raises(ModelError, match=r"adapter_model\.safetensors is missing"):
        load("mine")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 64}, r"layers\.0\.\S+ has 32 (inputs|outputs), this model has 64"),
        ({"layers": 1}, "changes layer 1, this model has 1 layers"),
        ({"intermediate_size": 96}, r"layers\.0\.mlp\.\S+ has 64 (inputs|outputs), this model has 96"),
    ],
)
def test_another_base_is_refused_by_the_differing_fact(model_config: ModelConfig, changes, message) -> None:
    from dataclasses import replace

    adapter = random_adapter(model_config)
    with pytest.raises(ModelError, match=f"mine was made for another base: .*{message}"):
        adapter.check(replace(model_config, **changes), name="mine")


def test_other_weights_of_the_same_shape_are_refused(model_config: ModelConfig) -> None:
    adapter = random_adapter(model_config)
    adapter.check(model_config, fingerprint="f" * 64)
    with pytest.raises(
        ModelError, match="trained on demo with fingerprint ffffffffffff, this model has 0000"
    ):
        adapter.check(model_config, fingerprint="0" * 64)


def test_initial_values_depend_on_seed_layer_and_module_alone(model_config: ModelConfig) -> None:
    everything = initial(LoraConfig(rank=4), model_config, seed=7)
    some = initial(LoraConfig(rank=4, targets=("mlp.up_proj",)), model_config, seed=7)
    key = "layers.1.mlp.up_proj.lora_a"
    assert np.array_equal(everything[key], some[key])
    assert not np.array_equal(everything[key], initial(LoraConfig(rank=4), model_config, seed=8)[key])
    assert len({value.tobytes() for name, value in everything.items() if name.endswith("_a")}) == 14
    bound = 1 / np.sqrt(32)
    values = np.concatenate(
        [value.ravel() for name, value in everything.items() if name.endswith("q_proj.lora_a")]
    )
    assert values.dtype == np.float32
    assert np.abs(values).max() <= bound and values.std() == pytest.approx(bound / np.sqrt(3), rel=0.1)
    assert not any(value.any() for name, value in everything.items() if name.endswith("_b"))
    assert float(everything[key][0, 0]) == pytest.approx(PINNED, abs=0), "the same on every machine"


PINNED = -0.16587726771831512


def test_targets() -> None:
    assert parse_targets("all") == MODULES
    assert parse_targets("v_proj, q_proj") == ("self_attn.q_proj", "self_attn.v_proj")
    for text in ("lm_head", "", "q_proj,nope"):
        with pytest.raises(ModelError, match="is no module to adapt"):
            parse_targets(text)
    with pytest.raises(ModelError, match="rank 0"):
        LoraConfig(rank=0)


def test_a_reader_never_sees_half_an_adapter(home: Path, model_config: ModelConfig) -> None:
    """A process overwrites the adapter without pause until it is killed; every load meanwhile is whole."""
    save("mine", random_adapter(model_config, rank=2))
    code = """
import sys; from spillover.models.adapters import load, save
one = load("mine"); print("ready", flush=True)
while True: save("mine", one, overwrite=True)
"""
    child = subprocess.Popen(
        [sys.executable, "-c", code], env={**os.environ, "SPILL_HOME": str(home)}, stdout=subprocess.PIPE
    )
    assert child.stdout is not None and child.stdout.readline() == b"ready\n"
    stop = time.monotonic() + 1.5
    while time.monotonic() < stop:
        assert (home / "adapters" / "mine" / "adapter_config.json").exists()
    child.kill()
    child.wait()
    child.stdout.close()
    assert load("mine").config.rank == 2
    assert [adapter.name for adapter in installed_adapters()] == ["mine"]
