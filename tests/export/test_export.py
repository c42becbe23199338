"""Whole exports: published with their figures when they agree, and not at all when they do not."""

from __future__ import annotations

import hashlib
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from safetensors.numpy import load_file, save_file

from cli.test_full_disk import Disk
from export.conftest import Trained
from export.families import adapter_for, build
from spillover.errors import InputError, ModelError, SpillError, StoreError, StoreFull
from spillover.export import export as module
from spillover.export import publish
from spillover.export.export import Exported, Record, export_model
from spillover.export.gguf import vocabulary, writer
from spillover.export.settings import ExportSettings
from spillover.models import MODULES, resolve
from spillover.models.adapters import save

SPILL = Path(sys.executable).with_name("spill")


def export(model: str, to: Path | None, **settings: Any) -> Exported:
    return export_model(ExportSettings(model, to, **settings), report=lambda stage, done, total: None)


def refused(model: str, to: Path, **settings: Any) -> SpillError:
    """The error of an export that left nothing behind."""
    before = {path: path.stat().st_mtime_ns for path in to.parent.iterdir()}
    with pytest.raises(SpillError) as caught:
        export(model, to, **settings)
    assert {path: path.stat().st_mtime_ns for path in to.parent.iterdir()} == before
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """An empty folder for exports."""
    (tmp_path / "place").mkdir()
    return tmp_path / "place"


def test_a_folder_is_published_with_its_figures(trained: Trained, place: Path) -> None:
    stages: dict[str, tuple[int, int]] = {}
    settings = ExportSettings(trained.name, place / "out")
    exported = export_model(
        settings, report=lambda stage, done, total: stages.__setitem__(stage, (done, total))
    )
    assert exported.path == place / "out" and [*place.iterdir()] == [place / "out"]
    record = msgspec.json.decode((place / "out" / "export.json").read_bytes(), type=Record)
    assert record == exported.record
    assert (record.model, record.format, record.type) == (trained.name, "safetensors", "f32")
    assert record.fingerprint == trained.model.fingerprint and len(record.adapter or "") == 64
    assert (record.parity.rows, record.parity.same_prompts, record.parity.agreement) == (57, 57, 1.0)
    assert record.parity.agree == record.parity.tokens > 57
    assert 0 < record.parity.logprob_mean_difference <= record.parity.logprob_max_difference < 1e-3
    assert record.prompts == "prompts.jsonl" and record.versions["torch"]
    assert set(record.files) == {path.name for path in (place / "out").iterdir()} - {"export.json"}
    for name, file in record.files.items():
        data = (place / "out" / name).read_bytes()
        assert (file.bytes, file.sha256) == (len(data), hashlib.sha256(data).hexdigest())
    assert (record.parity.adapter_mean_difference or 0) > 0.01
    for stage in ("asking the trained model", "writing"):
        assert stages[stage][0] == stages[stage][1] > 0
    assert resolve(str(place / "out")).tokenizer().vocab_size == trained.model.tokenizer().vocab_size


def test_a_gguf_file_comes_with_its_companions(trained: Trained, place: Path) -> None:
    exported = export(trained.name, place / "x.gguf", type="q8_0", ollama=True, bound=0.5)
    names = sorted(path.name for path in place.iterdir())
    assert names == ["x.Modelfile", "x.export.json", "x.gguf"]
    assert exported.path == place / "x.gguf"
    record = msgspec.json.decode((place / "x.export.json").read_bytes(), type=Record)
    assert (record.format, record.type, record.bound) == ("gguf", "q8_0", 0.5)
    assert record.files["x.gguf"].bytes == (place / "x.gguf").stat().st_size
    assert record.parity.agree < record.parity.tokens > record.parity.clear > 0
    assert record.parity.agreement == record.parity.clear_agree / record.parity.clear >= 0.5
    assert (place / "x.Modelfile").read_text().startswith("FROM ./x.gguf\n")
    differing = [one for one in record.parity.differing if one.agree < one.tokens]
    assert (
        differing
        and sum(one.tokens - one.agree for one in differing) == record.parity.tokens - record.parity.agree
    )


