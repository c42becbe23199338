"""The compiled functions of a training pass, on tensors.

They compute on torch's own threads, like the operators between which they stand: see ``crew.h``. `kernels`
says whether they serve a tensor; where they do not, torch's operators do the same.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from ctypes import POINTER, byref, c_float, c_int32, c_int64, c_void_p
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from spillover.engine.torch.native.library import library

if TYPE_CHECKING:
    from spillover.engine.torch.attention import Scoring
    from spillover.models.config import Activation

HEAD = 256  # the most dimensions of a head, as in `attention.h`


class Crew(ctypes.Structure):
    """Who computes: ``GOMP_parallel`` of the OpenMP library that torch uses, and how many threads."""

    _fields_ = (("parallel", c_void_p), ("threads", c_int32))


class Turn(ctypes.Structure):
    """Which part of a token's heads turns, and which way: 1 forward, -1 back."""

    _fields_ = (
        *((name, c_int32) for name in ("heads", "turned", "dim", "rotated")),
        ("direction", c_float),
    )


class Attend(ctypes.Structure):
    """How scores are made; `softcap` and `window` 0: none."""

    _fields_ = (("scale", c_float), ("softcap", c_float), ("window", c_int32))


class Sequences(ctypes.Structure):
    """The sequences of a pass and the heads of its tokens."""

    _fields_ = (
        *((name, c_int32) for name in ("count", "heads", "kv_heads", "dim")),
        ("starts", c_void_p),
        ("lengths", c_void_p),
    )


_X = c_void_p
SIGNATURES = {
    "spill_rms_norm": (POINTER(Crew), c_int32, _X, _X, c_int64, c_int64, c_float, _X, _X),
    "spill_rms_norm_back": (POINTER(Crew), c_int32, _X, _X, _X, _X, c_int64, c_int64, _X),
    "spill_rotate": (POINTER(Crew), c_int32, _X, _X, _X, c_int64, POINTER(Turn), _X),
    "spill_gated": (POINTER(Crew), c_int32, _X, c_int64, c_int64, c_int32, _X),
    "spill_gated_back": (POINTER(Crew), c_int32, _X, _X, c_int64, c_int64, c_int32, _X),
    "spill_sequences": (POINTER(Crew), c_int32, POINTER(Attend), POINTER(Sequences), _X, _X, _X),
    "spill_sequences_back": (
        *(POINTER(Crew), c_int32, POINTER(Attend), POINTER(Sequences)),
        *(_X, _X, _X, _X, _X),
    ),
}


