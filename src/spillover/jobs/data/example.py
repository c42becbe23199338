"""One training sequence, and several as a micro-batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from spillover.engine.protocol import Likely, MicroBatch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

__all__ = ["Example", "collate"]


@dataclass(frozen=True)
class Example:
    """Token ids int32 ``[T]`` and the mask of those that are targets, bool ``[T]``.

    ``likely`` is what a teacher held of each target, if the loss wants that.
    """

    tokens: NDArray[np.int32]
    mask: NDArray[np.bool_]
    likely: Likely | None = None


def collate(examples: Sequence[Example]) -> MicroBatch:
    """Pad examples on the right, to the longest of them.

    Padding has token 0 and is never a target; ``lengths`` says where it begins.
    """
    lengths = np.array([len(one.tokens) for one in examples], np.int64)
    shape = (len(examples), int(lengths.max()))
    tokens = np.zeros(shape, np.int64)  # [B, T]
    mask = np.zeros(shape, np.bool_)  # [B, T]
    for row, one in enumerate(examples):
        tokens[row, : len(one.tokens)] = one.tokens
        mask[row, : len(one.mask)] = one.mask
    return MicroBatch(tokens, mask, lengths, _together([one.likely for one in examples if one.likely]))


def _together(parts: Sequence[Likely]) -> Likely | None:
    """The targets of several examples one after the other."""
    if not parts:
        return None
    return Likely(
        np.concatenate([one.tokens for one in parts]), np.concatenate([one.logprobs for one in parts])
    )
