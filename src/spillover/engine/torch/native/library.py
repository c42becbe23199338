"""The compiled kernels as Python functions, with the structures that they read."""

from __future__ import annotations

import ctypes
import functools
from ctypes import POINTER, c_float, c_int32, c_int64, c_void_p
from typing import Any

from spillover.engine.torch.native.build import CannotBuild, build

VERSION = 1
PANEL = 32  # outputs that lie side by side in a packed matrix
BLOCK = 32  # positions of a cache block
KINDS = {"BF16": 0, "F32": 1, "F16": 2}  # dtypes of safetensors


class Parts(ctypes.Structure):
    """Up to three matrices of one width, below one another as files hold them; `kind` is a key of `KINDS`.

    Where they lie apart, each begins a panel of its own.
    """

    _fields_ = (
        ("data", c_void_p * 3),
        ("rows", c_int64 * 3),
        ("count", c_int32),
        ("kind", c_int32),
        ("apart", c_int32),
    )


class Matrix(ctypes.Structure):
    """A matrix ``[n, k]``, packed (`data`) or in `parts`, and its float32 bias, padded to whole panels."""

    _fields_ = (
        ("data", c_void_p),
        ("bias", c_void_p),
        ("n", c_int64),
        ("k", c_int64),
        ("parts", POINTER(Parts)),
    )


class AdapterPair(ctypes.Structure):
    """``x A B`` beside a matrix: ``a`` is ``[R, k]``, ``b`` is ``[n, R]``, scaled; no data: not adapted."""

    _fields_ = (("a", Matrix), ("b", Matrix))


class Shape(ctypes.Structure):
    """The numbers that every layer of a model shares."""

    _fields_ = (
        *((name, c_int32) for name in ("hidden", "heads", "kv_heads", "head_dim", "intermediate", "rotated")),
        ("activation", c_int32),
        *((name, c_float) for name in ("eps", "scale", "softcap")),
    )


NORMS = ("input_norm", "q_norm", "k_norm", "post_attention_norm", "feed_norm", "post_feed_norm")


class Layer(ctypes.Structure):
    """One layer's packed weights, norms (null: none), rotation tables and adapters (null: none)."""

    _fields_ = (
        *((name, Matrix) for name in ("qkv", "out", "gate_up", "down")),
        *((name, c_void_p) for name in NORMS),
        ("cos", c_void_p),
        ("sin", c_void_p),
        *((f"{name}_adapters", c_void_p) for name in ("qkv", "out", "gate_up", "down")),
        ("window", c_int32),
        ("sparse", c_int32),
    )


class Routing(ctypes.Structure):
    """The best `per_token` of `count` experts, their shares summing to one if `normalized`."""

    _fields_ = (("count", c_int32), ("per_token", c_int32), ("normalized", c_int32))


class Run(ctypes.Structure):
    """Consecutive tokens of one sequence, whose cache blocks hold it from position 0."""

    _fields_ = (("first", c_int32), ("count", c_int32), ("position", c_int32), ("blocks", c_void_p))


class Pass(ctypes.Structure):
    """The tokens that go through the layers together."""

    _fields_ = (
        *((name, c_int32) for name in ("tokens", "runs", "adapters")),
        ("run", POINTER(Run)),
        ("adapter", c_void_p),
        ("widest", c_int64),
    )


_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "spill_version": (c_int32, ()),
    "spill_workspace": (c_void_p, (c_int32,)),
    "spill_workspace_free": (None, (c_void_p,)),
    "spill_workspace_bytes": (c_int64, (c_void_p,)),
    "spill_pack": (None, (c_int32, POINTER(Parts), c_int64, c_int64, c_void_p, c_void_p)),
    "spill_block_bytes": (c_int64, (c_int32, c_int32, c_int32)),
    "spill_layer": (
        None,
        (c_int32, POINTER(Shape), POINTER(Layer), POINTER(Pass), c_void_p, c_int64, c_void_p, c_void_p),
    ),
    "spill_route": (
        None,
        (
            *(c_int32, POINTER(Shape), POINTER(Routing), POINTER(Matrix), c_void_p),
            *(c_void_p, c_int32, c_void_p, c_void_p, c_void_p),
        ),
    ),
    "spill_expert": (
        None,
        (
            *(c_int32, POINTER(Shape), POINTER(Matrix), POINTER(Matrix), c_int64),
            *(c_void_p, c_void_p, c_int32, c_int32, c_void_p, c_void_p),
        ),
    ),
    "spill_logits": (
        None,
        (
            *(c_int32, POINTER(Shape), POINTER(Matrix), c_void_p, c_float),
            *(c_void_p, c_int32, c_void_p, c_void_p),
        ),
    ),
    "spill_argmax": (None, (c_void_p, c_int64, c_int64, c_void_p, c_void_p)),
    "spill_logprobs": (
        None,
        (
            *(c_void_p, c_int64, c_void_p, c_void_p, c_int64, c_int32),
            *(c_void_p, c_void_p, c_void_p, c_void_p),
        ),
    ),
}


@functools.cache
def _load() -> ctypes.CDLL | str:
    try:
        library = ctypes.CDLL(str(build()))
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
        if library.spill_version() != VERSION:
            return "the compiled kernels are of another version"
    except CannotBuild as error:
        return str(error)
    except (OSError, AttributeError) as error:
        return f"the compiled kernels cannot be loaded: {error}"
    return library


def library() -> ctypes.CDLL | None:
    """The kernels, compiled when this machine has none yet; None where that cannot be done."""
    loaded = _load()
    return None if isinstance(loaded, str) else loaded


def why_not() -> str:
    """Why `library` is None, in a few words; empty when it is not."""
    loaded = _load()
    return loaded if isinstance(loaded, str) else ""
