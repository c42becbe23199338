"""The tokenizer, as llama.cpp has it: its tokens with their kinds, and how text is cut before they apply.

Two kinds of tokenizer are known, both byte-pair encodings read from ``tokenizer.json``: over bytes after a
split by a regular expression that llama.cpp knows by a name (``gpt2``), and over characters with bytes to
fall back on, as SentencePiece makes them (``llama``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from spillover.errors import ModelError
from spillover.models.config import read_json

if TYPE_CHECKING:
    from pathlib import Path

    from spillover.models import Model, Tokenizer

__all__ = ["PRE", "Vocabulary", "vocabulary"]

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""Kinds of tokens, as GGUF numbers them."""

_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_PATHS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_LOWER = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
_UPPER = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"

PRE: dict[str, tuple[str, ...]] = {
    "gpt-2": ("bytes by words",),
    "smollm": ("digits", "bytes by words"),
    "llama-bpe": (rf"{_ENDINGS}|{_WORDS}|\p{{N}}{{1,3}}|{_SIGNS}|{_SPACES}", "bytes"),
    "qwen2": (rf"{_ENDINGS}|{_WORDS}|\p{{N}}|{_SIGNS}|{_SPACES}", "bytes"),
    "tekken": (rf"{_LOWER}|{_UPPER}|\p{{N}}|{_PATHS}|{_SPACES}", "bytes"),
    "gpt-4o": (
        rf"{_LOWER}{_ENDINGS}?|{_UPPER}{_ENDINGS}?|\p{{N}}{{1,3}}|{_PATHS}|{_SPACES}",
        "bytes",
    ),
}
"""How text is cut before byte pairs are merged, by llama.cpp's name for it: regular expressions, ``digits``
(each by itself), ``bytes`` and ``bytes by words`` (bytes, after a split by GPT-2's expression)."""


@dataclass(frozen=True)
class Vocabulary:
    """What a GGUF file says of a tokenizer. `special` are ids by their name in the file, such as ``bos``."""

    model: str
    pre: str
    tokens: list[str]
    types: list[int]
    merges: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    special: dict[str, int] = field(default_factory=dict)
    add_bos: bool = False
    add_eos: bool = False
    space_prefix: bool = False
    templates: dict[str, str] = field(default_factory=dict)

    def add_to(self, writer: Any) -> None:
        """Write it into a ``gguf.GGUFWriter``."""
        writer.add_tokenizer_model(self.model)
        writer.add_tokenizer_pre(self.pre)
        writer.add_token_list(self.tokens)
        writer.add_token_types(self.types)
        if self.model == "gpt2":
            if self.merges:
                writer.add_token_merges(self.merges)
        else:
            writer.add_token_scores(self.scores)
            writer.add_add_space_prefix(self.space_prefix)
        for name, token in self.special.items():
            getattr(writer, f"add_{name}_token_id")(token)
        writer.add_add_bos_token(self.add_bos)
        writer.add_add_eos_token(self.add_eos)
        if self.templates:
            writer.add_chat_template([{"name": k, "template": v} for k, v in self.templates.items()])


def vocabulary(model: Model, tokenizer: Tokenizer) -> Vocabulary:
    """The tokenizer of `model` for llama.cpp; `ModelError` for a kind that it has no name for."""
    path = model.path / "tokenizer.json"
    document = read_json(path)
    inner = document.get("model") or {}
    if inner.get("type") != "BPE":
        raise _unknown(path, f"its model is {inner.get('type')}, not BPE")
    tokens, types = _tokens(document, model.config.vocab_size)
    begins, ends = _added_around(path)
    shared: dict[str, Any] = {
        "tokens": tokens,
        "special": _special(tokenizer, model, {token: i for i, token in enumerate(tokens)}, inner),
        "add_bos": begins,
        "add_eos": ends,
        "templates": dict(tokenizer.chat.templates),
    }
    merges = [pair.split(" ") if isinstance(pair, str) else list(pair) for pair in inner.get("merges") or ()]
    if not inner.get("byte_fallback"):
        pre = _pre(path, document)
        return Vocabulary("gpt2", pre, types=types, merges=[" ".join(pair) for pair in merges], **shared)
    scores, types = _scored(tokens, types, merges, inner)
    prefix = _space_prefix(document)
    return Vocabulary("llama", "default", types=types, scores=scores, space_prefix=prefix, **shared)


