"""Damaged weight files are found from their headers, before anything is computed."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from models.folders import tiny_llama
from spillover.errors import ModelError
from spillover.models import ModelConfig, WeightIndex, resolve


@pytest.fixture
def folder(tiny: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny, tmp_path / "model"))


def sharded(folder: Path) -> Path:
    """Split ``model.safetensors`` in two with an index, as large models come."""
    tensors = {name: np.zeros(part.shape, np.float16) for name, part in WeightIndex(folder).tensors.items()}
    names = sorted(tensors)
    (folder / "model.safetensors").unlink()
    weight_map = {}
    for shard, half in enumerate((names[:9], names[9:]), start=1):
        file = f"model-0000{shard}-of-00002.safetensors"
        save_file({name: tensors[name] for name in half}, folder / file)
        weight_map |= dict.fromkeys(half, file)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    return folder


def test_slices_are_where_the_bytes_are(folder: Path) -> None:
    rng = np.random.default_rng(0)
    values = {
        "b": rng.random((3, 5), np.float32),
        "a": rng.integers(0, 9, (7,), np.int64),
        "e": np.zeros((0, 4), np.float32),
    }
    save_file(values, folder / "model.safetensors")
    index = WeightIndex(folder)
    assert index.bytes == 3 * 5 * 4 + 7 * 8
    for name, array in values.items():
        part = index.tensors[name]
        data = part.file.read_bytes()[part.start : part.stop]
        assert np.array_equal(np.frombuffer(data, array.dtype).reshape(part.shape), array)


def test_real_folders_pass(folder: Path) -> None:
    WeightIndex(folder).check(ModelConfig.read(folder))
    WeightIndex(sharded(folder)).check(ModelConfig.read(folder))


@pytest.mark.parametrize(
    "family", ["Qwen2", "Qwen3", "Mistral", "Phi3", "Gemma2", "Gemma3", "Mixtral", "Qwen3Moe"]
)
def test_names_and_shapes_of_every_family(family: str, tmp_path: Path) -> None:
    import transformers

    shape = {
        "vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "tie_word_embeddings": family in ("Qwen2", "Gemma2", "Gemma3"),
        "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
    }  # fmt: skip
    if family in ("Qwen2", "Phi3"):
        del shape["head_dim"]
    if family in ("Mixtral", "Qwen3Moe"):
        shape |= {"num_local_experts": 3, "num_experts_per_tok": 2}
    if family == "Qwen3Moe":
        shape |= {"mlp_only_layers": [0], "moe_intermediate_size": 24}
    kind = {"Gemma3": "Gemma3Text"}.get(family, family)
    model = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{kind}Config")(**shape))
    model.save_pretrained(tmp_path)
    index = WeightIndex(tmp_path)
    index.check(ModelConfig.read(tmp_path))
    from spillover.models.index import expected

    assert {name for name, _ in expected(ModelConfig.read(tmp_path))} == set(index.tensors)


def refusal(folder: Path) -> str:
    with pytest.raises(ModelError) as caught:
        WeightIndex(folder).check(ModelConfig.read(folder))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_missing_files(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert "model.safetensors is missing" in refusal(folder)


def test_stale_index(folder: Path) -> None:
    path = sharded(folder) / "model.safetensors.index.json"
    good = json.loads(path.read_text())
    (folder / "model-00002-of-00002.safetensors").rename(folder / "aside")
    assert "model-00002-of-00002.safetensors, named by model.safetensors.index.json, is missing" in refusal(
        folder
    )
    (folder / "aside").rename(folder / "model-00002-of-00002.safetensors")
    good["weight_map"]["model.layers.7.gone"] = "model-00001-of-00002.safetensors"
    path.write_text(json.dumps(good))
    assert "names tensor model.layers.7.gone, which no shard holds" in refusal(folder)
    path.write_text(json.dumps({"weight_map": {"a": "../../etc/passwd"}}))
    assert "outside its folder" in refusal(folder)
    path.write_text("{}")
    assert "has no weight_map" in refusal(folder)


@pytest.mark.parametrize("keep", [0, 5, 8, 100])
def test_truncated_inside_the_header(folder: Path, keep: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    assert (
        "truncated inside its header" in refusal(folder)
        if keep >= 8
        else "is not a safetensors file" in refusal(folder)
    )


def test_truncated_by_one_byte(folder: Path) -> None:
    path = folder / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    assert f"is truncated: {len(data) - 1:,} of {len(data):,} bytes" in refusal(folder)


@pytest.mark.parametrize(
    "header",
    [
        b"\xff" * 64,
        b"[]",
        b'{"a": 1}',
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 7]}}',
        b"[" * 5000,
    ],
    ids=["bytes", "list", "number", "offsets", "nesting"],
)
def test_garbage_headers(folder: Path, header: bytes) -> None:
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 64)
    assert "damaged safetensors header" in refusal(folder)


def test_text_is_no_safetensors(folder: Path) -> None:
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    assert "is not a safetensors file" in refusal(folder)


def test_tensors_must_fit_the_architecture(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = {name: np.zeros(part.shape, np.float16) for name, part in WeightIndex(folder).tensors.items()}
    embedding = tensors.pop("model.embed_tokens.weight")
    save_file(tensors | {"model.embed_tokens.weight": embedding[:300]}, path)
    assert "the vocabulary has 416 tokens, the embedding 300 rows" in refusal(folder)
    save_file(tensors | {"model.embed_tokens.weight": embedding[:, :16]}, path)
    assert "is (416, 16), but config.json makes it (416, 32)" in refusal(folder)
    gone = "model.layers.1.mlp.up_proj.weight"
    save_file(
        {name: value for name, value in tensors.items() if name != gone}
        | {"model.embed_tokens.weight": embedding},
        path,
    )
    assert f"no tensor {gone}, which LlamaForCausalLM needs" in refusal(folder)


def test_tokenizer_larger_than_the_embedding(tmp_path: Path, home: Path) -> None:
    folder = tiny_llama(tmp_path / "small", vocab_size=300)
    with pytest.raises(ModelError, match="the tokenizer has 409 tokens, the embedding only 300 rows"):
        resolve(str(folder)).tokenizer()


def test_an_untied_head_is_needed(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))
    assert "no tensor lm_head.weight" in refusal(folder)