def test_names_are_made_of_the_models(trained: Trained, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    assert export(trained.name, None, format="gguf", type="f32").path == place / "tiny-mine-f32.gguf"
    (place / "tiny-export").mkdir()
    with pytest.raises(InputError, match="tiny-export exists already"):
        export(str(trained.model.path), None)


def test_what_answers_otherwise_is_refused_and_its_rows_are_named(
    trained: Trained, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queries and keys in the order of another runner: the mistake that such files are known for."""
    monkeypatch.setattr(writer, "interleaved", lambda rows, head: rows)
    error = refused(trained.name, place / "x.gguf", type="f32", format="gguf")
    assert isinstance(error, ModelError)
    assert "the export is refused: it agrees on" in str(error) and "rows differ: prompts.jsonl:" in str(error)


@pytest.mark.slow
def test_a_weak_adapter_must_be_there_too(
    base: Path, home: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most tokens agree with the base alone: log-probabilities tell that the adapter is missing."""
    model = resolve(str(base))
    save("weak", adapter_for(model.config, MODULES, scale=0.002))
    monkeypatch.setitem(module.BOUNDS, "f32", 0.9)  # as for a type that rounds
    merged = module.Merged
    monkeypatch.setattr(module, "Merged", lambda model, adapter: merged(model, None))
    error = refused(f"{base}+weak", place / "out", tokens=8)
    assert "what was trained is lost" in str(error)
    exported = export(f"{base}+weak", place / "out", tokens=8, bound=0.9)
    parity = exported.record.parity
    assert parity.agreement > 0.9
    assert parity.logprob_mean_difference == pytest.approx(parity.adapter_mean_difference, rel=1e-3)
    assert exported.record.notes == ["what the adapter changes is about as small as what the type rounds"]


def test_near_ties_count_for_nothing_and_every_row_is_named_that_differs() -> None:
    from spillover.export.answers import Question, Reply
    from spillover.export.check import Scored
    from spillover.export.parity import _compare, judge

    asked = [Question(f"x:{n}", [], None, [1]) for n in range(3)]
    replies = [
        Reply([5, 6], [-0.1, -0.7], [2.0, 0.1]),
        Reply([7, 8], [-0.2, -0.3], [1.0, 1.5]),
        Reply([9], [-1.0], [3.0]),
    ]
    rows = [Scored(True, [5, 4], [-0.1, -0.8]), Scored(True, [7, 3], [-0.2, -0.9]), Scored(True, [9], [-1.0])]
    parity = _compare(asked, replies, rows)
    assert (parity.tokens, parity.agree, parity.clear, parity.clear_agree, parity.agreement) == (
        5,
        3,
        4,
        3,
        0.75,
    )
    assert [(one.row, one.agree, one.wrong) for one in parity.differing] == [("x:0", 1, 0), ("x:1", 1, 1)]
    assert parity.logprob_mean_difference == pytest.approx(0.14) and parity.adapter_mean_difference is None
    judge(parity, 0.75)
    with pytest.raises(ModelError, match=r"3 of 4 clear tokens \(75\.00%, .*; 1 of 3 rows differ: x:1"):
        judge(parity, 0.76)


@pytest.mark.slow
def test_a_tokenizer_that_cuts_otherwise_is_refused(
    trained: Trained, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vocabulary, "_pre", lambda path, document: "llama-bpe")
    error = refused(trained.name, place / "x.gguf", type="f32", format="gguf")
    assert "its tokenizer makes other tokens of" in str(error) and "prompts.jsonl:" in str(error)
    assert error.hint == "export safetensors, which keeps the tokenizer as it is"


@pytest.mark.slow
def test_files_that_do_not_run_are_refused_in_one_line(
    trained: Trained, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = module.folders.write_folder

    def damaged(merged: Any, folder: Path, *rest: Any) -> None:
        write(merged, folder, *rest)
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-1])

    monkeypatch.setattr(module.folders, "write_folder", damaged)
    error = refused(trained.name, place / "out")
    assert "the exported files do not run" in str(error) and "is truncated" in str(error)


@pytest.mark.slow
def test_rows_of_ones_own_are_compared(trained: Trained, tmp_path: Path, place: Path) -> None:
    rows = tmp_path / "mine.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"What is {n} and {n}?"}) + "\n" for n in range(50)))
    exported = export(trained.name, place / "out", parity=rows, tokens=4)
    assert (exported.record.parity.rows, exported.record.prompts) == (50, "mine.jsonl")
    assert exported.record.parity.tokens <= 200
    rows.write_text(rows.read_text().partition("\n")[0] + "\n")
    error = refused(trained.name, place / "other", parity=rows)
    assert "mine.jsonl has 1 rows; answers to at least 50 are compared" in str(error)
    rows.write_text('{"prompt": "' + "long " * 600 + '"}\n' + '{"prompt": "x"}\n' * 49)
    assert "mine.jsonl:1: a prompt of" in str(refused(trained.name, place / "other", parity=rows))


def test_only_an_export_is_replaced_and_only_when_asked(trained: Trained, place: Path) -> None:
    (place / "out").mkdir()
    (place / "out" / "thesis.txt").write_text("x")
    with pytest.raises(InputError, match="out exists already") as caught:
        export(trained.name, place / "out")
    assert "--overwrite" in str(caught.value.hint)
    with pytest.raises(InputError, match="out is no export: it is not replaced"):
        export(trained.name, place / "out", overwrite=True)
    assert (place / "out" / "thesis.txt").read_text() == "x"
    (place / "out" / "export.json").write_text("{}")
    export(trained.name, place / "out", overwrite=True)
    assert not (place / "out" / "thesis.txt").exists() and [*place.iterdir()] == [place / "out"]


def test_two_exports_to_one_place_do_not_mix(trained: Trained, place: Path) -> None:
    with publish.workplace(place / "out"), pytest.raises(InputError, match="another process is exporting to"):
        export(trained.name, place / "out")
    assert [*place.iterdir()] == []


def start(trained: Trained, place: Path) -> subprocess.Popen[bytes]:
    command = [SPILL, "export", trained.name, "--to", str(place / "out")]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


@pytest.mark.parametrize("number", [pytest.param(signal.SIGKILL, marks=pytest.mark.slow), signal.SIGTERM])
def test_an_export_that_is_ended_publishes_nothing(
    trained: Trained, place: Path, number: signal.Signals
) -> None:
    child = start(trained, place)
    partial = place / ".out.partial"
    while not (partial / "made" / "tokenizer.json").exists() and child.poll() is None:
        time.sleep(0.001)
    child.send_signal(number)
    code = child.wait(60)
    assert not (place / "out").exists()
    if number == signal.SIGTERM:
        assert code == 75 and [*place.iterdir()] == []
        return
    assert code == -number and [*place.iterdir()] == [partial]
    export(trained.name, place / "out")
    assert [*place.iterdir()] == [place / "out"]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    disk = Disk(tmp_path / "disk")
    yield disk
    disk.close()


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"format": "gguf"}])
def test_a_full_disk_is_one_line(trained: Trained, disk: Disk, settings: dict, monkeypatch) -> None:
    disk.fill(leaving=200 << 10)
    error = refused(trained.name, disk.folder / "out", **settings)
    assert isinstance(error, StoreFull) and "the export takes 0.00 GB with its check" in str(error)
    monkeypatch.setattr(module, "check_room", lambda needed, target: None)
    error = refused(trained.name, disk.folder / "out", **settings)
    assert isinstance(error, StoreFull) and str(error).startswith("no space left for")
    disk.make_room()
    export(trained.name, disk.folder / "out", bound=0.5, **settings)


