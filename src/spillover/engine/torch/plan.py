"""Where a model's weights are while it computes, what that takes, and whether the machine has it."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING

import torch

from spillover.engine.protocol import Numerics, Placement, Plan, Work
from spillover.engine.ring import Drive, LayerIndex, known_drive, measure_drive
from spillover.engine.torch import fit, steps
from spillover.engine.torch.bound import speed_of
from spillover.engine.torch.device import SHARE, default_numerics, memory_limit, pick_device
from spillover.engine.torch.fit import Fit, Sizes, Streaming
from spillover.engine.torch.native import decoder as native
from spillover.engine.torch.native.library import library
from spillover.errors import EngineError, ModelError

if TYPE_CHECKING:
    from spillover.models import Model, ModelConfig

DTYPES: dict[str, torch.dtype] = {"float32": torch.float32, "bf16": torch.bfloat16}
# `Plan.kernels`: spillover.engine.torch.native, torch's own in recorded steps, and torch's own one by one
COMPILED, GRAPHS, TORCH = "compiled", "graphs", "torch"
WITHOUT_GRAPHS = "without CUDA graphs"
_WORTH_MEASURING = 1 << 30  # bytes of a model from which on its drive is measured before it is streamed
_MEASURING = 4.0  # seconds of one sustained read


def make_plan(model: Model, work: Work, version: str) -> Plan:
    """Decide device, numerics, placement, batch and tokens per pass; `EngineError` when nothing fits."""
    device = pick_device(work.device)
    numerics, reason = _numerics(work, device)
    if work.sequence > model.config.max_positions:
        raise EngineError(
            f"{model.ref.spec} reads at most {model.config.max_positions} tokens, not {work.sequence}",
            hint=f"ask for {model.config.max_positions} or fewer",
        )
    kernels, without = _kernels(model.config, device, work)
    sizes = Sizes(model.config, DTYPES[numerics].itemsize, device.type == "cpu" and library() is not None)
    limit = memory_limit(device) if work.memory is None else work.memory
    fitted, drive = fit.resident(sizes, work, limit), None
    placement: Placement = work.placement or ("resident" if fitted.total <= limit else "streamed")
    if placement == "streamed":
        kernels, without = (kernels, without) if kernels != GRAPHS else (TORCH, "")
        fitted, drive = _streamed(model, sizes, work, limit, device, kernels)
    if fitted.total > limit:
        raise _too_large(model, work, fitted, limit)
    speed = speed_of(model.config, work.kind, numerics, kernels) if device.type == "cpu" else None
    if speed is not None and drive is not None:
        speed = speed.streaming(fitted.read_bytes, drive.rate)
    without += ", layers computed again in the backward to save memory" if fitted.recompute else ""
    why = (
        f"{placement} on {device} in {numerics} ({reason}){without}; {_fits(fitted, limit, work.kind, drive)}"
    )
    return Plan(
        engine="torch",
        device=str(device),
        numerics=numerics,
        placement=placement,
        batch=fitted.batch,
        sequence=work.sequence,
        pass_tokens=fitted.pass_tokens,
        weights_bytes=sizes.weights(),
        memory_bytes=fitted.total,
        parts=tuple(fitted.parts),
        why=why,
        cache_tokens=fitted.cache_tokens,
        kernels=kernels,
        two_layouts=fitted.two_layouts,
        recompute=fitted.recompute,
        saved_bytes=fitted.saved_bytes,
        read_bytes=fitted.read_bytes,
        layout=fitted.layout,
        drive=drive,
        speed=speed,
    )


def _streamed(
    model: Model, sizes: Sizes, work: Work, limit: int, device: torch.device, kernels: str
) -> tuple[Fit, Drive]:
    """How the layers are streamed, and from what; the drive is measured if that was not done before."""
    index = model.index()
    drive = known_drive(index.files[0])
    if not drive.rate and index.bytes >= _WORTH_MEASURING:
        with contextlib.suppress(EngineError, ModelError):  # the usual numbers do too
            report = work.report and partial(work.report, "measuring the drive")
            drive = measure_drive(index.files, report, seconds=_MEASURING)
    layers = LayerIndex(index, model.config)
    if device.type == "cpu":
        places = 0 if kernels == COMPILED else 1
        streaming = Streaming(layers, drive, places, rule=model.config.experts)
    else:
        streaming = Streaming(layers, drive, 2, host=memory_limit(torch.device("cpu")))
    return fit.streamed(sizes, work, limit, streaming), drive


def _too_large(model: Model, work: Work, fitted: Fit, limit: int) -> EngineError:
    even = " even with its layers streamed from the drive" if fitted.layout is not None else ""
    most = f"{SHARE:.0%} of what this machine or its memory cgroup has"
    allowed = most if work.memory is None else "as asked"
    return EngineError(
        f"{model.ref.spec} needs {_gb(fitted.total)} ({_listed(fitted)}){even}, "
        f"but {_gb(limit)} may be used ({allowed})",
        hint="leave out --placement resident"
        if fitted.layout is None
        else "allow more memory, or choose a shorter sequence or a smaller model",
    )


def _fits(fitted: Fit, limit: int, kind: str, drive: Drive | None) -> str:
    """The memory by part, and what a pass takes from the drive."""
    memory = f"{_gb(fitted.total)} of {_gb(limit)}: {_listed(fitted)}"
    if drive is None:
        return memory
    rate = f", {fitted.read_bytes / drive.rate:.1f} s at {_gb(drive.rate)}/s" if drive.rate else ""
    there_and_back = " there and back" if kind == "train" else ""
    return f"{memory}; a pass reads {_gb(fitted.read_bytes)} of weights{there_and_back}{rate}"


def _kernels(config: ModelConfig, device: torch.device, work: Work) -> tuple[str, str]:
    """What computes, and what to say where the compiled kernels cannot."""
    if work.kind == "train":
        return TORCH, ""
    if device.type == "cpu":
        why = native.unsupported(config)
        return (TORCH, f", without compiled kernels: {why}") if why else (COMPILED, "")
    why = steps.unsupported(config, device)
    return (TORCH, f", {WITHOUT_GRAPHS}: {why}") if why else (GRAPHS, "")


def _numerics(work: Work, device: torch.device) -> tuple[Numerics, str]:
    if work.numerics is not None:
        return work.numerics, "as asked"
    chosen, reason = default_numerics(device)
    return ("bf16" if chosen == "bf16" else "float32"), reason


def _listed(fitted: Fit) -> str:
    return ", ".join(f"{name} {_gb(size)}" for name, size in fitted.parts if size)


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 5e7 else f"{size / 1e6:.0f} MB"
