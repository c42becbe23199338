"""The torch engine, resident placement."""

from __future__ import annotations

import os

# GNU OpenMP's threads spin for milliseconds at every barrier. When another process has one of the cores, the
# thread they wait for is not running, and a decode step measured here takes 1,400 ms instead of 45. Spin for
# microseconds, then sleep. It must be said before torch loads the library, and a user's own setting stands.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

from spillover.engine.torch.engine import TorchEngine

__all__ = ["TorchEngine"]
