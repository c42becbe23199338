"""Four processes write samples next to each other; another one picks the best, and keeps nothing else.

python share.py FOLDER
"""

from __future__ import annotations

import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor

import numpy as np

from spillover.pool import Link, Pool, Record, Ref

WRITERS, SAMPLES, KEPT = 4, 8, 5


def write(folder: str, seed: int) -> list[str]:
    """Publish samples, and return their references: 64 characters each, whatever the size of a sample."""
    random = np.random.default_rng(seed)
    refs = []
    with Pool.open(folder) as pool:
        for number in range(SAMPLES):
            facts = {"writer": seed, "number": number, "reward": round(random.random(), 3)}
            tokens = random.integers(0, 50_000, size=(20, 1000), dtype=np.int32)
            refs.append(pool.publish([Record("facts", facts), Record("tokens", tokens)]))
    return [str(ref) for ref in refs]


def main(folder: str) -> None:
    Pool.open(folder, create=True, max_bytes=10_000_000).close()
    with ProcessPoolExecutor(WRITERS, multiprocessing.get_context("spawn")) as writers:
        found = writers.map(write, [folder] * WRITERS, range(WRITERS))
        samples = [Ref.parse(text) for texts in found for text in texts]

    with Pool.open(folder) as pool, pool.owners() as owners:
        rewards = {sample: pool.record(sample.at(0)).payload["reward"] for sample in samples}
        best = sorted(samples, key=lambda sample: rewards[sample])[-KEPT:]
        # A batch shares the tokens: nothing is copied, and they live as long as the batch does.
        batch = pool.publish([Link(f"tokens {number}", sample.at(1)) for number, sample in enumerate(best)])
        owners.retain("batch-1", [batch])
        before = owners.stats().bytes
        owners.compact()
        owners.collect()
        after = owners.stats().bytes
        rows = pool.read(batch)["tokens 0"].payload[3:5]  # two rows, read and checked alone

    print(f"{len(samples)} samples of {WRITERS} processes; the best {KEPT} are kept")
    print(f"{before / 1e6:.1f} MB became {after / 1e6:.1f} MB; two rows of one of them: {rows.shape}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "samples")
