"""What this machine computes with, how fast, and how much memory it may take.

Speeds are measured once per machine and torch build (about a second) and kept in ``SPILL_HOME``, so that
plans and kernel choices stay the same from run to run. `spillover.engine.torch.measure` measures more.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F

from spillover.engine.estimate import Limits
from spillover.engine.speeds import Memory, Speeds, keep, processor, recall
from spillover.engine.torch.linear import Dense, Packed
from spillover.errors import EngineError

SHARE = 0.75  # of the machine's memory: the rest is for the page cache and the job itself
_FAST = 1.3  # how much faster bf16 must multiply than float32 to be the default
_QUICK_BYTES = 256 << 20
_CGROUPS, _OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def pick_device(wanted: str | None) -> torch.device:
    """The device called `wanted`, or the best there is."""
    if wanted is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind = wanted.partition(":")[0]
    if kind not in ("cpu", "cuda"):
        raise EngineError(
            f"the torch engine has no device {wanted}", hint="use --device cpu or --device cuda"
        )
    if kind == "cuda" and not torch.cuda.is_available():
        raise EngineError("no CUDA device can be used by this build of torch", hint="use --device cpu")
    return torch.device(wanted)


def memory_limit(device: torch.device) -> int:
    """Bytes that a plan may take on `device`: 75 % of its memory, or of a lower cgroup limit."""
    if device.type == "cuda":
        return int(SHARE * torch.cuda.get_device_properties(device).total_memory)
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(SHARE * min([machine, *_cgroup_limits()]))


def _cgroup_limits() -> Iterator[int]:
    """The limits of this process's memory cgroup and of those above it; cgroups(7), both versions."""
    with contextlib.suppress(OSError):
        for line in _OWN_GROUPS.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                root, name = _CGROUPS, "memory.max"
            elif "memory" in controllers.split(","):
                root, name = _CGROUPS / "memory", "memory.limit_in_bytes"
            else:
                continue
            # in a container the path may be that of outside: the root then is its own
            own = root / path.lstrip("/")
            for folder in (own, *own.parents):
                with contextlib.suppress(OSError, ValueError):
                    yield int((folder / name).read_text())


def measured(dtype: torch.dtype) -> Speeds:
    """The CPU's `Speeds` in `dtype`, from ``SPILL_HOME`` or measured now, with the memory's."""
    key = f"{processor()}, {torch.get_num_threads()} threads, torch {torch.__version__}, {dtype}"
    known = recall(key, Speeds)
    if known is None:
        known = _measure(dtype)
        keep(key, known)
    if recall(_memory_key(), Memory) is None:
        keep(_memory_key(), measure_memory(_QUICK_BYTES))
    return known


def limits(dtype: torch.dtype) -> Limits | None:
    """What the CPU does at most in `dtype`, as far as it has been measured; None when it has not."""
    key = f"{processor()}, {torch.get_num_threads()} threads, torch {torch.__version__}, {dtype}"
    products, memory = recall(key, Speeds), recall(_memory_key(), Memory)
    if products is None or memory is None:
        return None
    return Limits(memory.gbs * 1e9, products.gflops * 1e9)


def measure_memory(size: int) -> Memory:
    """All threads reading `size` bytes, which no cache may hold."""
    buffer = torch.ones(size // 8, dtype=torch.float64)
    return Memory(round(size / best(buffer.max, 5) / 1e9, 1))


def _memory_key() -> str:
    return f"{processor()}, {torch.get_num_threads()} threads, memory"


@torch.inference_mode()
def _measure(dtype: torch.dtype) -> Speeds:
    big = torch.ones(1024, 1024, dtype=dtype)
    gflops = 2 * 1024**3 / best(lambda: F.linear(big, big), 20) / 1e9
    # decoding reads every weight once a step: compare the layouts on more of them than caches near a core
    # hold
    weights = [torch.ones(2048, 1024, dtype=dtype) for _ in range(16)]
    x = torch.ones(16, 1024, dtype=dtype)
    plain = [Dense(weight) for weight in weights]
    packed = [Packed(weight) for weight in weights] if Packed.available() else []
    faster = best(lambda: [layer(x) for layer in packed], 10) < best(
        lambda: [layer(x) for layer in plain], 10
    )
    return Speeds(gflops=round(gflops, 1), packed=bool(packed) and faster)


def best(call: Callable[[], object], runs: int, patience: float = 0.6) -> float:
    """The shortest of `runs`, in seconds: other processes can only make one longer.

    There are at least two, and no more once `patience` seconds are over.
    """
    times: list[float] = []
    while len(times) < 2 or (len(times) < runs and sum(times) < patience):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def default_numerics(device: torch.device) -> tuple[str, str]:
    """``bf16`` or ``float32``, whichever suits the device, and why in a few words."""
    if device.type == "cuda":
        fast = torch.cuda.is_bf16_supported()
        return ("bf16", "the GPU multiplies bf16") if fast else ("float32", "the GPU does not multiply bf16")
    bf16, float32 = measured(torch.bfloat16).gflops, measured(torch.float32).gflops
    chosen = "bf16" if bf16 >= _FAST * float32 else "float32"
    return chosen, f"bf16 at {bf16:.0f} and float32 at {float32:.0f} GFLOP/s measured"
