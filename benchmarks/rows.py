"""Short rows from file to file: `spill run` against a plain script around `transformers.generate`.

2,000 questions with answers of at most 8 to 32 tokens, greedy, on the demo model. Both sides are commands on
all cores, timed from start to the last result, loading of the model included. Ours is the whole command with
its durable state in a fresh folder; the script (`rows_plain.py`) holds its answers in memory until the end.
It sorts its rows, and runs with the dtype and the batch size, of 16, 32, 64 and 128, that were the fastest
on the first 256 of them.

    python benchmarks/rows.py [--quick] [--json FILE]

``--quick`` takes 200 rows, and tries two batch sizes on 64 of them.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from report import Report, arguments

from spillover.models import resolve

PLAIN = Path(__file__).with_name("rows_plain.py")
SPILL = Path(sys.executable).with_name("spill")
ASKED = (
    "What is the capital of {}?",
    "Name one river in {}.",
    "Is {} north or south of the equator? Answer in one word.",
    "Write the first sentence of a postcard from {}.",
    "Which language do most people in {} speak, and which of its words should a visitor learn first?",
    "In one sentence: what is {} known for?",
    "My parcel to {} has been under way for {} days. Is that normal? Give a short and friendly answer.",
    "Translate into English: Ich fahre in {} Tagen nach {}.",
)
PLACES = (
    *("Norway", "Kenya", "Peru", "Japan", "Portugal", "Canada", "Vietnam", "Egypt", "Iceland", "Chile"),
    *("Poland", "Ghana", "India", "Greece", "New Zealand", "Mexico", "Turkey", "Bolivia", "Nepal", "Spain"),
)


def write_rows(path: Path, count: int) -> None:
    """Rows of several lengths, in no order."""
    source = random.Random(5)
    with path.open("w") as file:
        for number in range(count):
            words = [source.choice(PLACES), str(2 + number % 90)]
            question = source.choice(ASKED)
            prompt = question.format(*(reversed(words) if "Tagen" in question else words))
            file.write(json.dumps({"prompt": prompt, "max_tokens": source.randint(8, 32)}) + "\n")


def timed(command: list[str | Path], folder: Path) -> tuple[float, str]:
    """Seconds of a command on all cores, and what it printed."""
    environ = os.environ | {"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))}
    start = time.perf_counter()
    done = subprocess.run(command, cwd=folder, env=environ, text=True, capture_output=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(map(str, command))}:\n{done.stderr or done.stdout}")
    return time.perf_counter() - start, done.stdout


def plain(model: Path, rows: Path, folder: Path, batch: int, dtype: str) -> tuple[float, dict[str, float]]:
    """Seconds of the script in all, and what it says of itself."""
    command = [sys.executable, PLAIN, model, rows, folder / "plain.jsonl", str(batch), dtype]
    seconds, printed = timed(command, folder)
    return seconds, json.loads(printed)


def best_script(model: Path, rows: Path, folder: Path, quick: bool) -> tuple[int, str]:
    """The batch size and dtype that generate fastest on some rows, loading left aside."""
    some = folder / "some.jsonl"
    with rows.open() as file:
        some.write_text("".join(line for line, _ in zip(file, range(64 if quick else 256), strict=False)))
    rates: dict[tuple[int, str], float] = {}
    for batch in (16, 64) if quick else (16, 32, 64, 128):
        for dtype in ("bfloat16", "float32") if batch == 16 else (max(rates, key=rates.__getitem__)[1],):
            said = plain(model, some, folder, batch, dtype)[1]
            rates[batch, dtype] = said["tokens"] / said["seconds"]
            print(f"  script, batch {batch}, {dtype}: {rates[batch, dtype]:.0f} tokens/s", flush=True)
    return max(rates, key=rates.__getitem__)


def spill(rows: Path, folder: Path, number: int) -> float:
    """Seconds of `spill run` in a new folder of its own."""
    command = [SPILL, "run", "demo", rows, "--out", folder / "ours.jsonl", "--quiet"]
    fresh = folder / f"run-{number}"
    fresh.mkdir()
    return timed(command, fresh)[0]


def compare_answers(report: Report, folder: Path) -> None:
    """How many answers are the same: in bf16, two ways to sum a product part at near ties."""
    ours = [json.loads(line) for line in (folder / "ours.jsonl").read_text().splitlines()]
    theirs = [json.loads(line)["answer"] for line in (folder / "plain.jsonl").read_text().splitlines()]
    mine = [row["response"]["body"]["choices"][0]["message"]["content"] for row in ours]
    equal = sum(a == b for a, b in zip(mine, theirs, strict=True))
    report.figures["equal answers"] = {"ours": equal, "of": len(mine)}
    print(f"  {equal} of {len(mine)} answers are the same", flush=True)


def main() -> None:
    args, report = arguments(__doc__), Report()
    model = resolve("demo")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows, count = folder / "rows.jsonl", 200 if args.quick else 2000
        write_rows(rows, count)
        batch, dtype = best_script(model.path, rows, folder, args.quick)
        mine = spill(rows, folder, 0)
        theirs, said = plain(model.path, rows, folder, batch, dtype)
        report.add(f"{count:,} rows, batch {batch}, {dtype}", mine, theirs, "s", higher_is_better=False)
        print(f"  the script generated for {said['seconds']:.1f} s of that", flush=True)
        compare_answers(report, folder)
    report.save(args.json)


if __name__ == "__main__":
    main()
