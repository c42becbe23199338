"""What a model is called: tags, Hugging Face repository ids and folders, with adapters after ``+``."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from spillover.errors import ModelError

DEMO = "demo"
_REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(@[\w./-]+)?", re.ASCII)


@dataclass(frozen=True)
class Source:
    """A Hugging Face repository and what is known of its content in advance.

    `revision` is a commit, branch or tag; None means ``main``. `files` maps names to (bytes, sha256).
    What is not known here is pinned on first use: see `spillover.models.hub`.
    """

    repo: str
    revision: str | None = None
    files: Mapping[str, tuple[int, str]] = field(default_factory=dict)


TAGS: dict[str, Source] = {
    "llama3.2:1b": Source("meta-llama/Llama-3.2-1B-Instruct"),
    "llama3.2:3b": Source("meta-llama/Llama-3.2-3B-Instruct"),
    "llama3.3:70b": Source("meta-llama/Llama-3.3-70B-Instruct"),
    "qwen2.5:0.5b": Source(
        "Qwen/Qwen2.5-0.5B-Instruct",
        "7ae557604adf67be50417f59c2c2f167def9a775",
        {
            "config.json": (659, "18e18afcaccafade98daf13a54092927904649e1dd4eba8299ab717d5d94ff45"),
            "generation_config.json": (
                242,
                "e558847a8b4402616f1273797b015104dc266fe4b520056fca88823ba8f8ebe6",
            ),
            "model.safetensors": (
                988097824,
                "fdf756fa7fcbe7404d5c60e26bff1a0c8b8aa1f72ced49e7dd0210fe288fb7fe",
            ),
            "tokenizer.json": (7031645, "c0382117ea329cdf097041132f6d735924b697924d6f6fc3945713e96ce87539"),
            "tokenizer_config.json": (
                7305,
                "5b5d4f65d0acd3b2d56a35b56d374a36cbc1c8fa5cf3b3febbbfabf22f359583",
            ),
        },
    ),
    "qwen2.5:1.5b": Source("Qwen/Qwen2.5-1.5B-Instruct", "989aa7980e4cf806f80c7fef2b1adb7bc71aa306"),
    "qwen2.5:7b": Source("Qwen/Qwen2.5-7B-Instruct", "a09a35458c702b33eeacc393d103063234e8bc28"),
    "qwen2.5:32b": Source("Qwen/Qwen2.5-32B-Instruct"),
    "qwen3:0.6b": Source("Qwen/Qwen3-0.6B", "c1899de289a04d12100db370d81485cdf75e47ca"),
    "qwen3:4b": Source("Qwen/Qwen3-4B", "1cfa9a7208912126459214e8b04321603b3df60c"),
    "qwen3:8b": Source("Qwen/Qwen3-8B"),
    "smollm2:135m": Source("HuggingFaceTB/SmolLM2-135M-Instruct", "12fd25f77366fa6b3b4b768ec3050bf629380bac"),
    "smollm2:360m": Source("HuggingFaceTB/SmolLM2-360M-Instruct"),
    "smollm2:1.7b": Source("HuggingFaceTB/SmolLM2-1.7B-Instruct"),
}


@dataclass(frozen=True)
class ModelRef:
    """A model as the user named it: `base` is a tag, ``org/name[@revision]`` or a folder; adapters follow."""

    spec: str
    base: str
    adapters: tuple[str, ...] = ()

    @property
    def kind(self) -> Literal["demo", "hub", "folder"]:
        """Where the base comes from."""
        if self.base == DEMO:
            return "demo"
        return "hub" if self.base in TAGS or not _is_folder(self.base) else "folder"

    @property
    def source(self) -> Source:
        """The repository behind a base of kind ``hub``."""
        if self.base in TAGS:
            return TAGS[self.base]
        repo, _, revision = self.base.partition("@")
        return Source(repo, revision or None)


def parse(spec: str) -> ModelRef:
    """Read ``base[+adapter...]``. A folder that exists wins over a repository id of the same spelling.

    Raises `ModelError` for a name that is none of the three, with the nearest tags as hint.
    """
    base, adapters = _split(spec.strip())
    if any(not name for name in adapters):
        raise ModelError(f"{spec!r} has an empty adapter name", hint="write base+adapter, as in demo+banking")
    if base == DEMO or base in TAGS or _is_folder(base) or _REPO.fullmatch(base):
        return ModelRef(spec, base, adapters)
    if _looks_like_path(base):
        raise ModelError(
            f"the model folder {base} does not exist", hint="ls " + str(Path(base).expanduser().parent)
        )
    raise ModelError(f"there is no model tag {base!r}", hint=_nearest(base))


def _split(spec: str) -> tuple[str, tuple[str, ...]]:
    """Cut at ``+``, but keep a folder whose name has one whole."""
    parts = spec.split("+")
    for cut in range(len(parts), 1, -1):
        base = "+".join(parts[:cut])
        if _is_folder(base):
            return base, tuple(parts[cut:])
    return parts[0], tuple(parts[1:])


def _is_folder(base: str) -> bool:
    return base not in ("", DEMO) and base not in TAGS and Path(base).expanduser().is_dir()


def _looks_like_path(base: str) -> bool:
    return base.startswith((".", "/", "~")) or base.count("/") > 1 or "\\" in base


def _nearest(base: str) -> str:
    known = [DEMO, *TAGS]
    near = difflib.get_close_matches(base.lower(), known, n=3, cutoff=0.5)
    near += [tag for tag in known if tag.split(":")[0] == base.lower().split(":")[0] and tag not in near]
    return (
        f"use {' or '.join(near[:4])}"
        if near
        else "use demo, a tag from `spill models`, org/name or a folder"
    )
