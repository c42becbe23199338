"""A classification task from banking77 (PolyAI, CC BY 4.0): ten intents, 500 rows to learn, 100 held out."""

from __future__ import annotations

import csv
import json
import random
from pathlib import Path

from data import shared

LABELS = 10


def write(folder: Path, train: int = 500, test: int = 100) -> tuple[Path, Path]:
    """Write ``train.jsonl`` and ``test.jsonl``; the held-out rows come from the data set's own test file."""
    rows = _read("train.csv")
    labels = sorted({label for _, label in rows})[:LABELS]
    folder.mkdir(parents=True, exist_ok=True)
    learned = _chosen(rows, labels, train, seed=0)
    held_out = _chosen(_read("test.csv"), labels, test, seed=1)
    paths = folder / "train.jsonl", folder / "test.jsonl"
    _write(paths[0], [{"prompt": text, "answer": label} for text, label in learned])
    _write(paths[1], [{"prompt": text, "expected": label, "max_tokens": 24} for text, label in held_out])
    return paths


def accuracy(results: Path) -> float:
    """The share of result lines whose answer is exactly what was expected."""
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    right = 0
    for line in lines:
        answer = line["response"]["body"]["choices"][0]["message"]["content"]
        right += answer.strip() == line["spillover"]["expected"]
    return right / len(lines)


def _read(name: str) -> list[tuple[str, str]]:
    with shared("banking77", name).open(newline="", encoding="utf-8") as file:
        return [(row["text"], row["category"]) for row in csv.DictReader(file)]


Rows = list[tuple[str, str]]


def _chosen(rows: Rows, labels: list[str], count: int, *, seed: int) -> Rows:
    found = [row for row in rows if row[1] in labels]
    random.Random(seed).shuffle(found)
    return found[:count]


def _write(path: Path, rows: list[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