@pytest.mark.slow
def test_a_disk_that_fills_during_the_check_is_one_line(trained: Trained, disk: Disk, monkeypatch) -> None:
    """The file fits, and what it is read back into does not."""
    size = writer.size_of(module.Merged(trained.model, trained.adapter), "f32")
    disk.fill(leaving=size + size // 2)
    monkeypatch.setattr(module, "check_room", lambda needed, target: None)
    error = refused(trained.name, disk.folder / "out", format="gguf", type="f32")
    assert "the export cannot be checked: No space left on device" in str(error)


def test_a_place_that_cannot_be_written_is_one_line(trained: Trained, place: Path) -> None:
    (place / "file").write_text("x")
    with pytest.raises(StoreError, match="out cannot be written: Not a directory"):
        export(trained.name, place / "file" / "out")


@pytest.mark.parametrize(
    ("settings", "words", "hint"),
    [
        ({"format": "onnx"}, "--format onnx is unknown", "use safetensors or gguf"),
        ({"type": "q4_0"}, "--type q4_0 is unknown", "use f32, f16, bf16, q8_0"),
        (
            {"format": "safetensors", "type": "q8_0"},
            "safetensors cannot be of type q8_0",
            "--format gguf --type q8_0",
        ),
        ({"ollama": True}, "a Modelfile goes with a GGUF file", "add --format gguf"),
        ({"bound": 97.0}, "--bound 97.0 is no share", "--bound 0.97"),
        ({"tokens": 0}, "--tokens 0 makes no sense", "--tokens 32"),
    ],
)
def test_settings_that_make_no_sense(settings: dict, words: str, hint: str) -> None:
    with pytest.raises(InputError) as caught:
        ExportSettings("demo", **settings)
    assert (str(caught.value), caught.value.hint) == (words, hint)
    with pytest.raises(InputError, match=r"x\.gguf is the name of a GGUF file"):
        ExportSettings("demo", Path("x.gguf"), "safetensors")


def change(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


class Hostile:
    """Ways to spoil a copy of the base, or its adapter; each says what the one line names."""

    def dora(self, base: Path, adapter: Path) -> str:
        change(adapter / "adapter_config.json", use_dora=True)
        return "uses DoRA (use_dora), which is not supported"

    def unknown_module(self, base: Path, adapter: Path) -> str:
        path = adapter / "adapter_model.safetensors"
        key = "base_model.model.lm_head.lora_A.weight"
        tensors = load_file(path)
        save_file(tensors | {key: tensors[next(iter(tensors))]}, path)
        return f"changes {key}, which is not supported"

    def wrong_base(self, base: Path, adapter: Path) -> str:
        change(adapter / "adapter_config.json", spillover={"base": "other", "fingerprint": "f" * 64})
        return "made for another base: it was trained on other with fingerprint ffffffffffff"

    def missing_shard(self, base: Path, adapter: Path) -> str:
        names = load_file(base / "model.safetensors")
        index = {"weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors")}
        (base / "model.safetensors.index.json").write_text(json.dumps(index))
        return "model-00001-of-00001.safetensors, named by model.safetensors.index.json, is missing"

    def stale_index(self, base: Path, adapter: Path) -> str:
        names = [*load_file(base / "model.safetensors"), "model.layers.9.mlp.up_proj.weight"]
        index = {"weight_map": dict.fromkeys(names, "model.safetensors")}
        (base / "model.safetensors.index.json").write_text(json.dumps(index))
        return "names tensor model.layers.9.mlp.up_proj.weight, which no shard holds"

    def absent_head(self, base: Path, adapter: Path) -> str:
        change(base / "config.json", tie_word_embeddings=False)
        return "has no tensor lm_head.weight, which LlamaForCausalLM needs"

    def no_chat_template(self, base: Path, adapter: Path) -> str:
        change(base / "tokenizer_config.json", chat_template=None)
        return "has no chat template"

    def truncated(self, base: Path, adapter: Path) -> str:
        path = base / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-1])
        return "is truncated"

    def no_tokenizer(self, base: Path, adapter: Path) -> str:
        (base / "tokenizer.json").unlink()
        return "tokenizer.json is missing"


