"""``spill export``: a model with its adapter merged in, for other tools."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from spillover.cli.answers import answer
from spillover.cli.progress import counting
from spillover.errors import InputError

if TYPE_CHECKING:
    from spillover.export.export import Exported

__all__ = ["export"]

PREEMPTED = 75


def export(
    model: Annotated[
        str, typer.Argument(help="A tag, org/name[@revision] or a folder; +NAME adds an adapter.")
    ],
    to: Annotated[
        Path | None,
        typer.Option(help="Folder to write, or a file ending in .gguf; named like the model when not given."),
    ] = None,
    format: Annotated[
        str | None, typer.Option(help="safetensors or gguf; by --to and --type when not given.")
    ] = None,
    type: Annotated[
        str | None,
        typer.Option(
            help="f32, f16 or bf16, in GGUF also q8_0; as the base is, in GGUF bf16, when not given."
        ),
    ] = None,
    ollama: Annotated[bool, typer.Option("--ollama", help="Write a Modelfile beside the GGUF file.")] = False,
    parity: Annotated[
        Path | None, typer.Option(help="Rows to compare answers on, at least 50.", metavar="FILE")
    ] = None,
    tokens: Annotated[int, typer.Option(help="Most tokens of an answer that are compared.")] = 32,
    bound: Annotated[
        float | None,
        typer.Option(help="Least share of tokens that must agree; by the type when not given."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an export.")] = False,
    weights: Annotated[
        str | None, typer.Option(help="Stage the model from here once.", metavar="URI")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda, for the check; chosen when not given.")
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(help="Memory that the check may use, such as 2GB; most of it when not given."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Write a model, its adapter merged in, for transformers, vLLM, llama.cpp or Ollama.

    What was written is then run in a fresh process and compared with the trained model, token by token of its
    own answers to held-out prompts. Below the bound nothing is published.
    """
    from spillover.export.answers import Computing
    from spillover.export.export import export_model
    from spillover.export.settings import ExportSettings

    settings = ExportSettings(model, to, format, type, parity, tokens, bound, ollama, overwrite)
    computing = Computing(_bytes(memory), device)
    with _preemptible(), _shown(silent=json) as report:
        exported = export_model(settings, weights=weights, computing=computing, report=report)
    answer(exported.record, json, lambda: _lines(exported))


def _bytes(memory: str | None) -> int | None:
    from spillover.sizes import parse_size

    try:
        return None if memory is None else parse_size(memory)
    except InputError as error:
        raise InputError(f"--memory {error}", hint="--memory 2GB, --memory 1500MiB") from None


@contextlib.contextmanager
def _preemptible() -> Iterator[None]:
    """A SIGTERM leaves by way of every clean-up, to be retried: there is nothing to save."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(PREEMPTED)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _shown(*, silent: bool) -> Iterator[Callable[[str, int, int], None]]:
    """A bar that begins anew with each stage."""
    with counting("export", "", silent=silent) as turn:
        yield lambda stage, done, total: turn(done, total, stage)


def _lines(exported: Exported) -> Iterator[str]:
    record, parity = exported.record, exported.record.parity
    size = sum(file.bytes for file in record.files.values())
    yield f"{exported.path}: {record.format}, {record.type}, {size / 1e6:,.1f} MB"
    yield (
        f"agrees with the trained model on {parity.agree:,} of {parity.tokens:,} tokens of {parity.rows} "
        f"answers, near ties left out on {parity.agreement:.2%}; the bound is {record.bound:.2%}"
    )
    moved = parity.adapter_mean_difference
    yield (
        f"log-probabilities differ by {parity.logprob_mean_difference:.2g} on average, "
        f"{parity.logprob_max_difference:.2g} at most"
        + (f"; the adapter changes them by {moved:.2g}" if moved is not None else "")
    )
    yield from (f"note: {note}" for note in record.notes)
    modelfile = next((path for path in exported.files if path.name.endswith("Modelfile")), None)
    if modelfile is not None:
        yield f"next: ollama create NAME -f {modelfile}"
    elif record.format == "gguf":
        yield f"next: llama-cli -m {exported.path}"
    else:
        yield f"next: spill run {exported.path} sample"
