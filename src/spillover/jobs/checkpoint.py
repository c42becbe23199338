"""A tune checkpoint: LoRA parameters, AdamW moments, and everything else needed to go on anywhere.

    params.safetensors   float32, layers.<k>.<module>.lora_a [in, r] and .lora_b [r, out]
    opt.safetensors      float32, m::<name> and v::<name>, shaped as the parameter
    state.json           `TuneRecord`

Nothing in it depends on the engine, the machine or the library that wrote it. There is no random state:
the order of examples, initial values and dropout are functions of the seed and of where the work is.
"""

from __future__ import annotations

import platform
import socket
from typing import TYPE_CHECKING, Any

import msgspec

from spillover.engine.protocol import Plan, TrainState
from spillover.errors import Corrupt
from spillover.jobs.tensors import read_tensors, tensor_file
from spillover.state import Owned, Payload, Reference

if TYPE_CHECKING:
    from spillover.engine.protocol import Floats

__all__ = ["KIND", "Range", "TuneRecord", "read_checkpoint", "write_checkpoint"]

KIND = "ckpt"
SCHEMA = 1
PARAMS, OPT, STATE = "params.safetensors", "opt.safetensors", "state.json"


class Range(msgspec.Struct, frozen=True):
    """Steps ``start`` (exclusive) to ``stop`` (inclusive) and what computed them."""

    start: int
    stop: int
    engine: str
    version: str
    device: str
    numerics: str
    system: str
    host: str

    def same_place(self, other: Range) -> bool:
        return msgspec.structs.astuple(self)[2:] == msgspec.structs.astuple(other)[2:]


class Cursor(msgspec.Struct, frozen=True):
    """Micro-batches done, counted over all epochs."""

    micro_batch: int = 0


class TuneRecord(msgspec.Struct):
    """``state.json``: identity, position and past of a tune.

    Args:
        step: optimizer steps done.
        cursor: with the seed, all there is to know about the data.
        losses: the loss of every step so far.
        validation: pairs of step and loss on the validation file.
        history: what computed which steps.
    """

    seed: int
    model: dict[str, Any]
    data: dict[str, Any]
    adapter: dict[str, Any]
    hyperparameters: dict[str, Any]
    step: int = 0
    cursor: Cursor = Cursor()
    losses: list[float] = []
    validation: list[tuple[int, float]] = []
    history: list[Range] = []
    schema: int = SCHEMA
    kind: str = "tune"

    def begin_range(self, plan: Plan, version: str) -> None:
        """Note what computes the steps from here on."""
        system = f"{platform.system()} {platform.machine()}"
        here = Range(
            self.step,
            self.step,
            plan.engine,
            version,
            plan.device,
            plan.numerics,
            system,
            socket.gethostname(),
        )
        if not self.history or not self.history[-1].same_place(here):
            self.history.append(here)

    def advance(self, loss: float, micro_batches: int) -> None:
        """Note a finished step."""
        self.step += 1
        self.losses.append(loss)
        self.cursor = Cursor(micro_batches)
        self.history[-1] = msgspec.structs.replace(self.history[-1], stop=self.step)


def write_checkpoint(owned: Owned, state: TrainState, record: bytes) -> Reference:
    """Write a checkpoint payload; ``record`` is an encoded `TuneRecord` of the same step as ``state``."""
    writer = owned.payload(KIND, f"step-{state.step:09d}")
    writer.add(PARAMS, tensor_file(state.params))
    writer.add(OPT, tensor_file(_prefixed("m::", state.m) | _prefixed("v::", state.v)))
    writer.add(STATE, record)
    return writer.commit(step=state.step, cursor=msgspec.json.decode(record)["cursor"])


def read_checkpoint(payload: Payload) -> tuple[TuneRecord, TrainState]:
    """The record and tensors of a checkpoint, every byte verified.

    Raises:
        Corrupt: a file is damaged, or the record and the manifest disagree.
    """
    where = f"{payload.reference.folder}/{STATE}"
    try:
        record = msgspec.json.decode(payload.read(STATE), type=TuneRecord)
    except msgspec.DecodeError as error:
        raise Corrupt(f"{where} is of a version that this spillover does not read: {error}") from error
    if record.schema > SCHEMA:
        raise Corrupt(f"{where} was written by a newer spillover", hint="upgrade spillover")
    if record.step != payload.manifest.step or len(record.losses) != record.step:
        raise Corrupt(f"{where} disagrees with its manifest")
    moments = read_tensors(payload, OPT)
    return record, TrainState(
        params=read_tensors(payload, PARAMS),
        m=_without_prefix("m::", moments),
        v=_without_prefix("v::", moments),
        step=record.step,
    )


def _prefixed(prefix: str, arrays: dict[str, Floats]) -> dict[str, Floats]:
    return {prefix + name: array for name, array in arrays.items()}


def _without_prefix(prefix: str, arrays: dict[str, Floats]) -> dict[str, Floats]:
    return {name.removeprefix(prefix): a for name, a in arrays.items() if name.startswith(prefix)}
