"""Adapters on disk: one folder that PEFT, mlx-lm and vLLM load as it is.

Layout: ``adapter_model.safetensors`` for PEFT, with
``base_model.model.model.layers.<k>.<module>.lora_A.weight`` [r, in] and ``.lora_B.weight`` [out, r];
``adapters.safetensors`` for mlx-lm, with ``model.layers.<k>.<module>.lora_a`` [in, r] and ``.lora_b`` [r,
out]; and one ``adapter_config.json`` with the fields of both, written last: a folder without it is no
adapter.
"""

from __future__ import annotations

import difflib
import json
import math
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spillover.errors import InputError, ModelError
from spillover.models.config import read_json
from spillover.models.folders import adapters_home, replace, writing
from spillover.models.index import TensorSlice, read_header
from spillover.models.lora import ADAPTABLE, Adapter, LoraConfig, targets_of

if TYPE_CHECKING:
    from spillover.models.lora import Array

CONFIG = "adapter_config.json"
PEFT_WEIGHTS = "adapter_model.safetensors"
MLX_WEIGHTS = "adapters.safetensors"

_VALID = re.compile(r"[A-Za-z0-9][\w.-]*", re.ASCII)
_PEFT_KEY = re.compile(
    r"base_model\.model\.(?:model\.)?layers\.(\d+)\.([\w.]+)\.lora_([AB])\.(?:default\.)?weight"
)
_MLX_KEY = re.compile(r"(?:model\.)?layers\.(\d+)\.([\w.]+)\.lora_([ab])")


@dataclass(frozen=True)
class Installed:
    """One adapter under ``SPILL_HOME``, from its configuration alone."""

    name: str
    path: Path
    base: str
    fingerprint: str
    rank: int
    bytes: int


def check_name(name: str, *, overwrite: bool = False) -> None:
    """Raise `InputError` for a name that cannot be used, or is taken and may not be overwritten."""
    if not _VALID.fullmatch(name):
        raise InputError(
            f"{name!r} is no adapter name", hint="use letters, digits, dots, dashes and underscores"
        )
    if (adapters_home() / name).exists() and not overwrite:
        raise InputError(f"adapter {name!r} exists already", hint="choose another --name, or add --overwrite")


def save(name: str, adapter: Adapter, *, overwrite: bool = False) -> Path:
    """Write `adapter` as ``adapters/NAME``, all at once, and return the folder.

    Raises `InputError` when the name is unusable or taken.
    """
    check_name(name, overwrite=overwrite)
    final = adapters_home() / name
    new = final.with_name(f".{name}.{os.getpid()}")
    shutil.rmtree(new, ignore_errors=True)
    try:
        with writing(final):
            new.mkdir(parents=True)
            write(new, adapter)
            replace(new, final)
    finally:
        shutil.rmtree(new, ignore_errors=True)
    return final


def write(folder: Path, adapter: Adapter) -> None:
    """Write the files of `adapter` into `folder`, the configuration last."""
    import numpy as np
    from safetensors.numpy import save

    peft = {}
    for key, tensor in adapter.tensors.items():
        stem, side = key.rsplit(".lora_", 1)
        peft[f"base_model.model.model.{stem}.lora_{side.upper()}.weight"] = np.ascontiguousarray(tensor.T)
    # Not save_file, which does not raise OSError when the disk is full.
    (folder / PEFT_WEIGHTS).write_bytes(save(peft, metadata={"format": "pt"}))
    mlx = {f"model.{key}": np.ascontiguousarray(tensor) for key, tensor in adapter.tensors.items()}
    (folder / MLX_WEIGHTS).write_bytes(save(mlx, metadata={"format": "mlx"}))
    text = json.dumps(_document(adapter), indent=2) + "\n"
    (folder / CONFIG).write_text(text, encoding="utf-8")


def load(name: str) -> Adapter:
    """Read the adapter called `name`, or the one in the folder `name`, made by spillover, PEFT or mlx-lm.

    Tensors become float32. Raises `ModelError` naming what is missing, damaged or of a kind that is not
    supported.
    """
    folder = find(name)
    config = read_json(folder / CONFIG)
    try:
        if "peft_type" in config:
            return _load_peft(folder, config)
        if "lora_parameters" in config:
            return _load_mlx(folder, config)
    except KeyError as error:
        raise ModelError(f"{folder / CONFIG} has no key {error}", hint="get the adapter again") from None
    except (TypeError, ValueError) as error:
        raise ModelError(f"{folder / CONFIG} holds a value of the wrong kind: {error}") from None
    raise ModelError(
        f"{folder / CONFIG} is neither of PEFT nor of mlx-lm", hint="export the adapter as LoRA again"
    )


def find(name: str) -> Path:
    """The folder of an adapter; `ModelError` with close names as hint when there is none."""
    installed = adapters_home() / name
    for folder in (installed, Path(name).expanduser()):
        if (folder / CONFIG).is_file():
            return folder
    near = difflib.get_close_matches(name, [adapter.name for adapter in installed_adapters()], n=3)
    hint = f"use {' or '.join(near)}" if near else "spill adapters"
    raise ModelError(f"there is no adapter {name!r}", hint=hint)


def installed_adapters() -> list[Installed]:
    """The adapters under ``SPILL_HOME`` by name; folders that cannot be read are left out."""
    root = adapters_home()
    if not root.is_dir():
        return []
    return [found for folder in sorted(root.iterdir()) if (found := _summary(folder)) is not None]


