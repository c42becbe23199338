"""From a name to a model on this machine's disk: expanded, downloaded or staged when it is missing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from spillover.errors import ModelError
from spillover.models.config import ModelConfig
from spillover.models.demo import expand
from spillover.models.fingerprint import fingerprint, model_files
from spillover.models.folders import models_home
from spillover.models.index import WeightIndex
from spillover.models.pins import read_pin
from spillover.models.tags import DEMO, TAGS, ModelRef, parse
from spillover.models.tokenizer import Tokenizer

Report = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Model:
    """A checked model folder.

    `fingerprint` covers the base alone; `bytes` is the size of its files that count.
    """

    ref: ModelRef
    path: Path
    config: ModelConfig
    fingerprint: str
    bytes: int

    def tokenizer(self) -> Tokenizer:
        """Read the tokenizer; `ModelError` when it has more tokens than the model's embedding has rows."""
        tokenizer = Tokenizer(self.path, eos_ids=self.config.eos_ids)
        if tokenizer.vocab_size > self.config.vocab_size:
            raise ModelError(
                f"the tokenizer has {tokenizer.vocab_size} tokens, "
                f"the embedding only {self.config.vocab_size} rows",
                hint=f"get {self.ref.base} again: its tokenizer is of another model",
            )
        return tokenizer

    def index(self) -> WeightIndex:
        """Read the weight files' headers."""
        return WeightIndex(self.path)


def resolve(spec: str | ModelRef, *, weights: str | None = None, report: Report | None = None) -> Model:
    """The model called `spec`, on disk and checked.

    `weights` is the URI of a folder on shared storage that is staged instead of downloaded. `report` hears
    ``(what, bytes done, bytes in all)``. Raises `ModelError` in one line for everything that can be wrong.
    """
    ref = parse(spec) if isinstance(spec, str) else spec
    path = _locate(ref, weights, report)
    return inspect(ref, path, report)


def inspect(ref: ModelRef, path: Path, report: Report | None = None) -> Model:
    """Check the model folder at `path` and take its fingerprint."""
    config = ModelConfig.read(path)
    WeightIndex(path).check(config)
    size = sum(file.stat().st_size for file in model_files(path))
    return Model(ref, path, config, fingerprint(path, report), size)


def _locate(ref: ModelRef, weights: str | None, report: Report | None) -> Path:
    if weights is not None:
        from spillover.models.staging import stage

        return stage(weights, report)
    if ref.kind == "folder":
        return Path(ref.base).expanduser().absolute()
    if ref.kind == "demo":
        folder = models_home() / DEMO
        expand(folder, report)
        return folder
    from spillover.models.hub import download

    return download(ref.source, report)


@dataclass(frozen=True)
class InstalledModel:
    """A model folder under ``SPILL_HOME``: what to call it, where it is, its size on disk in bytes."""

    name: str
    path: Path
    bytes: int


def installed() -> list[InstalledModel]:
    """The models that need no network, by name; unfinished folders are left out."""
    root = models_home()
    folders = [path.parent for path in root.glob("*/config.json")] if root.is_dir() else []
    found = [
        InstalledModel(_called(folder), folder, sum(file.stat().st_size for file in folder.iterdir()))
        for folder in folders
        if not folder.name.startswith(".")
    ]
    return sorted(found, key=lambda model: model.name)


def _called(folder: Path) -> str:
    """What to type for a folder: its tag, its repository, or the URI that it was staged from."""
    pin = read_pin(folder.name)
    if pin is None:
        return folder.name
    if not pin.revision:
        return pin.repo
    for tag, source in TAGS.items():
        if (source.repo, source.revision or "main") == (pin.repo, pin.revision):
            return tag
    return pin.repo if pin.revision == "main" else f"{pin.repo}@{pin.revision}"
