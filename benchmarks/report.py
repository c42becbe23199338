"""What benchmarks print, and the JSON they write: a ratio above 1 means that ours is better."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path


def arguments(description: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="end within a minute")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    return parser.parse_args()


def alternate(ours: Callable[[], float], peer: Callable[[], float], rounds: int) -> tuple[float, float]:
    """Medians of `rounds` runs of each, one after the other so that both meet the same machine."""
    pairs = [(ours(), peer()) for _ in range(rounds)]
    return statistics.median(x for x, _ in pairs), statistics.median(y for _, y in pairs)


class Report:
    """Figures as they come, then a file of them."""

    def __init__(self) -> None:
        self.figures: dict[str, dict[str, float | str]] = {}

    def add(self, measure: str, ours: float, peer: float, unit: str, *, higher_is_better: bool) -> None:
        ratio = ours / peer if higher_is_better else peer / ours
        self.figures[measure] = {
            "ours": round(ours, 4), "peer": round(peer, 4), "ratio": round(ratio, 3), "unit": unit,
        }  # fmt: skip
        print(f"{measure:<34} ours {ours:9.3f}  peer {peer:9.3f} {unit:<9} ratio {ratio:5.2f}", flush=True)

    def save(self, path: Path | None) -> None:
        if path is not None:
            path.write_text(json.dumps(self.figures, indent=2) + "\n")
