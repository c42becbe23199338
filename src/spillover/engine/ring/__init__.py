"""Weights of a model larger than memory, read from the drive while the engine computes.

numpy and no engine's library: tensors are bytes with a dtype and a shape. Start at `Ring`.
"""

from __future__ import annotations

from spillover.engine.ring.drive import Drive, known_drive, measure_drive
from spillover.engine.ring.layers import LayerIndex, Part, RawTensor
from spillover.engine.ring.layout import Layout
from spillover.engine.ring.ring import Layer, Ring, Statistics, forward, forward_backward

__all__ = [
    "Drive",
    "Layer",
    "LayerIndex",
    "Layout",
    "Part",
    "RawTensor",
    "Ring",
    "Statistics",
    "forward",
    "forward_backward",
    "known_drive",
    "measure_drive",
]
