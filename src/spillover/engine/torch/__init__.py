"""The torch engine, resident placement."""

from __future__ import annotations

from spillover.engine.torch.engine import TorchEngine

__all__ = ["TorchEngine"]