def _summary(folder: Path) -> Installed | None:
    if folder.name.startswith(".") or not (folder / CONFIG).is_file():
        return None
    try:
        config = read_json(folder / CONFIG)
        ours = config.get("spillover") or {}
        rank = int(config.get("r") or config["lora_parameters"]["rank"])
        base = ours.get("base") or config.get("base_model_name_or_path") or ""
    except (ModelError, KeyError, TypeError, ValueError, AttributeError):
        return None
    size = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
    return Installed(folder.name, folder, str(base), str(ours.get("fingerprint", "")), rank, size)


def _document(adapter: Adapter) -> dict[str, Any]:
    config = adapter.config
    layers = 1 + max((int(key.split(".")[1]) for key in adapter.tensors), default=-1)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": adapter.base or None,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": config.dropout,
        "target_modules": [module.rsplit(".", 1)[-1] for module in config.targets],
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
        "use_dora": False,
        "use_rslora": False,
        "fine_tune_type": "lora",
        "num_layers": layers,
        "lora_parameters": {
            "rank": config.rank,
            "scale": config.scale,
            "dropout": config.dropout,
            "keys": list(config.targets),
        },
        "spillover": {"base": adapter.base, "fingerprint": adapter.fingerprint},
    }


def _load_peft(folder: Path, config: dict[str, Any]) -> Adapter:
    _refuse_peft(folder, config)
    rank = int(config["r"])
    alpha = float(config.get("lora_alpha") or rank)
    if config.get("use_rslora"):
        # The rank-stabilised scale is alpha / sqrt(r): Kalajdzievski 2023, arXiv 2312.03732.
        alpha *= math.sqrt(rank)
    tensors = {}
    for key, part in _entries(folder / PEFT_WEIGHTS):
        match = _PEFT_KEY.fullmatch(key)
        name = _neutral(folder, key, match)
        tensors[name] = _array(part).T
    return _adapter(folder, config, tensors, rank, alpha, float(config.get("lora_dropout") or 0.0))


def _load_mlx(folder: Path, config: dict[str, Any]) -> Adapter:
    kind = config.get("fine_tune_type", "lora")
    if kind != "lora":
        raise ModelError(f"{folder} is a {kind} fine-tune, not LoRA", hint="export it as LoRA")
    given = config["lora_parameters"]
    rank = int(given["rank"])
    tensors = {}
    for key, part in _entries(folder / MLX_WEIGHTS):
        tensors[_neutral(folder, key, _MLX_KEY.fullmatch(key))] = _array(part)
    return _adapter(
        folder, config, tensors, rank, float(given["scale"]) * rank, float(given.get("dropout") or 0.0)
    )


def _refuse_peft(folder: Path, config: dict[str, Any]) -> None:
    why = None
    if config["peft_type"] != "LORA":
        why = f"peft_type {config['peft_type']}"
    elif config.get("use_dora"):
        why = "DoRA (use_dora)"
    elif config.get("bias", "none") != "none":
        why = f"trained biases (bias {config['bias']})"
    else:
        keys = ("modules_to_save", "rank_pattern", "alpha_pattern", "fan_in_fan_out", "target_parameters")
        why = next((key for key in keys if config.get(key)), None)
    if why:
        raise ModelError(
            f"adapter {folder} uses {why}, which is not supported", hint="export it as plain LoRA"
        )


def _neutral(folder: Path, key: str, match: re.Match[str] | None) -> str:
    if match is None or match[2] not in ADAPTABLE:
        raise ModelError(
            f"adapter {folder} changes {key}, which is not supported",
            hint=f"adapt only {', '.join(ADAPTABLE)}",
        )
    return f"layers.{match[1]}.{match[2]}.lora_{match[3].lower()}"


def _adapter(
    folder: Path, config: dict[str, Any], tensors: dict[str, Array], rank: int, alpha: float, dropout: float
) -> Adapter:
    """Check that A and B come in pairs of the stated rank, and put the adapter together."""
    import numpy as np

    for key, tensor in tensors.items():
        other = key[:-1] + ("b" if key.endswith("a") else "a")
        if other not in tensors:
            raise ModelError(f"adapter {folder} has {key} but no {other}", hint="get the adapter again")
        found = tensor.shape[1 if key.endswith("a") else 0]
        if found != rank:
            raise ModelError(
                f"adapter {folder} says rank {rank}, but {key} has {found}", hint="get the adapter again"
            )
    ours = config.get("spillover") or {}
    return Adapter(
        config=LoraConfig(rank, alpha, targets_of(tensors), dropout),
        tensors={key: np.ascontiguousarray(tensors[key]) for key in sorted(tensors)},
        base=str(ours.get("base") or config.get("base_model_name_or_path") or ""),
        fingerprint=str(ours.get("fingerprint") or ""),
    )


def _entries(path: Path) -> Iterator[tuple[str, TensorSlice]]:
    if not path.is_file():
        raise ModelError(
            f"{path} is missing", hint="adapters are read from safetensors only; save it as such"
        )
    yield from read_header(path).items()


def _array(part: TensorSlice) -> Array:
    """One tensor as float32; numpy has no bf16, whose bits are the upper half of a float32."""
    import numpy as np

    kinds = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
    if part.dtype not in kinds or len(part.shape) != 2:
        raise ModelError(f"{part.file} holds a tensor of kind {part.dtype} {part.shape}, not a float matrix")
    with part.file.open("rb") as file:
        file.seek(part.start)
        values = np.frombuffer(file.read(part.stop - part.start), kinds[part.dtype]).reshape(part.shape)
    if part.dtype == "BF16":
        return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return values.astype(np.float32)
