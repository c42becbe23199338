"""Verify every model family against transformers and write ``docs/models.md``.

The models are tiny, random and those of the tests in ``tests/engine/torch/``, so it needs the ``dev`` extra
and about half a minute.

    python docs/families.py
"""

from __future__ import annotations

import platform
import re
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

import transformers

from spillover.models.families import FAMILIES as ARCHITECTURES

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))
from engine.tiny import FAMILIES, build  # noqa: E402  (found through the line above)
from engine.torch import verification  # noqa: E402

PAGE = ROOT / "docs" / "models.md"
HEAD = """\
# Model families

Written by `python docs/families.py`. Every line is a tiny random model of the family, saved by
transformers and computed by both in float32: the same prompts in one batch of different lengths, half of
them or more longer than the sliding window (24 tokens) or the original context (64), then {tokens} greedy
tokens each; once with the kernels that are planned on a CPU and once with torch's. *Greedy equal* counts
answers that are transformers' token for token. *Logits* is the largest difference after a prefill or a
decoded token, *scores* that of a given or likely token's log-probability. *Loss* and *gradient* are
relative differences of one LoRA step against PEFT. The tests hold 1e-4 for logits and scores, 1e-6 for
the loss and 2e-5 for the gradient.

| family | architecture | exercised | greedy equal | logits | scores | loss | gradient |
| --- | --- | --- | --- | --- | --- | --- | --- |
"""
TAIL = """
## What to know

- **LongRoPE** (Phi-3 with 128k tokens, Phi-4-mini) has one set of angles for sequences within the original
  context and one for longer ones. A job uses one of them for all its rows, by the longest sequence that it
  plans for, so that no answer depends on the rows beside it. transformers chooses by the longest sequence
  of the batch at hand.
- **Adapters of Phi-3** change `qkv_proj` and `gate_up_proj` as one module each, as in PEFT; `--targets all`
  means them.
- **Adapters of a model with experts** change attention: `--targets q_proj,k_proj,v_proj,o_proj`. Where a
  model also has dense layers, the modules of those can be named too, but PEFT takes their names for the
  experts'.
- **Gemma 3 of more than 1B** comes as a multimodal model. Its language model alone is used, for text.
  Adapters are written under the names of the language model.
- **Refused**, in one line that says why: quantized weights, biases in Llama's attention, activations other
  than `silu` and `gelu_pytorch_tanh`, positions scaled by other rules than `linear`, `llama3`, `yarn` and
  `longrope`, layers that are neither full nor sliding attention, bidirectional attention.

Versions: {versions}.
"""


@dataclass(frozen=True)
class Measured:
    """The measured cells of one line."""

    greedy: str
    logits: str
    scores: str
    loss: str
    gradient: str

    @property
    def cells(self) -> tuple[str, ...]:
        return self.greedy, self.logits, self.scores, self.loss, self.gradient


def measure(name: str, folder: Path) -> Measured:
    """Build the case `name` in `folder` and run every verification."""
    case, (model, theirs) = FAMILIES[name], build(folder, name)
    ways = [case, replace(case, kernels="torch")]
    greedy = [verification.greedy(way, model, theirs) for way in ways]
    equal, answers = (sum(counts) for counts in zip(*greedy, strict=True))
    logits = max(
        check(way, model, theirs) for way in ways for check in (verification.prefill, verification.decode)
    )
    scores = max(verification.scores(way, model, theirs) for way in ways)
    loss = gradient = "as above"
    if case.targets:
        loss, gradient = (f"{one:.0e}" for one in verification.training(case, model, theirs))
    return Measured(f"{equal} of {answers}", f"{logits:.0e}", f"{scores:.0e}", loss, gradient)


def page(measured: Mapping[str, Measured], versions: str) -> str:
    """The whole page; `measured` has a line for each of the tests' cases, by name."""
    lines = []
    for name, case in FAMILIES.items():
        assert case.architecture in ARCHITECTURES
        cells = (case.family, f"`{case.architecture}`", case.exercised, *measured[name].cells)
        lines.append(f"| {' | '.join(cells)} |\n")
    return HEAD.format(tokens=verification.TOKENS) + "".join(lines) + TAIL.format(versions=versions)


def written(text: str) -> tuple[dict[str, Measured], str]:
    """What a page holds that was measured, in the order of the cases, and its versions."""
    rows = [line.strip("| \n").split(" | ") for line in text.splitlines() if line.startswith("| ")][2:]
    measured = {name: Measured(*row[3:]) for name, row in zip(FAMILIES, rows, strict=True)}
    found = re.search(r"^Versions: (.*)\.$", text, re.MULTILINE)
    assert found is not None
    return measured, found[1]


def main() -> None:
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    measured = {}
    for name in FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            measured[name] = measure(name, Path(folder))
        print(name, *measured[name].cells, sep="\t", flush=True)
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "transformers", "peft"))
    PAGE.write_text(page(measured, f"Python {platform.python_version()}, {versions}"), encoding="utf-8")


if __name__ == "__main__":
    main()
