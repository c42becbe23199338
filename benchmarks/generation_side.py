"""One side of `generation.py`, in a process of its own: ours, transformers or llama.cpp.

    generation_side.py ours|transformers|llama  NUMERICS  MODEL

It answers one JSON request a line. Every side answers the same prompts greedily, and goes on after an end of
turn, so that all make the same number of tokens.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

THREADS = len(os.sched_getaffinity(0))


class Ours:
    """`spillover.engine`, as a job uses it."""

    def __init__(self, numerics: str, path: str) -> None:
        from spillover.models import resolve

        self._model = resolve(path)
        self._numerics = numerics or None

    def open(self, prompts: list[list[int]], tokens: int) -> None:
        from spillover.engine import Work, engine

        work = Work(
            *("generate", len(prompts), max(map(len, prompts)) + tokens),
            numerics=self._numerics,
            device="cpu",
        )
        computing = engine("torch")
        self._loaded = self._session = None  # before another is read
        self._loaded = computing.load(self._model, computing.plan(self._model, work))
        self._prompts, self._tokens = prompts, tokens

    def generate(self, logprobs: int = -1, temperature: float = 0.0, top_p: float = 1.0) -> list[list[int]]:
        from spillover.engine import Request, Sampling, Scheduler

        how = Sampling(temperature, top_p)
        requests = [
            Request(str(number), tuple(prompt), self._tokens, how, frozenset(), logprobs=logprobs)
            for number, prompt in enumerate(self._prompts)
        ]
        scheduler = Scheduler(self)
        answers = {done.id: done.tokens for done in scheduler.run(requests)}
        return [answers[request.id] for request in requests]

    @property
    def plan(self):
        return self._loaded.plan

    def session(self):
        """What the scheduler asks its model for; kept, for what it knows."""
        self._session = self._loaded.session()
        return self._session

    def shared(self) -> int:
        """Prompt tokens that the last run found computed already, for another row."""
        return getattr(self._session, "shared", 0)

    def numerics(self) -> str:
        return self._loaded.plan.numerics


class Transformers:
    """`generate`, left-padded as its documentation says."""

    def __init__(self, numerics: str, path: str) -> None:
        import torch
        import transformers

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        dtype = {"bf16": torch.bfloat16, "float32": torch.float32}[numerics]
        self._model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
        self._model.generation_config.eos_token_id = None

    def open(self, prompts: list[list[int]], tokens: int) -> None:
        import torch

        self._longest, self._tokens = max(map(len, prompts)), tokens
        padding = [self._longest - len(prompt) for prompt in prompts]
        pairs = list(zip(padding, prompts, strict=True))
        self._ids = torch.tensor([[0] * pad + prompt for pad, prompt in pairs])
        self._mask = torch.tensor([[0] * pad + [1] * len(prompt) for pad, prompt in pairs])

    def generate(self) -> list[list[int]]:
        out = self._model.generate(
            self._ids,
            attention_mask=self._mask,
            do_sample=False,
            max_new_tokens=self._tokens,
            pad_token_id=0,
        )
        return out[:, self._longest :].tolist()


class Llama:
    """llama.cpp through the C functions of llama-cpp-python: its own loop would take longer. One sequence."""

    def __init__(self, numerics: str, path: str) -> None:
        import llama_cpp

        self._c = llama_cpp
        llama_cpp.llama_backend_init()
        # whatever it says while loading is for people who debug it
        self._quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._quiet, ctypes.c_void_p(0))
        model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx = 256
        settings.n_threads = settings.n_threads_batch = THREADS
        self._context = llama_cpp.llama_init_from_model(model, settings)
        if not self._context:
            raise ValueError(f"llama.cpp does not load {path}")
        chain = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
        llama_cpp.llama_sampler_chain_add(chain, llama_cpp.llama_sampler_init_greedy())
        self._sampler = chain

    def open(self, prompts: list[list[int]], tokens: int) -> None:
        (self._prompt,), self._tokens = prompts, tokens

    def generate(self) -> list[list[int]]:
        c = self._c
        c.llama_memory_clear(c.llama_get_memory(self._context), True)
        answer, fresh = [], self._prompt
        while len(answer) < self._tokens:
            ids = (c.llama_token * len(fresh))(*fresh)
            if c.llama_decode(self._context, c.llama_batch_get_one(ids, len(fresh))):
                raise ValueError("llama_decode failed")
            fresh = [c.llama_sampler_sample(self._sampler, self._context, -1)]
            answer += fresh
        return [answer]


SIDES = {"ours": Ours, "transformers": Transformers, "llama": Llama}


class Calls:
    """What the benchmark may ask."""

    def __init__(self, side: str, numerics: str, path: str) -> None:
        self._side = SIDES[side](numerics, path)

    def open(self, prompts: list[list[int]], tokens: int) -> None:
        """Take prompts; the runs that follow are over these."""
        self._side.open(prompts, tokens)

    def generate(self, **how: float) -> float:
        """Tokens per second of one run over all prompts, prefill included."""
        start = time.perf_counter()
        self._answers = self._side.generate(**how)
        return sum(map(len, self._answers)) / (time.perf_counter() - start)

    def answers(self) -> list[list[int]]:
        """What the last run generated."""
        return self._answers

    def fact(self, name: str):
        """What only this side can tell."""
        return getattr(self._side, name)()

    def peak(self) -> float:
        """Most megabytes that this process ever had in memory, mapped files included."""
        (size,) = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
        return int(size) * 1024 / 1e6

    def limits(self, numerics: str) -> list[float]:
        """GFLOP/s of a large product in this dtype, and GB/s of reading memory, on all cores."""
        import torch
        import torch.nn.functional as F

        dtype = {"bf16": torch.bfloat16, "float32": torch.float32}[numerics]
        with torch.inference_mode():
            square = torch.ones(2048, 2048, dtype=dtype)
            product = _shortest(lambda: F.linear(square, square), 8)
            large = torch.ones(128 << 20)  # 512 MiB: no cache holds it
            reading = _shortest(large.sum, 8)
        return [2 * 2048**3 / product / 1e9, large.nbytes / reading / 1e9]


def _shortest(call: Callable[[], object], runs: int) -> float:
    seconds = []
    for _ in range(runs):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints is not an answer
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
