"""One side of `larger_than_memory.py`, in a process of its own: ours, accelerate's disk offload or AirLLM.

    larger_side.py ours|accelerate|airllm  MODEL

It answers one JSON request a line. Every side continues the same prompts greedily, and goes on after an end
of turn, so that all make the same number of tokens. A token of all rows is one pass over the weights.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import logging
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

THREADS = len(os.sched_getaffinity(0))


class Clock:
    """The time and the bytes read from drives so far, after each token."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._marks: list[tuple[float, int]] = []

    def mark(self) -> None:
        self._marks.append((time.perf_counter(), read_bytes()))

    def figures(self) -> dict[str, float]:
        """Seconds until the first token, and the seconds and bytes of a later pass, 0 when there was none."""
        (begin, before), (end, after) = self._marks[0], self._marks[-1]
        passes = max(1, len(self._marks) - 1)
        return {
            "first": begin - self._start,
            "seconds": (end - begin) / passes,
            "read": (after - before) / passes,
        }


class Ours:
    """`spillover.engine`, as a job uses it."""

    def __init__(self, path: str) -> None:
        from spillover.models import resolve

        self._model = resolve(path)

    def load(self, limit: int, **_: Any) -> str:
        self._limit = limit
        return ""

    def open(self, prompts: list[list[int]], tokens: int) -> str:
        from spillover.engine import Work, engine

        longest = max(map(len, prompts)) + tokens
        work = Work("generate", len(prompts), longest, memory=self._limit, placement="streamed")
        computing = engine("torch")
        self._loaded = None  # before another is read
        gc.collect()  # what streams points at itself
        plan = computing.plan(self._model, work)
        if plan.batch < len(prompts):
            raise ValueError(f"only {plan.batch} of {len(prompts)} rows fit")
        self._loaded = computing.load(self._model, plan)
        self._prompts = prompts
        return plan.why

    def generate(self, tokens: int, clock: Clock) -> list[list[int]]:
        from spillover.engine import Request, Sampling
        from spillover.engine.generate import Scheduler

        requests = [
            Request(str(number), tuple(prompt), tokens, Sampling(), frozenset(), logprobs=-1)
            for number, prompt in enumerate(self._prompts)
        ]
        scheduler = Scheduler(Clocked(self._loaded, clock))
        answers = {done.id: done.tokens for done in scheduler.run(requests)}
        return [answers[request.id] for request in requests]

    def streamed(self) -> int:
        """Bytes of weights that a pass reads: those of the layers that the plan does not keep."""
        layout = self._loaded.plan.layout
        return layout.pass_bytes if layout is not None else 0


class Clocked:
    """A model whose sessions mark each pass; for the rest as it is."""

    def __init__(self, of: Any, clock: Clock, *marked: str) -> None:
        self._of, self._clock, self._marked = of, clock, marked

    def session(self) -> Clocked:
        return Clocked(self._of.session(), self._clock, "admit", "decode")

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._of, name)
        return self._marking(found) if name in self._marked else found

    def _marking(self, call: Any) -> Any:
        def marked(*arguments: Any) -> Any:
            made = call(*arguments)
            self._clock.mark()
            return made

        return marked


class Streamer:
    """Marks each token: transformers hands it the prompts first."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._prompts = clock, True

    def put(self, _: object) -> None:
        if not self._prompts:
            self._clock.mark()
        self._prompts = False

    def end(self) -> None:
        pass


class Transformers:
    """`generate` of a model whose weights are not all in memory; subclasses load it."""

    def __init__(self, path: str) -> None:
        self._path = path

    def open(self, prompts: list[list[int]], tokens: int) -> str:
        import torch

        assert len(set(map(len, prompts))) == 1, "no padding"
        self._ids = torch.tensor(prompts)
        return ""

    def generate(self, tokens: int, clock: Clock) -> list[list[int]]:
        import torch

        out = self._model.generate(
            self._ids,
            attention_mask=torch.ones_like(self._ids),
            do_sample=False,
            max_new_tokens=tokens,
            pad_token_id=0,
            streamer=Streamer(clock),
        )
        return out[:, self._ids.shape[1] :].tolist()

    def streamed(self) -> int:
        """Bytes of weights that a pass reads: those that have no place in memory."""
        return sum(one.nbytes for one in self._weights() if one.device.type == "meta")

    def _weights(self) -> list[Any]:
        return list(self._model.parameters())


class Accelerate(Transformers):
    """What does not fit into `weights` bytes stays in the model's own files, which accelerate maps."""

    def load(self, weights: int, folder: str, **_: Any) -> str:
        import torch
        import transformers

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            self._path,
            dtype=torch.bfloat16,
            device_map="auto",
            max_memory={"cpu": weights},
            offload_folder=folder,
        ).eval()
        self._model.generation_config.eos_token_id = None
        whole, streamed = sum(one.nbytes for one in self._weights()), self.streamed()
        return f"{(whole - streamed) / 1e9:.2f} GB of weights in memory, {streamed / 1e9:.2f} GB on disk"


class AirLLM(Transformers):
    """Every layer from a file of its own in `folder`, which is written when it is not there."""

    def load(self, folder: str, **_: Any) -> str:
        said = io.StringIO()  # every file that it writes
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            import airllm

            self._model = airllm.AutoModel.from_pretrained(
                self._path, device="cpu", layer_shards_saving_path=folder
            )
        self._model.generation_config.eos_token_id = None
        return f"{self.streamed() / 1e9:.2f} GB of weights on disk, all of them"

    def _weights(self) -> list[Any]:
        return list(self._model.model.parameters())


SIDES = {"ours": Ours, "accelerate": Accelerate, "airllm": AirLLM}


class Calls:
    """What the benchmark may ask."""

    def __init__(self, side: str, path: str) -> None:
        self._make = lambda: SIDES[side](path)

    def load(self, **settings: Any) -> str:
        """Make the side with what it needs to know; a line about it."""
        self._side = self._make()
        return self._side.load(**settings)

    def open(self, prompts: list[list[int]], tokens: int) -> str:
        """Take prompts, and how many tokens they may get; a line about it."""
        return self._side.open(prompts, tokens)

    def generate(self, tokens: int) -> dict[str, float]:
        """The `Clock.figures` of one run over all prompts."""
        clock = Clock()
        self._answers = self._side.generate(tokens, clock)
        return clock.figures()

    def answers(self) -> list[list[int]]:
        """What the last run generated."""
        return self._answers

    def streamed(self) -> int:
        """Bytes of weights that a pass has to read."""
        return self._side.streamed()

    def peak(self) -> int:
        """Most bytes that this process ever had in memory, mapped files included."""
        (size,) = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
        return int(size) * 1024


def read_bytes() -> int:
    """Bytes that drives gave to this process so far; 0 where the kernel does not count them."""
    try:
        found = re.findall(r"^read_bytes: (\d+)", Path("/proc/self/io").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[0])


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints is not an answer
    logging.disable(logging.WARNING)  # accelerate says each time that weights are on disk
    calls = Calls(*sys.argv[1:])
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"value": getattr(calls, request.pop("call"))(**request)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
