"""The exported folder is one that transformers, and we, load as any model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from export.conftest import Trained
from export.families import adapter_for, build
from spillover.errors import ModelError
from spillover.export.folder import write_folder
from spillover.export.merge import Merged
from spillover.models import MODULES, WeightIndex, resolve

IDS = torch.tensor([[5, 9, 40, 7, 300, 2, 11]])


def nothing(done: int, total: int) -> None:
    pass


def exported(merged: Merged, folder: Path, kind: str | None = None) -> Path:
    folder.mkdir()
    write_folder(merged, folder, kind, nothing)
    return folder


def logits(folder: Path, **how: object) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **how).eval()
    with torch.no_grad():
        return model(IDS).logits


def test_transformers_loads_it_and_computes_the_adapted_model(trained: Trained, tmp_path: Path) -> None:
    folder = exported(Merged(trained.model, trained.adapter), tmp_path / "out")
    reference = AutoModelForCausalLM.from_pretrained(trained.model.path, dtype=torch.float32).eval()
    with torch.no_grad():
        before = reference(IDS).logits
        for key, a in trained.adapter.tensors.items():
            if key.endswith(".lora_a"):
                b = trained.adapter.tensors[key[:-1] + "b"]
                weight = reference.get_submodule(f"model.{key.removesuffix('.lora_a')}").weight
                weight += torch.from_numpy(trained.adapter.config.scale * (a @ b).T)
        wanted = reference(IDS).logits
    torch.testing.assert_close(logits(folder), wanted, atol=1e-4, rtol=1e-4)
    assert (wanted - before).abs().max() > 0.1
    theirs = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": "What is the weather in Rome?"}]
    text = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == trained.model.tokenizer().render(messages)


def test_without_an_adapter_it_is_the_base_byte_for_byte(half: Path, home: Path, tmp_path: Path) -> None:
    model = resolve(str(half))
    folder = exported(Merged(model, None), tmp_path / "out")
    for path in half.iterdir():
        if path.suffix == ".json":
            assert (folder / path.name).read_bytes() == path.read_bytes()
    one, other = load_file(half / "model.safetensors"), load_file(folder / "model.safetensors")
    assert all(torch.equal(one[name].view(torch.int16), other[name].view(torch.int16)) for name in one)
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}, "or transformers refuses it"


def test_the_dtype_is_the_bases_unless_another_is_asked_for(half: Path, home: Path, tmp_path: Path) -> None:
    model = resolve(str(half))
    merged = Merged(model, adapter_for(model.config, MODULES))
    kept = load_file(exported(merged, tmp_path / "kept") / "model.safetensors")
    assert {tensor.dtype for tensor in kept.values()} == {torch.bfloat16}
    exact = load_file(exported(merged, tmp_path / "exact", "f32") / "model.safetensors")
    for name, tensor in kept.items():
        assert exact[name].dtype == torch.float32
        assert torch.equal(exact[name].to(torch.bfloat16), tensor), "rounded once"
    config = json.loads((tmp_path / "exact" / "config.json").read_text())
    assert config["dtype"] == "float32"
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "exact").dtype == torch.float32
    assert resolve(str(tmp_path / "exact")).config.dtype == "float32"


def test_shards_stay_shards(home: Path, tmp_path: Path) -> None:
    model = build(tmp_path / "one", "llama")
    sharded = tmp_path / "sharded"
    whole = AutoModelForCausalLM.from_pretrained(model.path)
    whole.save_pretrained(sharded, max_shard_size="100KB")
    for path in model.path.glob("tok*.json"):
        shutil.copy(path, sharded)
    base = resolve(str(sharded))
    assert len(base.index().files) > 2
    adapter = adapter_for(base.config, MODULES)
    folder = exported(Merged(base, adapter), tmp_path / "out", "bf16")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == WeightIndex(folder).bytes
    assert (
        index["weight_map"]
        == json.loads((sharded / "model.safetensors.index.json").read_text())["weight_map"]
    )
    single = exported(Merged(model, adapter), tmp_path / "single", "bf16")
    assert torch.equal(logits(folder), logits(single))


def test_what_the_adapter_leaves_alone_is_copied_with_any_dtype(home: Path, tmp_path: Path) -> None:
    """The rest of a multimodal model comes along."""
    from dataclasses import replace

    from engine import tiny

    folder = tmp_path / "model"
    tiny.build(folder, "gemma3-multimodal")
    model = tiny.ours(folder)
    adapter = adapter_for(model.config, ("self_attn.q_proj",))
    written = load_file(exported(Merged(replace(model), adapter), tmp_path / "out") / "model.safetensors")
    stored = load_file(folder / "model.safetensors")
    assert written.keys() == stored.keys()
    changed = {name for name in stored if not torch.equal(stored[name], written[name])}
    assert changed == {f"language_model.model.layers.{k}.self_attn.q_proj.weight" for k in range(3)}


def test_numbers_that_float16_cannot_hold_name_their_tensor(home: Path, tmp_path: Path, base: Path) -> None:
    from safetensors.torch import save_file

    folder = tmp_path / "big"
    shutil.copytree(base, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][3] = 1e5
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ModelError, match=r"model\.norm\.weight: 100000 is more than float16 can hold"
    ) as caught:
        exported(Merged(resolve(str(folder)), None), tmp_path / "out", "f16")
    assert caught.value.hint == "use --type bf16"
