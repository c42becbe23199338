"""The point of it all: a real model learns a real task, and its adapter works here and in PEFT."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import banking77

SPILL = Path(sys.executable).with_name("spill")


def spill(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([SPILL, *arguments], cwd=folder, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr[-2000:]
    return done


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.filterwarnings("ignore::FutureWarning:peft", "ignore::FutureWarning:transformers")
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated")
def test_demo_learns_banking77_and_loads_in_peft(
    tmp_path: Path, demo_home: Path, record_property, capsys: pytest.CaptureFixture[str]
) -> None:
    train, test = banking77.write(tmp_path)
    spill(tmp_path, "run", "demo", str(test), "--out", "untrained.jsonl")
    untrained = banking77.accuracy(tmp_path / "untrained.jsonl")
    started = time.monotonic()
    tuning = ["tune", "demo", str(train), "--name", "banking", "--epochs", "1", "--lr", "5e-4", "--overwrite"]
    spill(tmp_path, *tuning)
    minutes = (time.monotonic() - started) / 60
    spill(tmp_path, "run", "demo+banking", str(test), "--out", "tuned.jsonl")
    tuned = banking77.accuracy(tmp_path / "tuned.jsonl")
    with capsys.disabled():
        print(
            f"\nbanking77: accuracy {untrained:.2f} before, {tuned:.2f} after {minutes:.1f} min", flush=True
        )
    assert untrained < 0.5
    assert tuned >= 0.78
    compare_with_peft(demo_home, tmp_path)


def compare_with_peft(home: Path, folder: Path) -> None:
    """Greedy answers in float32 from PEFT on transformers equal ours, token for token."""
    import peft
    import torch
    import transformers

    rows = [json.loads(line) for line in (folder / "test.jsonl").read_text().splitlines()][:8]
    (folder / "few.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    spill(folder, "run", "demo+banking", "few.jsonl", "--out", "few.out.jsonl", "--numerics", "float32")
    ours = [
        json.loads(line)["response"]["body"]["choices"][0]["message"]["content"]
        for line in (folder / "few.out.jsonl").read_text().splitlines()
    ]
    base = home / "models" / "demo"
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with pytest.warns(UserWarning, match="Unexpected keyword"):
        model = peft.PeftModel.from_pretrained(model, home / "adapters" / "banking").eval()
    for row, answer in zip(rows, ours, strict=True):
        messages = [{"role": "user", "content": row["prompt"]}]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        prompt = tokenizer(text, add_special_tokens=False, return_tensors="pt")
        out = model.generate(**prompt, max_new_tokens=24, do_sample=False)
        theirs = tokenizer.decode(out[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
        assert theirs == answer


@pytest.fixture
def demo_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = Path(os.environ.get("SPILL_HOME", Path.home() / ".spillover"))
    monkeypatch.setenv("SPILL_HOME", str(home))
    return home
