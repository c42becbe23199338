"""llama.cpp itself on the files: it cuts text and computes tokens as the trained model does.

It takes minutes to compile, so these tests run where a benchmark has installed it already
(`python benchmarks/export_parity.py`); elsewhere they are skipped.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from data import ROOT
from engine import tiny
from export.families import CHANGES, adapter_for, build, rows, write_sentencepiece
from export.test_gguf import written
from spillover.models import resolve

sys.path.insert(0, str(ROOT / "benchmarks"))
from peer import Process, cache

LLAMA = cache() / f"llama-cpp-python-0.3.36-py{sys.version_info.major}.{sys.version_info.minor}"
pytestmark = pytest.mark.skipif(
    not (LLAMA / "complete").exists(), reason="python benchmarks/export_parity.py installs llama.cpp"
)
NAMES = [name for name in CHANGES if name != "phi3-short"]
"""Without the one of a context below 256 tokens, which llama.cpp rounds up to."""
TEXTS = [
    "The capital of France is Paris.",
    "<|im_start|>user\nGröße 🙂 it's 12345 \n\n  東京<|im_end|>\n<|im_start|>assistant\n",
    "  leading, trailing  ",
]


@pytest.fixture(scope="module")
def llama() -> Iterator[Process]:
    with Process(LLAMA / "bin" / "python", ROOT / "benchmarks" / "llama_side.py") as process:
        yield process


@pytest.mark.parametrize("name", NAMES)
def test_it_computes_what_the_trained_model_computes(
    tmp_path: Path, home: Path, name: str, llama: Process
) -> None:
    model = build(tmp_path / "model", name)
    adapter = adapter_for(model.config, tiny.ATTENTION if model.config.experts else tiny.MODULES)
    path = written(model, tmp_path / "x.gguf", adapter=adapter)
    case = tiny.FAMILIES[name]
    known = llama.ask(
        "open", path=str(path), length=min(case.sequence, tiny.SIZES["max_position_embeddings"])
    )
    length = min(90 if case.sequence > 64 else 40, known["context"])
    sequences = rows(3, length)
    ours = tiny.loaded(model, sequence=case.sequence, adapters=[adapter]).score(sequences, [1] * 3, top=1)
    for sequence, mine in zip(sequences, ours, strict=True):
        theirs = llama.ask("score", prompt=sequence[:1], reply=sequence[1:])
        gaps = np.abs([one.logprob - other[1] for one, other in zip(mine, theirs, strict=True)])
        assert gaps.max() < 5e-3  # llama.cpp looks GELU up in a table of float16
        assert sum(one.top[0][0] == other[0] for one, other in zip(mine, theirs, strict=True)) >= length - 2
    words = model.tokenizer()
    assert llama.ask("tokens", texts=TEXTS) == [words.encode(text) for text in TEXTS]
    assert llama.ask("template") == words.chat.templates["default"]
    assert known["eos"] == words.encode("<|im_end|>")[0]


@pytest.mark.parametrize("prefix", [True, False])
def test_it_cuts_text_by_characters_as_the_tokenizer_does(
    tmp_path: Path, home: Path, prefix: bool, llama: Process
) -> None:
    folder = build(tmp_path / "model", "llama").path
    model = resolve(str(write_sentencepiece(folder, prefix=prefix)))
    path = written(model, tmp_path / "x.gguf")
    known = llama.ask("open", path=str(path), length=256)
    words = model.tokenizer()
    assert llama.ask("tokens", texts=TEXTS) == [words.encode(text) for text in TEXTS]
    assert (known["bos"], known["eos"], known["add_bos"]) == (1, 2, True)
