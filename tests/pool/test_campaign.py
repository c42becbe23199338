"""Everybody works on one pool for a while, and accidents happen to everybody: see `campaign`.

``SPILL_CAMPAIGN_SECONDS`` says for how long (20), ``SPILL_CAMPAIGN_SEED`` which accidents.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

EXPECTED = "acked read collected retained released deleted rewritten killed stopped ended".split()
TESTS = Path(__file__).resolve().parents[1]


@pytest.mark.slow
def test_nothing_owned_is_lost_and_nothing_wrong_is_read(tmp_path: Path) -> None:
    seconds = os.environ.get("SPILL_CAMPAIGN_SECONDS", "20")
    seed = os.environ.get("SPILL_CAMPAIGN_SEED", str(random.getrandbits(32)))
    words = [sys.executable, "-m", "pool.campaign", str(tmp_path / "campaign"), seconds, seed]
    done = subprocess.run(words, cwd=TESTS, capture_output=True, text=True, timeout=float(seconds) + 120)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)
    print(f"seed {seed}: {found['figures']}")
    assert not found["wrong"], f"seed {seed}: {len(found['wrong'])} failures\n" + "\n\n".join(
        found["wrong"][:5]
    )
    figures = found["figures"]
    for kind in (
        "acked",
        "read",
        "collected",
        "retained",
        "released",
        "maintained",
        "killed",
        "stopped",
        "ended",
    ):
        assert figures.get(kind, 0) > 0, f"no {kind} in {figures}"
    assert figures["owned at the end"] > 0
