"""``export``: check, ask the trained model, write, run what was written, compare, publish."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from spillover.export import folder as folders
from spillover.export.answers import Computing, Question, Reply, ask, questions
from spillover.export.gguf import writer as ggufs
from spillover.export.gguf.architecture import architecture, context_of
from spillover.export.gguf.vocabulary import Vocabulary, vocabulary
from spillover.export.merge import Merged
from spillover.export.parity import Parity, judge, lost, measure
from spillover.export.publish import (
    RECORD,
    check_room,
    check_target,
    publish_file,
    publish_folder,
    workplace,
    writing,
)
from spillover.export.settings import BOUNDS, ExportSettings
from spillover.jobs.run import adapter_of, digest
from spillover.jobs.runs import versions
from spillover.models import Adapter, Model, Tokenizer, resolve
from spillover.models.fingerprint import hash_files

__all__ = ["Exported", "Record", "WrittenFile", "export_model"]

Report = Callable[[str, int, int], None]
"""Told what is being done, and of bytes or rows done and in all."""

_DTYPES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}


class WrittenFile(msgspec.Struct, frozen=True):
    """One file of an export."""

    bytes: int
    sha256: str


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """``export.json``: what was written from what, and how it was checked."""

    spill_export: int = 1
    model: str
    fingerprint: str
    adapter: str | None
    format: str
    type: str
    files: dict[str, WrittenFile]
    parity: Parity
    bound: float
    prompts: str
    notes: list[str]
    created: float
    versions: dict[str, str]


@dataclass(frozen=True)
class Exported:
    """What was published: the file or folder to use, everything that was written, and its record."""

    path: Path
    files: list[Path]
    record: Record


@dataclass(frozen=True)
class _Plan:
    """Everything that is checked before anything is written."""

    settings: ExportSettings
    model: Model
    adapter: Adapter | None
    tokenizer: Tokenizer
    merged: Merged
    type: str
    target: Path
    words: Vocabulary | None
    asked: list[Question]

    @property
    def bound(self) -> float:
        given = self.settings.bound
        return BOUNDS[self.type] if given is None else given

    @property
    def file(self) -> str:
        """What the GGUF file is called."""
        return self.target.name if self.target.suffix == ".gguf" else f"{self.target.name}.gguf"


def export_model(
    settings: ExportSettings,
    *,
    weights: str | None = None,
    computing: Computing | None = None,
    report: Report,
) -> Exported:
    """Write ``settings.model`` with its adapter merged in, checked against the trained model.

    Raises:
        InputError, ModelError, EngineError: something given cannot be used, or the export answers
        differently. StoreFull, StoreError: the destination cannot be written. In each case nothing is
        published.
    """
    computing = computing or Computing()
    if settings.to is not None:
        with writing(settings.to):
            check_target(settings.to, overwrite=settings.overwrite)
    plan = _plan(settings, weights, report)
    with writing(plan.target):
        check_target(plan.target, overwrite=settings.overwrite)
        check_room(_room(plan), plan.target)
    replies = _replies(plan, computing, report)
    with writing(plan.target), workplace(plan.target) as partial:
        check_target(plan.target, overwrite=settings.overwrite)  # somebody else may have been there first
        made, scratch = partial / "made", partial / "scratch"
        made.mkdir()
        scratch.mkdir()
        notes = _write(plan, made, report)
        exported = made / plan.file if settings.kind == "gguf" else made
        parity = measure(exported, scratch, plan.asked, replies, computing, _part(report, "checking"))
        judge(parity, plan.bound, kept=settings.bound is None)
        if lost(parity):
            notes.append("what the adapter changes is about as small as what the type rounds")
        record = _record(plan, made, parity, notes)
        (made / RECORD).write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")
        return Exported(*_publish(plan, made), record)


def _plan(settings: ExportSettings, weights: str | None, report: Report) -> _Plan:
    if settings.kind == "gguf":
        ggufs.gguf_library()
    model = resolve(settings.model, weights=weights, report=report)
    adapter = adapter_of(model)
    tokenizer = model.tokenizer()
    words, context = None, model.config.max_positions
    if settings.kind == "gguf":
        found = architecture(model.config)
        context = context_of(model.config, found)
        words = vocabulary(model, tokenizer)
    asked = questions(settings.parity, tokenizer, context - settings.tokens)
    merged = Merged(model, adapter)
    kind = settings.type or ("bf16" if settings.kind == "gguf" else _DTYPES.get(model.config.dtype, "f32"))
    target = (settings.to or Path(_name(model, settings, kind))).absolute()
    return _Plan(settings, model, adapter, tokenizer, merged, kind, target, words, asked)


def _name(model: Model, settings: ExportSettings, kind: str) -> str:
    """A name of the model's and its adapter's."""
    base = Path(model.ref.base)
    names = (base.resolve() if base.is_dir() else base, *map(Path, model.ref.adapters))
    parts = [path.name for path in names]
    name = "-".join(parts).replace(":", "-").replace("@", "-")
    return f"{name}-{kind}.gguf" if settings.kind == "gguf" else f"{name}-export"


def _room(plan: _Plan) -> int:
    """Bytes that the export takes while it is checked: of a GGUF file, also what it is read back into."""
    if plan.words is None:
        return folders.size_of(plan.merged, plan.settings.type)
    size = ggufs.size_of(plan.merged, plan.type)
    return size + (ggufs.size_of(plan.merged, "f32") if plan.type == "q8_0" else size)


def _replies(plan: _Plan, computing: Computing, report: Report) -> list[Reply]:
    turn = _part(report, "asking the trained model")
    return ask(plan.model, plan.adapter, plan.tokenizer, plan.asked, plan.settings.tokens, computing, turn)


def _write(plan: _Plan, made: Path, report: Report) -> list[str]:
    """Write the files into `made`; what there is to know about them."""
    turn = _part(report, "writing")
    if plan.words is None:
        folders.write_folder(plan.merged, made, plan.settings.type, turn)
        return []
    path = made / plan.file
    ggufs.write_gguf(plan.merged, path, plan.type, _called(plan), plan.words, turn)
    notes = [*_notes(plan)]
    if plan.settings.ollama:
        from spillover.export.ollama import modelfile

        text, note = modelfile(plan.file, plan.tokenizer)
        (made / "Modelfile").write_text(text, encoding="utf-8")
        notes += note
    return notes


def _called(plan: _Plan) -> str:
    """What the file says it is called. llama.cpp drops spaces after Phi-3's special tokens if it says
    phi-3."""
    name = plan.model.ref.spec
    told = any(part in name.lower() for part in ("phi-3", "phi3"))
    phi = plan.model.config.family == "phi3" and plan.words is not None and plan.words.model == "llama"
    return f"phi-3 {name}" if phi and not told else name


def _notes(plan: _Plan) -> Iterator[str]:
    config = plan.model.config
    context = context_of(config, architecture(config))
    if context < config.max_positions:
        yield f"the context is {context} tokens, a sliding window's, since llama.cpp has none for this family"
    if config.prefix != "model.":
        yield "the language model alone: what sees images is not in the file"


def _part(report: Report, stage: str) -> Callable[[int, int], None]:
    return lambda done, total: report(stage, done, total)


def _record(plan: _Plan, made: Path, parity: Parity, notes: list[str]) -> Record:
    files = sorted(path for path in made.iterdir() if path.is_file())
    hashes = hash_files(files)
    return Record(
        model=plan.model.ref.spec,
        fingerprint=plan.model.fingerprint,
        adapter=digest(plan.adapter) if plan.adapter else None,
        format=plan.settings.kind,
        type=plan.type,
        files={path.name: WrittenFile(path.stat().st_size, hashes[path]) for path in files},
        parity=parity,
        bound=plan.bound,
        prompts=plan.asked[0].id.rpartition(":")[0],
        notes=notes,
        created=round(time.time(), 3),
        versions=versions("spillover", "torch", "numpy", "gguf"),
    )


def _publish(plan: _Plan, made: Path) -> tuple[Path, list[Path]]:
    target = plan.target
    check_target(target, overwrite=plan.settings.overwrite)  # hours may have passed
    if target.suffix == ".gguf":
        moved = publish_file(made, target)
        return target, moved
    publish_folder(made, target)
    path = target / plan.file if plan.settings.kind == "gguf" else target
    return path, sorted(target.iterdir())