@pytest.mark.parametrize("format", ["safetensors", "gguf"])
@pytest.mark.parametrize("way", [way for way in vars(Hostile) if not way.startswith("_")])
def test_hostile_models_and_adapters_are_one_line_and_nothing_is_written(
    base: Path, home: Path, tmp_path: Path, place: Path, way: str, format: str
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(base, copy)
    model = resolve(str(copy))
    adapter = save("mine", adapter_for(model.config, MODULES))
    words = getattr(Hostile(), way)(copy, adapter)
    error = refused(f"{copy}+mine", place / "out", format=format)
    assert isinstance(error, ModelError) and words in str(error)
    assert [*place.iterdir()] == []


def test_two_adapters_and_a_family_without_gguf(trained: Trained, place: Path, tmp_path: Path) -> None:
    assert "names 2 adapters" in str(refused(f"{trained.name}+mine", place / "out"))
    moe = build(tmp_path / "moe", "qwen3-moe", mlp_only_layers=[0])
    error = refused(str(moe.path), place / "x.gguf")
    assert "cannot be written as GGUF" in str(error) and error.hint == "--format safetensors"


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize("settings", [{"format": "safetensors"}, {"type": "bf16"}, {"type": "q8_0"}])
def test_the_demo_with_an_adapter_agrees(
    demo: Any, place: Path, monkeypatch: pytest.MonkeyPatch, settings: dict
) -> None:
    """57 answers of a real model, in every type that people use."""
    monkeypatch.setenv("SPILL_HOME", str(demo.path.parent.parent))
    save("fluent", adapter_for(demo.config, MODULES, scale=0.08), overwrite=True)
    to = place / ("x.gguf" if "type" in settings else "out")
    exported = export("demo+fluent", to, tokens=16, **settings)
    parity = exported.record.parity
    assert parity.rows == parity.same_prompts == 57 and parity.tokens > 700
    assert parity.agreement >= exported.record.bound
    assert 0 < parity.logprob_mean_difference < 0.1


@pytest.mark.parametrize("name", ["out", "out.gguf"])
def test_what_appears_at_the_destination_meanwhile_is_kept(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Asking the trained model takes long; somebody may use the name until then."""
    target, usual = tmp_path / name, module._replies

    def slow(*given: Any) -> Any:
        target.write_text("a thesis")
        return usual(*given)

    monkeypatch.setattr(module, "_replies", slow)
    with pytest.raises(InputError, match="exists already"):
        export(trained.name, target)
    assert target.read_text() == "a thesis" and [path.name for path in tmp_path.glob("out*")] == [name]


def test_what_lies_in_the_working_folder_does_not_run(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "numpy.py").write_text("raise RuntimeError('a file of the user')")
    monkeypatch.chdir(tmp_path)
    export(trained.name, tmp_path / "out")
