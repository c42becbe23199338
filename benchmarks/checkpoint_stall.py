"""What a checkpoint costs a tune: how long the loop stands still, and how long until it is durable.

The demo model with rank 16 on all seven linear layers: 59 MB of parameters and moments. Three measures,
each on a local folder and on S3 (moto's server, in a process of its own on this machine), medians of
alternating rounds:

``stall``          the loop's thread at a standstill. Ours takes a snapshot and hands it to `Saver`; the
                   peer writes the same tensors in the loop's thread: ``torch.save``, then fsync or an
                   upload.
``step and save``  one optimizer step and one save: ours beside the save that runs behind it, the peer's
                   after its save.
``durable``        from the snapshot until the save is published: written, hashed, read back and pointed
                   at. Beside it stands the bare transport of the same bytes, which promises none of that:
                   write and fsync, or an upload. A ratio below 1 is the price of the promise.

    python benchmarks/checkpoint_stall.py [--quick] [--json FILE]
"""

from __future__ import annotations

import contextlib
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import boto3
import msgspec
import torch
from report import Report, arguments
from tune_side import BATCH, LENGTH, micro_batch

from spillover.engine import MicroBatch, Optimizer, TrainState, Work, engine
from spillover.jobs.checkpoint import KIND, TuneRecord, write_checkpoint
from spillover.jobs.saving import Saver
from spillover.models import LoraConfig, initial, resolve
from spillover.state import State
from spillover.store import open_store

BUCKET = "checkpoints"
KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1"}
Upload = Callable[[Path], None]


class Loop:
    """A training loop on the demo model: ``step`` makes an optimizer step on ``sequences`` sequences."""

    def __init__(self, sequences: int) -> None:
        model, config, computing = resolve("demo"), LoraConfig(), engine("torch")
        plan = computing.plan(model, Work("train", BATCH, LENGTH, config, device="cpu"))
        start = initial(config, model.config, 0)
        self.trainer = computing.load(model, plan).trainer(config, start, Optimizer())
        self.record = TuneRecord(0, {}, {}, {}, {})
        self.record.begin_range(plan, computing.version)
        whole = micro_batch(model.config.vocab_size)
        self._batch = MicroBatch(*(part[:sequences] for part in (whole.tokens, whole.mask, whole.lengths)))
        self.step()

    def step(self) -> None:
        result = self.trainer.step([self._batch], lr=1e-4)
        self.record.advance(result.loss, self.record.step + 1)


def ours(loop: Loop, saver: Saver, owned) -> dict[str, float]:
    """A save as `spillover.jobs.tune_loop` makes it, with a step beside it."""
    start = time.perf_counter()
    _save(loop, saver, owned)
    stall = time.perf_counter() - start
    loop.step()
    both = time.perf_counter() - start
    saver.finish()
    return {"stall": stall, "step and save": both}


def alone(loop: Loop, saver: Saver, owned) -> float:
    """Seconds until a save is durable when nothing else runs."""
    start = time.perf_counter()
    _save(loop, saver, owned)
    saver.finish()
    return time.perf_counter() - start


def _save(loop: Loop, saver: Saver, owned) -> None:
    state, record = loop.trainer.state(), msgspec.json.encode(loop.record)
    saver.save(lambda: (write_checkpoint(owned, state, record), {"step": state.step}))


def peer(loop: Loop, path: Path, upload: Upload | None) -> dict[str, float]:
    """The save of a plain training script, and a step after it. What it writes is not copied before."""
    state = tensors(loop.trainer.state())
    start = time.perf_counter()
    with path.open("wb") as file:
        torch.save(state, file)
        file.flush()
        if upload is None:
            os.fsync(file.fileno())
    if upload is not None:
        upload(path)
    stall = time.perf_counter() - start
    loop.step()
    return {"stall": stall, "step and save": time.perf_counter() - start}


def bare(loop: Loop, path: Path, upload: Upload | None) -> float:
    """Seconds to move the bytes of a checkpoint, and nothing else."""
    data = b"".join(
        tensor.numpy().tobytes() for part in tensors(loop.trainer.state()) for tensor in part.values()
    )
    path.write_bytes(data)
    start = time.perf_counter()
    if upload is not None:
        upload(path)
    else:
        with path.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    return time.perf_counter() - start


def tensors(state: TrainState) -> list[dict[str, torch.Tensor]]:
    parts = (state.params, state.m, state.v)
    return [{name: torch.from_numpy(array) for name, array in part.items()} for part in parts]


@contextlib.contextmanager
def s3_server() -> Iterator[Upload]:
    """Point the environment at an S3 server of our own; yields how a script uploads a file to it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    endpoint = f"http://127.0.0.1:{port}"
    command = [
        sys.executable,
        "-c",
        "from moto.server import main; main()",
        "-H",
        "127.0.0.1",
        "-p",
        str(port),
    ]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait(endpoint, server)
        os.environ.update(KEYS, AWS_ENDPOINT_URL=endpoint)
        client = boto3.client("s3", region_name=KEYS["AWS_REGION"])
        client.create_bucket(Bucket=BUCKET)
        yield lambda path: client.upload_file(str(path), BUCKET, "peer.pt")
    finally:
        server.kill()
        server.wait()


def _wait(endpoint: str, server: subprocess.Popen) -> None:
    deadline = time.monotonic() + 30
    while server.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError), urllib.request.urlopen(endpoint, timeout=1):
            return
        time.sleep(0.1)
    raise SystemExit("the S3 server did not start; is moto[server] installed?")


def measure(
    report: Report, where: str, uri: str, loop: Loop, scratch: Path, rounds: int, upload=None
) -> None:
    """All three measures at one place."""
    pairs: dict[str, list[tuple[float, float]]] = {}
    with (
        State(open_store(uri)).acquire({"work": "checkpoint stall"}) as owned,
        Saver(owned, KIND, None, lambda reference: None) as saver,
    ):
        for number in range(rounds + 1):
            mine, theirs = ours(loop, saver, owned), peer(loop, scratch, upload)
            whole = alone(loop, saver, owned), bare(loop, scratch, upload)
            if number:  # the first round warms caches up
                for name in mine:
                    pairs.setdefault(name, []).append((mine[name], theirs[name]))
                pairs.setdefault("durable", []).append(whole)
    for name, found in pairs.items():
        medians = (statistics.median(side) for side in zip(*found, strict=True))
        report.add(f"{name}, {where}", *medians, "s", higher_is_better=False)


def main() -> None:
    args, report = arguments(__doc__), Report()
    rounds, loop = (1, Loop(1)) if args.quick else (9, Loop(BATCH))
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name, "peer.pt")
        measure(report, "local disk", str(Path(name, "state")), loop, scratch, rounds)
        with s3_server() as upload:
            measure(report, "S3", f"s3://{BUCKET}/state", loop, scratch, rounds, upload)
    report.save(args.json)


if __name__ == "__main__":
    main()