def _tokens(document: dict[str, Any], rows: int) -> tuple[list[str], list[int]]:
    """Every row of the embedding by its text, with its kind; rows that no token uses are unused."""
    texts = {int(i): text for text, i in document["model"]["vocab"].items()}
    added = {int(entry["id"]): entry for entry in document.get("added_tokens") or ()}
    texts |= {i: entry["content"] for i, entry in added.items()}
    kinds = {i: CONTROL if entry.get("special") else USER_DEFINED for i, entry in added.items()}
    tokens = [texts.get(i, f"[PAD{i}]") for i in range(rows)]
    return tokens, [kinds.get(i, NORMAL if i in texts else UNUSED) for i in range(rows)]


def _scored(
    tokens: list[str], types: list[int], merges: list[list[str]], inner: dict[str, Any]
) -> tuple[list[float], list[int]]:
    """Scores by which llama.cpp merges in the order of `merges`, and types with bytes and the unknown
    told."""
    rank: dict[str, int] = {}
    for place, pair in enumerate(merges):
        rank.setdefault("".join(pair), place)
    scores = [-float(rank.get(token, len(merges) + i)) for i, token in enumerate(tokens)]
    told = [*types]
    for i, token in enumerate(tokens):
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            told[i] = BYTE
        elif token == inner.get("unk_token"):
            told[i] = UNKNOWN
    return scores, told


def _special(
    tokenizer: Tokenizer, model: Model, ids: dict[str, int], inner: dict[str, Any]
) -> dict[str, int]:
    named = {name: ids.get(tokenizer.chat.special.get(f"{name}_token", "")) for name in ("bos", "eos", "pad")}
    named["unk"] = ids.get(tokenizer.chat.special.get("unk_token") or inner.get("unk_token") or "")
    if named["eos"] is None and model.config.eos_ids:
        named["eos"] = model.config.eos_ids[0]
    if tokenizer.end_of_turn != named["eos"]:
        named["eot"] = tokenizer.end_of_turn
    return {name: token for name, token in named.items() if token is not None}


def _added_around(path: Path) -> tuple[bool, bool]:
    """Whether plain text gets a token before and one after it."""
    import tokenizers

    inner = tokenizers.Tokenizer.from_file(str(path))
    bare = inner.encode("a", add_special_tokens=False).ids
    whole = inner.encode("a").ids
    begins = whole[: len(whole) - len(bare)] != [] and whole[-len(bare) :] == bare
    return begins, len(whole) > len(bare) and whole[-len(bare) :] != bare


def _pre(path: Path, document: dict[str, Any]) -> str:
    parts = tuple(_part(path, one) for one in _flat(document.get("pre_tokenizer")))
    normalizer = document.get("normalizer") or {"type": "NFC"}
    if normalizer.get("type") != "NFC":  # which llama.cpp leaves to its caller
        raise _unknown(path, f"its normalizer is {normalizer.get('type')}")
    name = next((name for name, known in PRE.items() if known == parts), None)
    if name is None:
        raise _unknown(path, "llama.cpp has no name for how it splits text")
    return name


def _flat(one: dict[str, Any] | None) -> list[dict[str, Any]]:
    if one is None:
        return []
    return (
        [part for each in one["pretokenizers"] for part in _flat(each)]
        if one["type"] == "Sequence"
        else [one]
    )


def _part(path: Path, one: dict[str, Any]) -> str:
    if one["type"] == "Split" and one.get("behavior") == "Isolated" and not one.get("invert"):
        return str(one["pattern"].get("Regex"))
    if one["type"] == "Digits" and one.get("individual_digits"):
        return "digits"
    if one["type"] == "ByteLevel" and not one.get("add_prefix_space"):
        return "bytes by words" if one.get("use_regex", True) else "bytes"
    raise _unknown(path, f"llama.cpp has no name for its pre-tokenizer {one['type']}")


def _space_prefix(document: dict[str, Any]) -> bool:
    """Whether a space is put before text."""
    normalizer, pre = document.get("normalizer") or {}, document.get("pre_tokenizer") or {}
    parts = normalizer.get("normalizers", [normalizer])
    prepended = any(part.get("type") == "Prepend" for part in parts)
    return prepended or (pre.get("type") == "Metaspace" and pre.get("prepend_scheme", "always") != "never")


def _unknown(path: Path, why: str) -> ModelError:
    return ModelError(f"{path} cannot be written as GGUF: {why}", hint="--format safetensors")