class Kernels:
    """The functions of one compiled library."""

    def __init__(self, compiled: ctypes.CDLL) -> None:
        self._do = compiled
        for name, arguments in SIGNATURES.items():
            function = getattr(compiled, name)
            function.restype, function.argtypes = None, arguments

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """The norm of ``[..., n]``, and the factor of each row, float32; `weight` is float32."""
        x = x.contiguous()
        out, scales = torch.empty_like(x), x.new_empty(x.shape[:-1], dtype=torch.float32)
        self._do.spill_rms_norm(
            _crew(), _wide(x), _at(x), _at(weight), scales.numel(), x.shape[-1], eps, _at(out), _at(scales)
        )
        return out, scales

    def rms_norm_back(self, grad: Tensor, x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
        """The gradient of `rms_norm`'s input."""
        grad, x = grad.contiguous(), x.contiguous()
        by_x = torch.empty_like(x)
        self._do.spill_rms_norm_back(
            *(_crew(), _wide(x), _at(grad), _at(x), _at(weight), _at(scales)),
            *(scales.numel(), x.shape[-1], _at(by_x)),
        )
        return by_x

    def rotate(self, heads: Tensor, cos: Tensor, sin: Tensor, count: int, direction: float) -> Tensor:
        """``[N, heads, D]`` with the first `count` heads turned by tables ``[N, 1, dim]``."""
        heads = heads.contiguous()
        out = torch.empty_like(heads)
        turn = Turn(heads.shape[1], count, heads.shape[2], cos.shape[-1], direction)
        self._do.spill_rotate(
            *(_crew(), _wide(heads), _at(heads), _at(cos), _at(sin)),
            *(len(heads), byref(turn), _at(out)),
        )
        return out

    def gated(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """``activation(gate) * up`` of ``[N, 2 I]``."""
        gate_up = gate_up.contiguous()
        rows, inner = len(gate_up), gate_up.shape[1] // 2
        out = gate_up.new_empty(rows, inner)
        self._do.spill_gated(
            _crew(), _wide(gate_up), _at(gate_up), rows, inner, activation != "silu", _at(out)
        )
        return out

    def gated_back(self, grad: Tensor, gate_up: Tensor, activation: Activation) -> Tensor:
        """The gradient of `gated`'s input."""
        grad, gate_up = grad.contiguous(), gate_up.contiguous()
        by_gate_up = torch.empty_like(gate_up)
        self._do.spill_gated_back(
            *(_crew(), _wide(gate_up), _at(grad), _at(gate_up), *grad.shape),
            *(activation != "silu", _at(by_gate_up)),
        )
        return by_gate_up

    def attention(
        self, heads: Tensor, within: Within, kv_heads: int, scoring: Scoring
    ) -> tuple[Tensor, Tensor]:
        """Each sequence of ``[N, heads + 2 kv_heads, D]`` over itself: ``[N, heads, D]``.

        Also the logarithm of each query's total, float32 ``[heads * N]`` in the order of sequences. Rows of
        no sequence are zero.
        """
        heads = heads.contiguous()
        out = heads.new_empty(len(heads), heads.shape[1] - 2 * kv_heads, heads.shape[2])
        out[within.covered :] = 0
        sums = heads.new_empty(out.shape[0] * out.shape[1], dtype=torch.float32)
        self._do.spill_sequences(
            *(_crew(), _wide(heads), byref(_attend(scoring)), byref(within.described(out, kv_heads))),
            *(_at(heads), _at(out), _at(sums)),
        )
        return out, sums

    def attention_back(
        self, grad: Tensor, heads: Tensor, out: Tensor, sums: Tensor, within: Within, scoring: Scoring
    ) -> Tensor:
        """The gradient of `attention`'s heads."""
        grad, heads = grad.contiguous(), heads.contiguous()
        by_heads = torch.empty_like(heads)
        by_heads[within.covered :] = 0
        kv_heads = (heads.shape[1] - out.shape[1]) // 2
        self._do.spill_sequences_back(
            *(_crew(), _wide(heads), byref(_attend(scoring)), byref(within.described(out, kv_heads))),
            *(_at(heads), _at(out), _at(sums), _at(grad), _at(by_heads)),
        )
        return by_heads


class Within:
    """Where the sequences of a pass lie: one after the other, from its first row."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self._lengths = torch.tensor(lengths, dtype=torch.int64)
        self._starts = self._lengths.cumsum(0) - self._lengths
        self.covered = sum(lengths)

    def described(self, out: Tensor, kv_heads: int) -> Sequences:
        """The same for the kernels, the queries as in ``[N, heads, D]``; good as long as this object."""
        count, (_, heads, dim) = len(self._lengths), out.shape
        return Sequences(count, heads, kv_heads, dim, _at(self._starts), _at(self._lengths))


def kernels(x: Tensor) -> Kernels | None:
    """The functions for `x`; None where it is no tensor for them, or nothing could be compiled."""
    if x.device.type != "cpu" or x.dtype not in (torch.bfloat16, torch.float32):
        return None
    return _kernels()


@functools.cache
def _kernels() -> Kernels | None:
    compiled = library()
    return None if compiled is None else Kernels(compiled)


@functools.cache
def _parallel() -> int | None:
    """The address of ``GOMP_parallel`` in the library that torch has loaded; None: another OpenMP."""
    try:
        return ctypes.cast(ctypes.CDLL(None).GOMP_parallel, c_void_p).value
    except (AttributeError, OSError):
        return None


@functools.cache
def _crew_of(threads: int) -> Crew:
    return Crew(_parallel(), threads)


def _crew() -> Crew:
    return _crew_of(torch.get_num_threads())


def _attend(scoring: Scoring) -> Attend:
    return Attend(scoring.scale, scoring.softcap or 0.0, scoring.window or 0)


def _wide(x: Tensor) -> bool:
    return x.dtype == torch.float32


def _at(x: Tensor) -> int:
    return x.data_ptr()
