"""The merged weights are the base's plus the adapter's product, in float32, and never whole in memory."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from export.conftest import Trained
from spillover.errors import ModelError
from spillover.export import merge
from spillover.export.folder import write_folder
from spillover.export.merge import Merged
from spillover.export.rounding import floats, rounded
from spillover.models import MODULES, Adapter, LoraConfig, resolve


def nothing(done: int, total: int) -> None:
    pass


def whole(merged: Merged, name: str, **how: int) -> np.ndarray:
    return np.concatenate([*merged.blocks(name, **how)])


@pytest.mark.parametrize("block", [merge.BLOCK, 4 * 64 * 6, 1])
def test_every_changed_matrix_is_the_sum(
    trained: Trained, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merge, "BLOCK", block)
    merged = Merged(trained.model, trained.adapter)
    stored = load_file(trained.model.path / "model.safetensors")
    assert len(merged.changed) == 3 * len(MODULES)
    for name, part in stored.items():
        wanted = part.double().numpy()
        stem = name.removeprefix("model.").removesuffix(".weight")
        if (a := trained.adapter.tensors.get(f"{stem}.lora_a")) is not None:
            b = trained.adapter.tensors[f"{stem}.lora_b"]
            wanted = wanted + 2.0 * (a.astype(np.float64) @ b.astype(np.float64)).T
            assert name in merged.changed
        np.testing.assert_allclose(whole(merged, name), wanted, rtol=0, atol=1e-6)


def test_blocks_are_of_whole_heads_where_that_is_asked(
    trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merge, "BLOCK", 4 * 64 * 20)
    merged = Merged(trained.model, trained.adapter)
    name = "model.layers.0.self_attn.q_proj.weight"
    lengths = [len(block) for block in merged.blocks(name, rows=16)]
    assert lengths == [16, 16, 16, 16]


def test_memory_does_not_grow_with_the_tensors(tmp_path: Path, base: Path, home: Path, monkeypatch) -> None:
    """A matrix of 32 MB, changed and rounded, through blocks of 1 MB."""
    from dataclasses import replace

    from safetensors.torch import save_file

    width, inner = 64, 65536
    model = resolve(str(base))
    config = replace(
        model.config, layers=1, intermediate_size=inner, windows=(None,), ropes=model.config.ropes[:1]
    )
    name = "model.layers.0.mlp.up_proj.weight"
    folder = tmp_path / "large"
    folder.mkdir()
    save_file({name: torch.ones(inner, width * 2)[:, :width].contiguous()}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    tensors = {
        "layers.0.mlp.up_proj.lora_a": np.ones((width, 4), np.float32),
        "layers.0.mlp.up_proj.lora_b": np.ones((4, inner), np.float32),
    }
    adapter = Adapter(LoraConfig(4, 4.0, ("mlp.up_proj",)), tensors)
    monkeypatch.setattr(merge, "BLOCK", 1 << 20)
    merged = Merged(replace(model, path=folder, config=config), adapter)
    (tmp_path / "out").mkdir()
    tracemalloc.start()
    write_folder(merged, tmp_path / "out", "bf16", nothing)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20
    written = load_file(tmp_path / "out" / "model.safetensors")[name]
    assert written.dtype == torch.bfloat16 and bool((written == 5).all())


def test_kinds_of_numbers_that_cannot_be_merged_are_named(base: Path, tmp_path: Path, home: Path) -> None:
    import shutil

    from safetensors.torch import save_file

    folder = tmp_path / "eight"
    shutil.copytree(base, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.float8_e4m3fn)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"model\.norm\.weight .* of kind F8_E4M3, which cannot be exported"):
        Merged(resolve(str(folder)), None)


def test_numbers_are_rounded_as_torch_rounds_them() -> None:
    source = np.random.default_rng(0)
    values = (source.normal(size=4096) * 10.0 ** source.uniform(-42, 4, 4096)).astype(np.float32)
    ties = np.array([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 0.0, -0.0, np.inf, -np.inf, np.nan], np.float32)
    values = np.concatenate([values, ties])
    for kind, dtype in (("BF16", torch.bfloat16), ("F16", torch.float16), ("F32", torch.float32)):
        stored = floats(rounded(values, kind).tobytes(), kind)
        np.testing.assert_array_equal(stored, torch.from_numpy(values).to(dtype).float().numpy())
        again = floats(rounded(stored, kind).tobytes(), kind)
        np.testing.assert_array_equal(again, stored)


def test_what_float16_cannot_hold_is_refused() -> None:
    with pytest.raises(OverflowError, match="70000 is more than float16 can hold"):
        rounded(np.array([1.0, 70000.0], np.float32), "F16")
    assert np.isinf(rounded(np.array([np.inf], np.float32), "F16")[0])
