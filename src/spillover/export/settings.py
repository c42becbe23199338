"""What to export: checked before anything is read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from spillover.errors import InputError

__all__ = ["BOUNDS", "ExportSettings", "Format"]

Format: TypeAlias = Literal["safetensors", "gguf"]
TYPES: dict[str, tuple[str, ...]] = {
    "safetensors": ("f32", "f16", "bf16"),
    "gguf": ("f32", "f16", "bf16", "q8_0"),
}

BOUNDS = {"f32": 0.99, "f16": 0.99, "bf16": 0.98, "q8_0": 0.97}
"""The least share of tokens, near ties left out, that must agree, by type; see `docs/design/export.md`."""

LEAST_ROWS = 50


@dataclass(frozen=True)
class ExportSettings:
    """Where from, where to, as what, and how it is checked.

    Args:
        model: as everywhere, with ``+adapter``.
        to: a folder, or a file that ends in ``.gguf``; None makes a name of the model's.
        format: ``safetensors`` or ``gguf``; None goes by `to` and `type`.
        type: of the numbers; None keeps the base's in safetensors and is ``bf16`` in GGUF.
        parity: rows to compare answers on; None takes those that come with the package.
        tokens: most tokens of an answer that are compared.
        bound: the least share of tokens that must agree; None goes by the type.
        ollama: write a Modelfile too.
        overwrite: replace an export.
    """

    model: str
    to: Path | None = None
    format: str | None = None
    type: str | None = None
    parity: Path | None = None
    tokens: int = 32
    bound: float | None = None
    ollama: bool = False
    overwrite: bool = False

    def __post_init__(self) -> None:
        if self.format is not None and self.format not in TYPES:
            raise InputError(f"--format {self.format} is unknown", hint="use safetensors or gguf")
        if self.type is not None and self.type not in BOUNDS:
            raise InputError(f"--type {self.type} is unknown", hint=f"use {', '.join(BOUNDS)}")
        if self.type is not None and self.type not in TYPES[self.kind]:
            raise InputError(
                f"safetensors cannot be of type {self.type}", hint=f"--format gguf --type {self.type}"
            )
        if self.to is not None and self.to.suffix == ".gguf" and self.kind != "gguf":
            raise InputError(f"{self.to} is the name of a GGUF file", hint="--format gguf, or --to FOLDER")
        if self.ollama and self.kind != "gguf":
            raise InputError("a Modelfile goes with a GGUF file", hint="add --format gguf")
        if self.bound is not None and not 0 <= self.bound <= 1:
            raise InputError(f"--bound {self.bound} is no share", hint="--bound 0.97")
        if self.tokens < 1:
            raise InputError(f"--tokens {self.tokens} makes no sense", hint="--tokens 32")

    @property
    def kind(self) -> Format:
        """The format: as asked, or by the name or type that only GGUF has."""
        if self.format is not None:
            return "gguf" if self.format == "gguf" else "safetensors"
        named = self.to is not None and self.to.suffix == ".gguf"
        return "gguf" if named or self.type == "q8_0" else "safetensors"
