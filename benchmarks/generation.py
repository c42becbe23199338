"""Generation on the demo model against `transformers.generate` and, one sequence at a time, llama.cpp.

64 prompt tokens and 64 new ones a row, greedy, on all cores on every side. Each side is a process of its own;
they take turns, and medians are compared.

chat      chat prompts of about 64 tokens: the system prompt of a job and a question. Ours computes what rows
          begin with in common once, in whole blocks of 32 tokens; how much that was is printed
random    64 random tokens: rows share nothing

transformers runs in bf16 and in float32, and the faster of the two counts. llama.cpp (PyPI
``llama-cpp-python``) runs on a GGUF of the same numbers in bf16 and one in f16, and the faster counts; its
first run compiles it into an environment of its own, for which it needs cmake and a C++ compiler.

The limits are measured in the same run: GFLOP/s of a large product, GB/s of reading memory. A share is the
time that our run would take if nothing but that limit counted, by the time that it took. Peak memory is
``VmHWM`` of a side's process after its largest batch so far, mapped files included.

    python benchmarks/generation.py [--quick] [--json FILE]
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from demo_gguf import demo_gguf
from peer import Process, environment
from report import Report, arguments

from spillover.models import Model, resolve
from spillover.models.index import layer_tensors

SIDE = Path(__file__).with_name("generation_side.py")
LLAMA = ("llama-cpp-python", "0.3.36", "diskcache==5.6.3")
PROMPT = 64
SYSTEM = (
    "You answer customers of a hardware store. "
    "Be friendly and brief, and name the next step that they should take."
)
CASES = (
    "Order {}: my card was charged twice. How do I get the second payment back?",
    "Order {} went to my old address. Who do I ask to have it sent again?",
    "Customer {}: I no longer have the phone that the code is sent to. What now?",
    "Order {}: one of the two lamps has a crack. Who pays for returning it?",
)


def chat(model: Model, count: int) -> list[list[int]]:
    tokenizer, prompts = model.tokenizer(), []
    for number in range(count):
        question = CASES[number % len(CASES)].format(4071 + 7 * number)
        turns = ({"role": "system", "content": SYSTEM}, {"role": "user", "content": question})
        prompts.append(tokenizer.prompt_ids(turns))
    return prompts


def random(model: Model, count: int) -> list[list[int]]:
    source = np.random.default_rng(count)
    return source.integers(100, model.config.vocab_size, (count, PROMPT)).tolist()


@dataclass(frozen=True)
class Side:
    """A process that generates, and the dtype it does so in."""

    process: Process
    numerics: str

    def rate(self, **how: float) -> float:
        """Tokens per second of one run."""
        return self.process.ask("generate", **how)


class Bench:
    """How much of it all to do, and the sides' processes."""

    def __init__(self, quick: bool, stack: contextlib.ExitStack) -> None:
        self.quick, self.tokens = quick, 16 if quick else 64
        self.model, self._stack = resolve("demo"), stack
        self.ours = self.side("ours", "")

    def side(
        self, name: str, numerics: str, path: object = None, python: str | Path = sys.executable
    ) -> Side:
        """A new process; ours chooses its dtype itself where `numerics` is empty."""
        cores = {"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))}
        process = Process(python, SIDE, name, numerics, str(path or "demo"), settings=cores)
        return Side(self._stack.enter_context(process), numerics)

    def rounds_of(self, count: int) -> int:
        """Fewer of runs that take longer."""
        return 1 if self.quick else 3 if count <= 16 else 2

    def open(self, prompts: list[list[int]], *sides: Side) -> list[float]:
        """Hand out `prompts`; the rate of one run of each side, which warms it up."""
        for side in sides:
            side.process.ask("open", prompts=prompts, tokens=self.tokens)
        return [side.rate() for side in sides]

    def medians(self, sides: list[Side], hows: list[dict[str, float]], rounds: int) -> list[float]:
        """Tokens per second of rounds in which every side takes its turn."""
        pairs = list(zip(sides, hows, strict=True))
        found = [[side.rate(**how) for side, how in pairs] for _ in range(rounds)]
        return [statistics.median(column) for column in zip(*found, strict=True)]

    def compare(
        self, prompts: list[list[int]], name: str, others: list[Side], rounds: int
    ) -> tuple[float, float, Side]:
        """Our rate, that of the fastest of `others`, and which that is; all are printed.

        Whoever was far behind in two runs takes no part in the others.
        """
        _, *first = self.open(prompts, self.ours, *others)
        second = [side.rate() for side in others]
        rates = {side.numerics: max(pair) for side, *pair in zip(others, first, second, strict=True)}
        near = [side for side in others if rates[side.numerics] > 0.75 * max(rates.values())]
        mine, *theirs = self.medians([self.ours, *near], [{}] * (1 + len(near)), rounds)
        rates |= {side.numerics: rate for side, rate in zip(near, theirs, strict=True)}
        listed = ", ".join(f"{numerics} {rate:.1f}" for numerics, rate in rates.items())
        print(f"  {name}, tokens/s: {listed}", flush=True)
        best = max(theirs)
        return mine, best, near[theirs.index(best)]


class Limits:
    """What a run would take if nothing but arithmetic counted, or nothing but reading memory."""

    def __init__(self, bench: Bench) -> None:
        measuring = bench.side("ours", "")
        bench.open(chat(bench.model, 1), measuring)
        self._numerics = measuring.process.ask("fact", name="numerics")
        self._flops, self._bytes = measuring.process.ask("limits", numerics=self._numerics)
        measuring.process.close()
        config = bench.model.config
        layers = (layer_tensors(config, number).values() for number in range(config.layers))
        self._layers = sum(math.prod(shape) for each in layers for shape in each if len(shape) == 2)
        self._head = config.vocab_size * config.hidden_size
        self._config = config
        print(f"  limits in {self._numerics}: {self._flops:.0f} GFLOP/s, {self._bytes:.1f} GB/s", flush=True)

    def shares(
        self, report: Report, measure: str, bench: Bench, prompts: list[list[int]], rate: float
    ) -> None:
        """Print and note our shares of both, counting only what had to be computed."""
        found = bench.ours.process.ask("fact", name="shared")
        made = len(prompts) * bench.tokens
        arithmetic = self._operations(prompts, bench.tokens, found) / self._flops / 1e9
        reading = self._read(prompts, bench.tokens) / self._bytes / 1e9
        shares = {"arithmetic share": arithmetic * rate / made, "bandwidth share": reading * rate / made}
        report.figures[measure] |= {name: round(share, 3) for name, share in shares.items()}
        listed = ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
        whole = sum(map(len, prompts))
        print(f"  {listed}; {found} of {whole} prompt tokens found computed", flush=True)

    def _operations(self, prompts: list[list[int]], tokens: int, found: int) -> float:
        """Two for every weight of a token's products, four for every position and width of its attention."""
        computed = sum(map(len, prompts)) - found + len(prompts) * (tokens - 1)
        wide = 4 * self._config.layers * self._config.heads * self._config.head_dim
        positions = sum((len(prompt) + tokens) ** 2 / 2 for prompt in prompts)
        return 2 * self._layers * computed + 2 * self._head * len(prompts) * tokens + wide * positions

    def _read(self, prompts: list[list[int]], tokens: int) -> float:
        """Every weight once a pass, and in a decoding pass the keys and values of every row."""
        width = 2 if self._numerics == "bf16" else 4
        config = self._config
        position = 2 * config.layers * config.kv_heads * config.head_dim
        kept = sum(tokens * (len(prompt) + tokens / 2) for prompt in prompts)
        return width * (tokens * (self._layers + self._head) + position * kept)


def against_transformers(bench: Bench, report: Report, limits: Limits) -> None:
    """Both kinds of prompts in every batch size; memory as it stands after each size, the smallest first."""
    path = bench.model.path
    theirs = [bench.side("transformers", numerics, path) for numerics in ("bf16", "float32")]
    for count in (1, 16) if bench.quick else (1, 16, 64):
        for kind, make in (("chat", chat), ("random", random)):
            prompts, measure = make(bench.model, count), f"batch {count}, {kind}"
            mine, other, best = bench.compare(prompts, "transformers", theirs, bench.rounds_of(count))
            report.add(measure, mine, other, "tokens/s", higher_is_better=True)
            limits.shares(report, measure, bench, prompts, mine)
            if kind == "chat" and count == 16:
                same_tokens(bench, report, prompts, theirs[1])
        peaks = (side.process.ask("peak") for side in (bench.ours, best))
        report.add(f"peak memory, batch {count}", *peaks, "MB", higher_is_better=False)
        if count == 16:
            theirs = [best]


def same_tokens(bench: Bench, report: Report, prompts: list[list[int]], theirs: Side) -> None:
    """In float32, where no rounding may tell the two apart; `theirs` has run already."""
    ours = bench.side("ours", "float32")
    bench.open(prompts, ours)
    pairs = zip(ours.process.ask("answers"), theirs.process.ask("answers"), strict=True)
    equal = sum(mine == other for mine, other in pairs)
    report.figures["greedy rows equal in float32"] = {"ours": equal, "of": len(prompts)}
    print(f"  greedy tokens in float32: {equal} of {len(prompts)} rows as transformers'", flush=True)
    ours.process.close()


def against_llama(bench: Bench, report: Report) -> None:
    """One sequence, on a GGUF of the same numbers."""
    python = environment(*LLAMA, note="pip compiles llama.cpp, which takes several minutes")
    theirs = [bench.side("llama", kind, demo_gguf(kind), python) for kind in ("bf16", "f16")]
    for kind, make in (("chat", chat), ("random", random)):
        rounds = 3 if bench.quick else 9
        mine, other, best = bench.compare(make(bench.model, 1), "llama.cpp", theirs, rounds)
        report.add(f"one sequence, {kind}, llama.cpp", mine, other, "tokens/s", higher_is_better=True)
        answers = [side.process.ask("answers")[0] for side in (bench.ours, theirs[0])]
        same = next(
            (at for at, pair in enumerate(zip(*answers, strict=True)) if len({*pair}) > 1), bench.tokens
        )
        print(f"  the first {same} of {bench.tokens} tokens as llama.cpp's, both in bf16", flush=True)
    fresh = bench.side("ours", "")
    bench.open(chat(bench.model, 1), fresh)
    peaks = (side.process.ask("peak") for side in (fresh, best))
    report.add("peak memory, one sequence, llama.cpp", *peaks, "MB", higher_is_better=False)


def extras(bench: Bench, report: Report) -> None:
    """What log-probabilities and sampling cost: ours against ours, greedy and without."""
    asked = {
        "log-probability of the chosen": {"logprobs": 0},
        "log-probabilities of 64": {"logprobs": 64},
        "temperature 0.8, top_p 0.9": {"temperature": 0.8, "top_p": 0.9},
        "temperature 1": {"temperature": 1.0},
    }
    for count in (16,) if bench.quick else (16, 64):
        bench.open(chat(bench.model, count), bench.ours)
        hows = [{}, *asked.values()]
        bare, *found = bench.medians([bench.ours] * len(hows), hows, bench.rounds_of(count))
        for name, rate in zip(asked, found, strict=True):
            report.add(f"batch {count}, {name}", rate, bare, "tokens/s", higher_is_better=True)


def vllm() -> str:
    """Whether PyPI's vLLM may run on a CPU, by what its wheel requires."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--no-deps"]
    command += ["--ignore-installed", "--only-binary", ":all:", "--report", "-", "vllm"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return "PyPI has no wheel for this machine"
    metadata = json.loads(done.stdout)["install"][0]["metadata"]
    cuda = any(need.startswith(("nvidia", "flashinfer")) for need in metadata.get("requires_dist", ()))
    built = "is built for CUDA" if cuda else "does not ask for CUDA, but this script has no side for it"
    return f"PyPI's wheel of {metadata['version']} {built}"


def main() -> None:
    args, report = arguments(__doc__), Report()
    with contextlib.ExitStack() as stack:
        bench = Bench(args.quick, stack)
        print(f"vLLM is left out: {vllm()}", flush=True)
        limits = Limits(bench)
        against_transformers(bench, report, limits)
        against_llama(bench, report)
        extras(bench, report)
    report.save(args.json)


if __name__ == "__main__":
    main()
