"""A served model: batches beside `spill run`, and a crowd of clients of whom some leave.

The rows are 400 questions with answers of at most 8 to 32 tokens, greedy, on the demo model, 64 at a time, in
one file that both sides take. Ours is a batch of a server that is up already, from its creation to its last
row; the "peer" is the command `spill run` from its first row to its last, by its own events, so that the
reading of weights counts on neither side. They take turns. Then 64 clients stream answers for a minute, and
every third answer is left half-way: afterwards no row may be left, and the process may not have grown.

    python benchmarks/serve.py [--quick] [--json FILE]

``--quick`` takes 100 rows once and a crowd of 10 seconds.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from report import Report, alternate, arguments
from rows import ASKED, PLACES

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from crowd import crowd
from served import SPILL, Running, eventually
from spillover.models import home, resolve

AT_LEAST = 0.8
"""Of the throughput of a run, for a batch."""


def write_rows(path: Path, count: int) -> None:
    """Rows of a batch of several lengths, in no order."""
    source = random.Random(5)
    with path.open("w") as file:
        for number in range(count):
            words = [source.choice(PLACES), str(2 + number % 90)]
            question = source.choice(ASKED)
            prompt = question.format(*(reversed(words) if "Tagen" in question else words))
            body = {
                "messages": [{"role": "user", "content": prompt}],
                "max_tokens": source.randint(8, 32),
                "temperature": 0,
            }
            row = {"custom_id": f"row-{number + 1:06d}", "method": "POST", "url": "/v1/chat/completions"}
            file.write(json.dumps(row | {"body": body}) + "\n")


def by_run(rows: Path, folder: Path) -> float:
    """Rows a second of `spill run`, from where its work starts."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        command = [SPILL, "run", "demo", rows, "--batch", "64", "--headless", "--numerics", "float32"]
        done = subprocess.run(command, cwd=place, capture_output=True, text=True, check=True)
    events = [json.loads(line) for line in done.stdout.splitlines()]
    at = {kind: [one["time"] for one in events if one["event"] == kind] for kind in ("start", "row")}
    return len(at["row"]) / (at["row"][-1] - at["start"][0])


def by_batch(server: Running, rows: Path) -> float:
    """Rows a second of a batch."""
    client = server.client
    with rows.open("rb") as data:
        file = client.files.create(file=data, purpose="batch")
    begun = time.monotonic()
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    while batch.status not in ("completed", "failed"):
        time.sleep(0.02)
        batch = client.batches.retrieve(batch.id)
    assert batch.status == "completed", batch
    return batch.request_counts.completed / (time.monotonic() - begun)


def resident(server: Running) -> float:
    """MB of the server's process that are in memory."""
    pages = Path(f"/proc/{server.process.pid}/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE") / 1e6


def the_crowd(server: Running, report: Report, seconds: float) -> None:
    crowd(server.url, "demo", clients=64, seconds=seconds / 6, tokens=32)
    eventually(server.idle)
    before = resident(server)
    found = crowd(server.url, "demo", clients=64, seconds=seconds, tokens=32)
    eventually(server.idle)
    assert found.wrong == [], found.wrong[:3]
    first = 1e3 * statistics.median(found.first)
    print(
        f"64 clients, {seconds:g} s: {found.finished} answers to their end, {found.left} left half-way, "
        f"{found.tokens / seconds:,.0f} tokens/s, first piece after {first:,.0f} ms (median); "
        f"{resident(server) - before:+.1f} MB, no row left"
    )
    report.add("memory after the crowd", resident(server), before, "MB", higher_is_better=False)


def main() -> None:
    options = arguments(__doc__)
    report = Report()
    resolve("demo")
    threads = len(os.sched_getaffinity(0))
    os.environ["OMP_NUM_THREADS"] = str(threads)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        rows = folder / "rows.jsonl"
        write_rows(rows, 100 if options.quick else 400)
        words = ("--state", str(folder / "state"), "--batch", "64", "--context", "512", "--queue", "64")
        with Running("demo", home(), folder / "log", words, threads=threads) as server:
            ours, peer = alternate(
                lambda: by_batch(server, rows), lambda: by_run(rows, folder), 1 if options.quick else 3
            )
            report.add("rows of a batch", ours, peer, "rows/s", higher_is_better=True)
            the_crowd(server, report, 10 if options.quick else 60)
    report.save(options.json)
    reached = report.figures["rows of a batch"]["ratio"]
    print(f"a batch is to reach {AT_LEAST} of a run: {'reached' if float(reached) >= AT_LEAST else 'missed'}")


if __name__ == "__main__":
    main()
