"""From a GGUF file back to a folder that an engine runs: what llama.cpp would compute, in terms of
transformers.

Everything comes out of the file: the configuration from its metadata, the weights from its tensors, the
tokenizer from its tokens. 16-bit tensors keep their numbers; what is quantized becomes float32.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spillover.errors import ModelError
from spillover.export.gguf.architecture import BY_FAMILY
from spillover.export.gguf.tensors import separated, targets
from spillover.export.gguf.vocabulary import BYTE, CONTROL, PRE, UNUSED, USER_DEFINED
from spillover.export.gguf.writer import gguf_library
from spillover.export.merge import BLOCK
from spillover.export.rounding import rounded
from spillover.models import ModelConfig
from spillover.models.chat import ChatTemplate
from spillover.models.index import SINGLE

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from spillover.export.gguf.tensors import Target
    from spillover.export.rounding import Array

__all__ = ["expand", "template_of", "tokenizer_of"]

Report = Callable[[int, int], None]

_CLASSES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}


def expand(path: Path, folder: Path, report: Report) -> None:
    """Write ``config.json`` and ``model.safetensors`` of the model in the GGUF file `path` into `folder`."""
    reader = gguf_library().GGUFReader(path)
    document = _config(reader)
    config = ModelConfig.parse(document, {})
    (folder / "config.json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    every = [*targets(config, BY_FAMILY[config.family])]
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    missing = next((target.name for target in every if target.name not in tensors), None)
    if missing is not None:
        raise ModelError(f"{path} has no tensor {missing}", hint="export it again")
    header, total = _header([(target, _kept(tensors[target.name])) for target in every])
    written = 0
    with (folder / SINGLE).open("wb") as file:
        file.write(header)
        for target in every:
            for piece in _pieces(tensors[target.name], target):
                written += file.write(piece.data.cast("B"))
                report(written, total)


def tokenizer_of(path: Path) -> Tokenizer:
    """The tokenizer of the GGUF file `path`: it cuts and merges text as llama.cpp does."""
    import tokenizers

    reader = gguf_library().GGUFReader(path)
    tokens, types = _value(reader, "tokenizer.ggml.tokens"), _value(reader, "tokenizer.ggml.token_type")
    if _value(reader, "tokenizer.ggml.model") == "gpt2":
        inner = _by_bytes(reader, tokens, types)
    else:
        inner = _by_characters(reader, tokens, types)
    strips = any(part in _value(reader, "general.name", "").lower() for part in ("phi-3", "phi3"))
    for token, kind in zip(tokens, types, strict=True):
        if kind in (CONTROL, USER_DEFINED):
            special = kind == CONTROL
            # llama.cpp tells Phi-3 by its name, and drops white space after most of its special tokens
            rstrip = strips and special and token not in ("<unk>", "<s>", "<|endoftext|>")
            added = tokenizers.AddedToken(token, special=special, normalized=False, rstrip=rstrip)
            (inner.add_special_tokens if special else inner.add_tokens)([added])
    return inner


def template_of(path: Path) -> ChatTemplate:
    """The chat templates of the GGUF file `path`, with the special tokens that they may print."""
    reader = gguf_library().GGUFReader(path)
    templates = {"default": _value(reader, "tokenizer.chat_template")}
    start = "tokenizer.chat_template."
    templates |= {
        key.removeprefix(start): _value(reader, key) for key in reader.fields if key.startswith(start)
    }
    tokens = _value(reader, "tokenizer.ggml.tokens")
    keys = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    ids = {name: _value(reader, f"tokenizer.ggml.{key}_token_id") for name, key in keys.items()}
    special = {f"{name}_token": tokens[i] for name, i in ids.items() if i is not None}
    return ChatTemplate({k: v for k, v in templates.items() if v is not None}, special, source=path)


def _value(reader: Any, key: str, otherwise: Any = None) -> Any:
    """One metadata value of the file as plain Python."""
    entry = reader.fields.get(key)
    return otherwise if entry is None else entry.contents()


def _config(reader: Any) -> dict[str, Any]:
    """What ``config.json`` would say of the model."""
    arch = _value(reader, "general.architecture")
    if arch not in _CLASSES:
        raise ModelError(f"a GGUF file of architecture {arch} cannot be read back", hint="export it again")

    def value(key: str, otherwise: Any = None) -> Any:
        return _value(reader, f"{arch}.{key}", otherwise)

    experts = value("expert_count", 0)
    names = {tensor.name for tensor in reader.tensors}
    head = value("attention.key_length")
    document: dict[str, Any] = {
        "architectures": ["MixtralForCausalLM" if arch == "llama" and experts else _CLASSES[arch]],
        "vocab_size": value("vocab_size"),
        "hidden_size": value("embedding_length"),
        "intermediate_size": value("feed_forward_length"),
        "num_hidden_layers": value("block_count"),
        "num_attention_heads": value("attention.head_count"),
        "num_key_value_heads": value("attention.head_count_kv"),
        "head_dim": head,
        "rms_norm_eps": value("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": value("context_length"),
        "rope_theta": value("rope.freq_base"),
        "partial_rotary_factor": value("rope.dimension_count") / head,
        "rope_scaling": _scaling(reader, value),
        "tie_word_embeddings": "output.weight" not in names,
        "sliding_window": value("attention.sliding_window"),
        "use_sliding_window": False,
        "torch_dtype": "float32",
    }
    if experts:
        document |= {"num_local_experts": experts, "num_experts_per_tok": value("expert_used_count")}
        document |= {"moe_intermediate_size": value("expert_feed_forward_length"), "norm_topk_prob": True}
    if arch == "phi3":
        original = value("rope.scaling.original_context_length", value("context_length"))
        document["original_max_position_embeddings"] = original
    if arch.startswith("gemma"):
        document |= _gemma(document, value)
    return document


def _gemma(document: dict[str, Any], value: Callable[..., Any]) -> dict[str, Any]:
    """What llama.cpp assumes of a Gemma model, and the file says of it."""
    wide = document["num_hidden_layers"] in (46, 62)
    width = document["hidden_size"] // document["num_attention_heads"] if wide else document["head_dim"]
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": width,
        "attn_logit_softcapping": value("attn_logit_softcapping"),
        "final_logit_softcapping": value("final_logit_softcapping"),
        "sliding_window_pattern": value("attention.sliding_window_pattern"),
        "rope_local_base_freq": value("rope.freq_base_swa"),
    }


def _scaling(reader: Any, value: Callable[..., Any]) -> dict[str, Any] | None:
    """How positions are scaled; divisors pair by pair are what transformers calls longrope."""
    factors = {
        tensor.name: tensor.data.tolist() for tensor in reader.tensors if tensor.name.startswith("rope_f")
    }
    if "rope_freqs.weight" in factors:
        same = factors["rope_freqs.weight"]
        rule = {"rope_type": "longrope", "short_factor": same, "long_factor": same, "attention_factor": 1.0}
        return rule | {"original_max_position_embeddings": value("context_length")}
    if factors:
        return {
            "rope_type": "longrope",
            "short_factor": factors["rope_factors_short.weight"],
            "long_factor": factors["rope_factors_long.weight"],
            "attention_factor": value("rope.scaling.attn_factor"),
            "original_max_position_embeddings": value("rope.scaling.original_context_length"),
        }
    kind = value("rope.scaling.type")
    if kind is None:
        return None
    scaled = {"rope_type": kind, "factor": value("rope.scaling.factor")}
    if kind == "yarn":
        scaled["original_max_position_embeddings"] = value("rope.scaling.original_context_length")
    return scaled


def _kept(tensor: Any) -> str:
    """The dtype in which a tensor is read back, as safetensors spells it."""
    return tensor.tensor_type.name if tensor.tensor_type.name in ("F16", "BF16") else "F32"


def _pieces(tensor: Any, target: Target) -> Iterator[Array]:
    import numpy as np
    from gguf import dequantize

    rows = tensor.data.reshape(-1, tensor.data.shape[-1]) if target.shape[1:] else tensor.data[None]
    width = target.shape[-1]
    unit = target.head or 1
    step = max(1, BLOCK // (4 * width) // unit) * unit
    for first in range(0, len(rows), step):
        values = dequantize(rows[first : first + step], tensor.tensor_type).astype(np.float32)
        if target.offset:
            values = values - np.float32(target.offset)
        yield np.ascontiguousarray(
            rounded(separated(values, target.head) if target.head else values, _kept(tensor))
        )


def _header(parts: list[tuple[Target, str]]) -> tuple[bytes, int]:
    """The safetensors prefix; a tensor of several sources lies where they lie one after the other."""
    entries: dict[str, Any] = {}
    offset = 0
    for target, kind in parts:
        shape = target.shape if len(target.sources) == 1 else target.shape[1:]
        size = 4 if kind == "F32" else 2
        for length in shape:
            size *= length
        for source in target.sources:
            entries[source] = {"dtype": kind, "shape": list(shape), "data_offsets": [offset, offset + size]}
            offset += size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 64)
    return struct.pack("<Q", len(text)) + text, offset


def _by_bytes(reader: Any, tokens: list[str], types: list[int]) -> Tokenizer:
    import tokenizers
    from tokenizers import Regex, decoders, models, pre_tokenizers

    vocab = {token: i for i, (token, kind) in enumerate(zip(tokens, types, strict=True)) if kind != UNUSED}
    merges = [tuple(pair.split(" ")) for pair in _value(reader, "tokenizer.ggml.merges", [])]
    pre = _value(reader, "tokenizer.ggml.pre")
    inner = tokenizers.Tokenizer(models.BPE(vocab, merges, ignore_merges=pre in ("llama-bpe", "tekken")))
    known: dict[str, Any] = {
        "digits": pre_tokenizers.Digits(individual_digits=True),
        "bytes": pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        "bytes by words": pre_tokenizers.ByteLevel(add_prefix_space=False),
    }
    steps = [
        known[part] if part in known else pre_tokenizers.Split(Regex(part), "isolated") for part in PRE[pre]
    ]
    inner.pre_tokenizer = pre_tokenizers.Sequence(steps)
    inner.decoder = decoders.ByteLevel()
    return inner


def _by_characters(reader: Any, tokens: list[str], types: list[int]) -> Tokenizer:
    """A SentencePiece encoding: of two neighbours those are merged whose whole has the highest score."""
    import tokenizers
    from tokenizers import models, normalizers

    scores = _value(reader, "tokenizer.ggml.scores")
    vocab = {token: i for i, token in enumerate(tokens)}
    plain = [i for i, kind in enumerate(types) if kind not in (CONTROL, USER_DEFINED, BYTE, UNUSED)]
    merges = []
    for i in sorted(plain, key=lambda i: -scores[i]):
        token = tokens[i]
        pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        merges += [pair for pair in pairs if pair[0] in vocab and pair[1] in vocab]
    unknown = next((tokens[i] for i, kind in enumerate(types) if kind == 2), None)
    inner = tokenizers.Tokenizer(
        models.BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    steps: list[Any] = [normalizers.Replace(" ", "▁")]
    if _value(reader, "tokenizer.ggml.add_space_prefix", True):
        steps.insert(0, normalizers.Prepend("▁"))
    inner.normalizer = normalizers.Sequence(steps)
    return inner
