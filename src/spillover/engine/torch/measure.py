"""``spill doctor --measure``: what plans and estimates need to know of this machine, in half a minute.

Passes and training steps of two random models run as any other model's would. The shortest of a few runs
counts: other processes can only make one longer.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F

from spillover import __version__
from spillover.engine import calibrate
from spillover.engine.calibrate import COMPARED, FEW, LONG, MANY, PREFILL, ROWS, SEQUENCE, SHORT
from spillover.engine.estimate import Costs
from spillover.engine.protocol import LoadedModel, MicroBatch, Numerics, Optimizer, Work
from spillover.engine.ring import Drive, measure_drive
from spillover.engine.ring.sample import CannotMeasure, sample
from spillover.engine.speeds import Machine, Rates, keep, machine_key, processor
from spillover.engine.torch.bound import code_of, shape_of
from spillover.engine.torch.device import best, default_numerics, measure_memory
from spillover.engine.torch.engine import TorchEngine
from spillover.engine.torch.plan import DTYPES
from spillover.engine.torch.synthetic import LARGE, SMALL, synthetic
from spillover.errors import EngineError, ModelError
from spillover.models.lora import LoraConfig, initial

if TYPE_CHECKING:
    from spillover.models import Model

_NUMERICS: tuple[Numerics, ...] = ("float32", "bf16")
_MEMORY_BYTES = 1 << 30
_DRIVE_SECONDS = 3.0
_PRODUCT = 2048  # rows and columns
_RUNS = 4

Turn = Callable[[int, int, str], None]
"""Told of parts done, parts in all, and what is measured now."""


def measure(turn: Turn) -> tuple[Machine, bool]:
    """Measure everything there is to know; and whether it could be kept in ``SPILL_HOME``."""
    began, parts = time.monotonic(), _parts(turn)
    next(parts)
    default_numerics(torch.device("cpu"))  # what is kept from the first run on stays as it is
    memory = [measure_memory(_MEMORY_BYTES)]
    next(parts)
    drive, without_drive = _drive()
    with tempfile.TemporaryDirectory(prefix="spillover-measure-") as folder:
        large, small = (synthetic(Path(folder, str(one["hidden_size"])), one) for one in (LARGE, SMALL))
        rates: dict[str, Rates] = {name: _rates(large, small, name, parts) for name in _NUMERICS}
    memory.append(measure_memory(_MEMORY_BYTES))  # a neighbour may slow memory down for a while
    machine = Machine(
        processor=processor(),
        threads=torch.get_num_threads(),
        torch=str(torch.__version__),
        version=__version__,
        time=time.time(),
        seconds=round(time.monotonic() - began, 1),
        memory=max(memory, key=lambda one: one.gbs),
        drive=drive,
        without_drive=without_drive,
        rates=rates,
    )
    return machine, keep(machine_key(machine.threads, machine.torch), machine)


def _parts(turn: Turn) -> Iterator[None]:
    """Tells what comes next, at each `next`."""
    names = [
        "memory",
        "drive",
        *(f"{what} in {name}" for name in _NUMERICS for what in ("answers", "training")),
    ]
    for number, name in enumerate(names):
        turn(number, len(names), name)
        yield


def _drive() -> tuple[Drive | None, str]:
    try:
        with sample() as (file, source):
            return measure_drive([file], seconds=_DRIVE_SECONDS, source=source), ""
    except (CannotMeasure, ModelError, EngineError) as error:
        return None, str(error)


def _rates(large: Model, small: Model, numerics: Numerics, parts: Iterator[None]) -> Rates:
    next(parts)
    generation = _generation(large, small, numerics)
    next(parts)
    training = _training(large, small, numerics)
    return Rates(
        gflops=round(_product(DTYPES[numerics]), 1),
        passes_gflops=round(2 * PREFILL / generation.product(PREFILL) / 1e9, 1),
        alone_gbs=round(DTYPES[numerics].itemsize / generation.product(1) / 1e9, 1),
        code=code_of(_planned(large, "generate", numerics).plan.kernels),
        generation=generation,
        training=training,
    )


@torch.inference_mode()
def _product(dtype: torch.dtype) -> float:
    """GFLOP/s of a large product."""
    big = torch.ones(_PRODUCT, _PRODUCT, dtype=dtype)
    return 2 * _PRODUCT**3 / best(lambda: F.linear(big, big), 5) / 1e9


def _planned(model: Model, kind: str, numerics: Numerics) -> LoadedModel:
    lora = LoraConfig() if kind == "train" else None
    work = Work("train" if lora else "generate", ROWS[-1], 2 * LONG, lora, numerics, "cpu")
    engine = TorchEngine()
    return engine.load(model, engine.plan(model, work))


def _generation(large: Model, small: Model, numerics: Numerics) -> Costs:
    begin = time.perf_counter()
    loaded, little = _planned(large, "generate", numerics), _planned(small, "generate", numerics)
    loaded.session()
    passes = calibrate.Passes(
        start=time.perf_counter() - begin,
        steps={rows: _decode(loaded, rows, SHORT) for rows in ROWS},
        long=_decode(loaded, COMPARED, LONG),
        prefill=_prefill(loaded, PREFILL // SEQUENCE, SEQUENCE),
        whole=_prefill(loaded, 1, PREFILL),
        one=_decode(little, ROWS[0], SHORT),
        most=_decode(little, ROWS[-1], SHORT),
    )
    return passes.costs(shape_of(large.config, numerics), shape_of(small.config, numerics))


def _decode(loaded: LoadedModel, rows: int, length: int) -> float:
    """Seconds of a decode step of `rows` rows after `length` tokens each."""
    session = loaded.session()
    session.admit(_tokens(rows, length))
    return best(lambda: session.decode([1] * rows).argmax(), 2 * _RUNS)


def _prefill(loaded: LoadedModel, rows: int, length: int) -> float:
    """Seconds of a prefill, into sessions that remember nothing."""
    return best(lambda: loaded.session().admit(_tokens(rows, length)), _RUNS)


def _tokens(rows: int, length: int) -> list[list[int]]:
    drawn: list[list[int]] = np.random.default_rng(0).integers(1, 500, (rows, length)).tolist()
    return drawn


def _training(large: Model, small: Model, numerics: Numerics) -> Costs:
    begin = time.perf_counter()
    step, little = _trainer(large, numerics), _trainer(small, numerics)
    steps = calibrate.Steps(
        start=time.perf_counter() - begin,
        few=step(FEW, SEQUENCE, 1),
        many=step(MANY, SEQUENCE, 1),
        whole=step(1, MANY * SEQUENCE, 1),
        learning=step(MANY, SEQUENCE, SEQUENCE - 1),
        small_few=little(FEW, SEQUENCE, 1),
        small_many=little(MANY, SEQUENCE, 1),
    )
    return steps.costs(shape_of(large.config, numerics), shape_of(small.config, numerics))


def _trainer(model: Model, numerics: Numerics) -> Callable[[int, int, int], float]:
    """What takes sequences, tokens of each and targets at its end, and returns the seconds of a step."""
    config = LoraConfig()
    start = initial(config, model.config, 0)
    trainer = _planned(model, "train", numerics).trainer(config, start, Optimizer())

    def step(sequences: int, length: int, targets: int) -> float:
        tokens = np.random.default_rng(0).integers(1, 500, (sequences, length))
        mask = np.zeros((sequences, length), np.bool_)
        mask[:, length - targets :] = True
        batch = MicroBatch(tokens, mask, np.full(sequences, length))
        return best(lambda: trainer.step([batch], lr=1e-4), _RUNS)

    return step
