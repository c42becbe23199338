"""Sequences of any lengths as one stream of tokens, padded at its end alone."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

GRAIN = 16


def whole(length: int) -> int:
    """`length` rounded up to one of 16 numbers per power of two, multiples of 16 all.

    oneDNN compiles and keeps a kernel for every shape of product it meets. With few different lengths there
    are few, which saves a compilation a pass, and gigabytes after a while.
    """
    grain = max(GRAIN, 1 << (max(1, length - 1).bit_length() - 5 if length > 512 else 4))
    return -(-length // grain) * grain


@dataclass(frozen=True)
class Packing:
    """`tokens` and `positions` are int64 ``[N]``; `lengths` sum to N, the last may be that of padding."""

    tokens: Tensor
    positions: Tensor
    lengths: list[int]

    @property
    def longest(self) -> int:
        """Above every position."""
        return max(self.lengths)


def pack(sequences: Sequence[Sequence[int]], device: torch.device) -> Packing:
    """`sequences` one after the other, and then padding as a sequence of its own, which no other sees."""
    lengths = [len(sequence) for sequence in sequences]
    padding = whole(sum(lengths)) - sum(lengths)
    tokens = list(itertools.chain(*sequences, itertools.repeat(0, padding)))
    if padding:
        lengths.append(padding)
    positions = torch.cat([torch.arange(length) for length in lengths])
    return Packing(torch.tensor(tokens, device=device), positions.to(device), lengths)
