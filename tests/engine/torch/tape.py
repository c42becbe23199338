"""A recorder of steps for any device, with the rules of a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# `item`, `tolist`, `numpy`, and shapes that depend on values
_SYNCHRONIZING = tuple(f"aten::{name}" for name in (
    "item", "_local_scalar_dense", "resolve_conj", "resolve_neg", "nonzero", "bincount", "masked_select",
))  # fmt: skip


class Tape:
    """Records the operators that a function calls; a replay calls those, and no line of the function.

    As with a CUDA graph each operator reads and writes the memory that it did when it was recorded, numbers
    that came from Python stay what they were, and what needs a value on the host cannot be recorded.
    """

    def __init__(self) -> None:
        self.recorded = 0
        self.replayed = 0

    def __call__(self, run: Callable[[], object]) -> Callable[[], None]:
        run()  # warms up; so a step must be one that may be repeated
        recording = _Recording()
        with recording:
            run()
        self.recorded += 1

        def replay() -> None:
            self.replayed += 1
            for call, args, kwargs, results in recording.calls:
                for old, new in zip(results, _tensors(call(*args, **kwargs)), strict=True):
                    if _memory(old) != _memory(new):
                        old.copy_(new)

        for _, args, kwargs, results in recording.calls:
            given = {_memory(one) for one in _tensors((args, kwargs))}
            for made in results:
                if _memory(made) not in given:
                    made.zero_()  # a recording computes nothing
        return replay


class _Recording(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[Tensor]]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.name().startswith(_SYNCHRONIZING):
            raise RuntimeError(f"{func.name()} is not permitted while recording\nand some lines more")
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, _tensors(result)))
        return result


def _tensors(tree: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _memory(tensor: Tensor) -> object:
    return id(tensor) if tensor.layout == torch._mkldnn else tensor.untyped_storage().data_ptr()
