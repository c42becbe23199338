"""Activation checkpointing (Chen et al., arXiv 1604.06174): a layer runs again in the backward."""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Callable
from functools import partial
from typing import IO, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from spillover.errors import EngineError


class Inputs:
    """The inputs of layers until their backward: `room` bytes in memory, the rest in a file without a name.

    What comes last goes first, as in a backward.
    """

    def __init__(self, room: int) -> None:
        self._room = room
        self._used = 0  # bytes in memory
        self._end = 0  # of what is in the file
        self._file: IO[bytes] | None = None

    def clear(self) -> None:
        """Forget what a pass that was given up has left."""
        self._used = self._end = 0

    def keep(self, x: Tensor) -> Callable[[], Tensor]:
        """Put `x` away; the call that comes of it brings it back, once."""
        x = x.detach()
        if self._used + x.nbytes <= self._room:
            self._used += x.nbytes
            return partial(self._release, x)
        return self._write(x)

    def _release(self, x: Tensor) -> Tensor:
        self._used -= x.nbytes
        return x

    def _write(self, x: Tensor) -> Callable[[], Tensor]:
        start = self._end
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
                weakref.finalize(self, self._file.close)
            self._file.seek(start)
            content = x.cpu().contiguous().view(torch.uint8).numpy().data.cast("B")
            while content:
                content = content[self._file.write(content) :]
        except OSError as error:
            raise EngineError(
                f"layer inputs beyond the memory limit cannot be kept in {tempfile.gettempdir()}: "
                f"{error.strerror}",
                hint="allow more memory with --memory, or set TMPDIR to a larger disk",
            ) from None
        self._end = start + x.nbytes
        return partial(self._read, start, torch.empty(x.shape, dtype=x.dtype, device="meta"), x.device)

    def _read(self, start: int, like: Tensor, device: torch.device) -> Tensor:
        assert self._file is not None
        self._end = start
        read = torch.empty(like.nbytes, dtype=torch.uint8)
        content = read.numpy().data
        try:
            self._file.seek(start)
            while content:
                got = self._file.readinto(content)  # type: ignore[attr-defined]
                if not got:
                    raise EngineError("the file of layer inputs is shorter than what was written")
                content = content[got:]
        except OSError as error:
            raise EngineError(f"layer inputs cannot be read back: {error.strerror}") from None
        return read.view(like.dtype).view(like.shape).to(device)


def recomputed(
    run: Callable[[Tensor], Tensor], x: Tensor, anchor: Tensor | None, inputs: Inputs | None = None
) -> Tensor:
    """``run(x)``, which must give the same bits twice and may reach parameters on ways of its own.

    `anchor` requires a gradient where ``x`` does not but something inside `run` has a backward. `inputs`
    keeps ``x`` meanwhile; without, it stays in memory.
    """
    if not torch.is_grad_enabled():
        return run(x)
    return _Recomputed.apply(x, run, anchor, inputs)  # type: ignore[no-untyped-call, no-any-return]


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, run: Callable[[Tensor], Tensor], anchor: Tensor | None, inputs: Inputs | None
    ) -> Tensor:
        ctx.run = run
        if inputs is None:
            ctx.save_for_backward(x)
        y = run(x)
        ctx.again = None if inputs is None else inputs.keep(x)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, None]:
        (x,) = ctx.saved_tensors if ctx.again is None else (ctx.again(),)
        x = x.detach().requires_grad_(ctx.needs_input_grad[0])
        with torch.enable_grad():
            y = ctx.run(x)
        if y.requires_grad:
            torch.autograd.backward(y, grad)
        return x.grad, None, None, None
