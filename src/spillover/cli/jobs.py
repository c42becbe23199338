"""``spill run``, ``distill``, ``tune``, ``eval`` and ``resume``: from a command line to a job and back."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
import typer

from spillover.errors import InputError, SpillError

if TYPE_CHECKING:
    from spillover.jobs.events import Events
    from spillover.jobs.job import Result
    from spillover.jobs.runs import JobFile

__all__ = ["distill", "evaluate", "resume", "run", "tune"]

T = TypeVar("T")
ARGUMENTS = ("model", "data", "models")
NOT_RECORDED = ("config", "emit_config", "ctx")
NOT_RESUMED = ("takeover", "from_previous", "stop_after", "dry_run")
"""What a command line asks of one process, not of the work."""


def _from_config(ctx: typer.Context, path: Path | None) -> Path | None:
    """Let a job file supply every value that the command line does not."""
    if path is not None:
        from spillover.jobs.runs import read_job

        job = read_job(path)
        if job.command != ctx.info_name:
            raise InputError(
                f"{path} is a job for spill {job.command}", hint=f"spill {job.command} --config {path}"
            )
        values = {**job.arguments, **job.options}
        known = {parameter.name for parameter in ctx.command.params}
        if unknown := next((name for name in values if name not in known), None):
            raise InputError(
                f"{path}: spill {job.command} has no option {unknown!r}", hint=f"spill {job.command} --help"
            )
        ctx.default_map = values
    return path


Model = Annotated[str, typer.Argument(help="A tag, org/name[@revision] or a folder; +NAME adds an adapter.")]
State = Annotated[
    str | None, typer.Option(help="Durable state: a path, s3://, gs:// or az://.", metavar="URI")
]
Weights = Annotated[str | None, typer.Option(help="Stage the model from here once.", metavar="URI")]
EngineName = Annotated[str, typer.Option(help="What computes: torch.")]
Device = Annotated[str | None, typer.Option(help="cpu or cuda; chosen when not given.")]
Memory = Annotated[
    str | None, typer.Option(help="Memory that may be used, such as 2GB; most of it when not given.")
]
PlacementName = Annotated[
    str | None,
    typer.Option(help="resident, or streamed from the drive in every pass; by memory when not given."),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Say what would be done, how, and how long it takes.")
]
NumericsName = Annotated[str | None, typer.Option(help="float32 or bf16; measured when not given.")]
Headless = Annotated[bool | None, typer.Option(help="JSON lines on stdout; automatic without a terminal.")]
Config = Annotated[
    Path | None,
    typer.Option(callback=_from_config, is_eager=True, help="Take what is not given here from a job file."),
]
EmitConfig = Annotated[Path | None, typer.Option(help="Write the job file and do nothing else.")]
Notify = Annotated[
    str | None, typer.Option(help="POST a small JSON document here at the end.", metavar="URL")
]
Quiet = Annotated[bool, typer.Option("--quiet", help="Only the last line.")]
StopAfter = Annotated[int | None, typer.Option(help="Stop on purpose after this many steps or rows.")]
Takeover = Annotated[bool, typer.Option("--takeover", help="Fence off the present owner; always safe.")]
FromPrevious = Annotated[
    bool, typer.Option("--from-previous", help="Continue from the checkpoint before a damaged one.")
]


def run(
    ctx: typer.Context,
    model: Model,
    data: Annotated[str, typer.Argument(metavar="FILE", help="A JSONL file, or `sample` for 20 questions.")],
    out: Annotated[Path | None, typer.Option(help="Also write the results here.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of an answer, unless the row says.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Nucleus sampling; 1 is off.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Only the k most likely tokens; 0 is off.")] = 0,
    min_p: Annotated[float, typer.Option(help="Least share of the most likely token; 0 is off.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Decides every random choice.")] = 0,
    stop: Annotated[
        list[str] | None, typer.Option(help="End an answer before this text; repeatable.")
    ] = None,
    logprobs: Annotated[
        int | None, typer.Option(help="Log-probabilities of the top K tokens, 0 to 64.")
    ] = None,
    samples: Annotated[int, typer.Option(help="Answers a row.")] = 1,
    batch: Annotated[int, typer.Option(help="Most rows at a time; memory may allow fewer.")] = 64,
    state: State = None,
    weights: Weights = None,
    engine: EngineName = "torch",
    device: Device = None,
    numerics: NumericsName = None,
    memory: Memory = None,
    placement: PlacementName = None,
    dry_run: DryRun = False,
    headless: Headless = None,
    config: Config = None,
    emit_config: EmitConfig = None,
    notify: Notify = None,
    quiet: Quiet = False,
    stop_after: StopAfter = None,
    takeover: Takeover = False,
    from_previous: FromPrevious = False,
) -> None:
    """Answer the rows of a file.

    Results come in the order of the input, in the OpenAI batch output format. Stop it any way you like: the
    same command continues, on this machine or another.
    """
    _start(ctx)


def distill(
    ctx: typer.Context,
    model: Model,
    data: Annotated[str, typer.Argument(metavar="FILE", help="A JSONL file, or `sample` for 20 questions.")],
    out: Annotated[Path | None, typer.Option(help="Also write the rows here.")] = None,
    score: Annotated[
        bool, typer.Option("--score", help="Generate nothing: score the replies that the rows have.")
    ] = False,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of an answer, unless the row says.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Nucleus sampling; 1 is off.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Only the k most likely tokens; 0 is off.")] = 0,
    min_p: Annotated[float, typer.Option(help="Least share of the most likely token; 0 is off.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Decides every random choice.")] = 0,
    stop: Annotated[
        list[str] | None, typer.Option(help="End an answer before this text; repeatable.")
    ] = None,
    logprobs: Annotated[int, typer.Option(help="Most likely tokens that are kept a position, 0 to 64.")] = 20,
    batch: Annotated[int, typer.Option(help="Most rows at a time; memory may allow fewer.")] = 64,
    state: State = None,
    weights: Weights = None,
    engine: EngineName = "torch",
    device: Device = None,
    numerics: NumericsName = None,
    memory: Memory = None,
    placement: PlacementName = None,
    dry_run: DryRun = False,
    headless: Headless = None,
    config: Config = None,
    emit_config: EmitConfig = None,
    notify: Notify = None,
    quiet: Quiet = False,
    stop_after: StopAfter = None,
    takeover: Takeover = False,
    from_previous: FromPrevious = False,
) -> None:
    """Write down what a teacher answers, with the log-probabilities of its most likely tokens.

    `spill tune STUDENT` learns from the rows as they are. Stop it any way you like: the same command
    continues, on this machine or another.
    """
    _start(ctx)


def tune(
    ctx: typer.Context,
    model: Model,
    data: Annotated[Path, typer.Argument(metavar="FILE", help="Training rows, JSONL.")],
    name: Annotated[str, typer.Option(help="Name of the adapter.")],
    rank: Annotated[int, typer.Option(help="Rank of the adapter's matrices.")] = 16,
    alpha: Annotated[float, typer.Option(help="The adapter counts alpha / rank times.")] = 32.0,
    targets: Annotated[
        str, typer.Option(help="all, or some of q_proj,k_proj,v_proj,o_proj,gate_proj,...")
    ] = "all",
    dropout: Annotated[float, typer.Option(help="On the adapter's input while training.")] = 0.0,
    lr: Annotated[float, typer.Option(help="Highest learning rate.")] = 1e-4,
    schedule: Annotated[str, typer.Option(help="cosine, linear or constant.")] = "cosine",
    warmup: Annotated[float, typer.Option(help="Share of the steps over which lr rises.")] = 0.03,
    weight_decay: Annotated[float, typer.Option(help="AdamW's decoupled decay.")] = 0.01,
    clip: Annotated[float, typer.Option(help="Largest gradient norm; 0 is off.")] = 1.0,
    epochs: Annotated[
        float | None, typer.Option(help="Passes over the file; 1 unless --steps is given.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps, instead of --epochs.")] = None,
    loss: Annotated[
        str, typer.Option(help="text, or kl: a teacher's distribution, from rows of spill distill.")
    ] = "text",
    batch: Annotated[int, typer.Option(help="Sequences in a micro-batch.")] = 4,
    grad_accum: Annotated[int, typer.Option(help="Micro-batches in a step.")] = 1,
    max_seq: Annotated[int, typer.Option(help="Most tokens of a sequence.")] = 2048,
    seed: Annotated[int, typer.Option(help="Decides initial values, data order and dropout.")] = 0,
    ckpt_every: Annotated[int, typer.Option(help="Steps between checkpoints.")] = 50,
    val: Annotated[Path | None, typer.Option(help="Rows to measure the loss on after each epoch.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an adapter of this name.")] = False,
    state: State = None,
    weights: Weights = None,
    engine: EngineName = "torch",
    device: Device = None,
    numerics: NumericsName = None,
    memory: Memory = None,
    placement: PlacementName = None,
    dry_run: DryRun = False,
    headless: Headless = None,
    config: Config = None,
    emit_config: EmitConfig = None,
    notify: Notify = None,
    quiet: Quiet = False,
    stop_after: StopAfter = None,
    takeover: Takeover = False,
    from_previous: FromPrevious = False,
) -> None:
    """Train a LoRA adapter.

    The adapter loads in PEFT, mlx-lm and vLLM, and answers through `spill run MODEL+NAME FILE`. Stop it any
    way you like: the same command continues, on this machine or another.
    """
    _start(ctx)


def evaluate(
    ctx: typer.Context,
    data: Annotated[Path, typer.Argument(metavar="EVALS", help="Rows with what is expected, JSONL.")],
    models: Annotated[list[str], typer.Argument(metavar="MODEL...", help="Models, as for `spill run`.")],
    metric: Annotated[
        list[str] | None,
        typer.Option(
            help="exact_match, contains, f1, regex:PATTERN, json_field:PATH[=VALUE], json_schema[:FILE], "
            "judge or script:FILE.py; repeatable."
        ),
    ] = None,
    baseline: Annotated[
        str | None, typer.Option(help="The model that others are compared with; the first.")
    ] = None,
    judge: Annotated[
        str | None, typer.Option(help="A model that grades the answers.", metavar="MODEL")
    ] = None,
    judge_prompt: Annotated[
        Path | None,
        typer.Option(help="What to ask it, with {prompt}, {answer} and {expected}.", metavar="FILE"),
    ] = None,
    judge_max_tokens: Annotated[int, typer.Option(help="Most tokens that a judge says.")] = 256,
    script_timeout: Annotated[float, typer.Option(help="Seconds that a script may take for a score.")] = 60.0,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of an answer, unless the row says.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Nucleus sampling; 1 is off.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Only the k most likely tokens; 0 is off.")] = 0,
    min_p: Annotated[float, typer.Option(help="Least share of the most likely token; 0 is off.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Decides every random choice.")] = 0,
    stop: Annotated[
        list[str] | None, typer.Option(help="End an answer before this text; repeatable.")
    ] = None,
    samples: Annotated[int, typer.Option(help="Answers a row.")] = 1,
    batch: Annotated[int, typer.Option(help="Most rows at a time; memory may allow fewer.")] = 64,
    json: Annotated[bool, typer.Option("--json", help="Only the report on stdout, as JSON.")] = False,
    state: Annotated[
        str | None,
        typer.Option(help="Where answers are durable: a path, s3://, gs:// or az://.", metavar="URI"),
    ] = None,
    weights: Weights = None,
    engine: EngineName = "torch",
    device: Device = None,
    numerics: NumericsName = None,
    memory: Memory = None,
    placement: PlacementName = None,
    dry_run: DryRun = False,
    headless: Headless = None,
    config: Config = None,
    emit_config: EmitConfig = None,
    notify: Notify = None,
    quiet: Quiet = False,
    stop_after: StopAfter = None,
    takeover: Takeover = False,
    from_previous: FromPrevious = False,
) -> None:
    """Score models on the same rows, with intervals, and show the rows on which they differ.

    No answer is computed twice: with another model, metric or row, the same command computes what is new.
    Stop it any way you like: the same command continues, on this machine or another.
    """
    _start(ctx)


def resume(
    run: Annotated[
        str | None, typer.Argument(metavar="RUN", help="A run, or the beginning of its name.")
    ] = None,
    headless: Headless = None,
    quiet: Quiet = False,
    takeover: Takeover = False,
    engine: Annotated[str | None, typer.Option(help="Continue on another engine.")] = None,
) -> None:
    """Continue a run of this folder: the newest, or the one named."""
    from spillover.jobs.runs import JobFile, find_run

    job = find_run(run).job()
    given = {"headless": headless, "quiet": quiet or None, "takeover": takeover or None, "engine": engine}
    kept = {key: value for key, value in job.options.items() if key not in NOT_RESUMED}
    options = kept | {key: value for key, value in given.items() if value is not None}
    execute(JobFile(job.command, job.arguments, options))


def _start(ctx: typer.Context) -> None:
    """Turn what was given into a job; write it down or do it."""
    from spillover.jobs.runs import JobFile, write_job

    given = {name: value for name, value in ctx.params.items() if _was_given(ctx, name)}
    plain = {name: str(value) if isinstance(value, Path) else value for name, value in given.items()}
    arguments = {name: plain.pop(name) for name in ARGUMENTS if name in plain}
    job = JobFile(str(ctx.info_name), arguments, plain)
    target = ctx.params.get("emit_config")
    if target is None:
        execute(job)
        return
    write_job(target, job)
    print(f"wrote {target}\nnext: spill {job.command} --config {target}")


def _was_given(ctx: typer.Context, name: str) -> bool:
    source = ctx.get_parameter_source(name)
    return name not in NOT_RECORDED and source is not None and source.name not in ("DEFAULT",)


def execute(job: JobFile) -> None:
    """Do a job, show it, and exit with its code."""
    from spillover.cli.terminal import display
    from spillover.jobs.events import Events

    options = dict(job.options)
    headless = is_headless(options.pop("headless", None))
    quiet = bool(options.pop("quiet", False))
    json = bool(options.pop("json", False))
    with display(job.command, headless=headless, quiet=quiet, silent=json) as shown:
        events = Events(job.command, shown.show)
        try:
            with _preemptible(events, headless):
                result = _perform(job, options | {"headless": headless}, events)
        except SpillError as error:
            events.emit("error", message=str(error), hint=error.hint)
            raise
    if json and result.document is not None:
        print(result.document.decode())
    _tell(result, None if options.get("dry_run") else options.get("notify"), shown.text, quiet or json)
    raise typer.Exit(result.ending.code)


@contextlib.contextmanager
def _preemptible(events: Events, headless: bool) -> Iterator[None]:
    """While the job itself does not listen for signals, nothing is at stake: leave at once, to be retried."""
    from spillover.jobs.interrupts import Ending

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(Ending.PREEMPTED.code)

    numbers = (signal.SIGTERM, signal.SIGINT) if headless else (signal.SIGTERM,)
    before = {number: signal.signal(number, leave) for number in numbers}
    try:
        yield
    except SystemExit:
        events.emit("preempted", message="preempted outside of the work; the same command continues")
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _perform(job: JobFile, options: dict[str, Any], events: Events) -> Result:
    from spillover.jobs.interrupts import Ending
    from spillover.jobs.job import JobOptions

    values = job.arguments | options
    shared = _convert({key: values.pop(key) for key in [*values] if key in _fields(JobOptions)}, JobOptions)
    if job.command == "tune":
        from spillover.jobs.tune import TuneSettings, tune

        result = tune(_convert(values, TuneSettings), shared, events, job)
    elif job.command in ("run", "distill"):
        from spillover.jobs.distill import DistillSettings
        from spillover.jobs.run import RunSettings, run_rows

        if values.get("data") == "sample":
            from spillover.cli.prepare import sample_file

            values["data"] = str(sample_file())
        kind = RunSettings if job.command == "run" else DistillSettings
        result = run_rows(_convert(values, kind), shared, events, job)
    elif job.command == "eval":
        from spillover.jobs.evaluate import EvalSettings
        from spillover.jobs.evaluate import evaluate as evaluated

        result = evaluated(_convert(values, EvalSettings), shared, events, job)
    else:
        hint = "use run, distill, tune or eval"
        raise InputError(f"a job file for spill {job.command} cannot be run", hint=hint)
    name = result.run.id if result.run else None
    if result.ending is Ending.PREEMPTED:
        events.emit("preempted", message=result.message, run=name, signal=result.signal)
    else:
        complete = result.ending is Ending.DONE and not shared.dry_run
        events.emit("done", message=result.message, run=name, complete=complete, seconds=events.seconds)
    return result


def _tell(result: Result, url: str | None, text: Callable[[str], None], quiet: bool) -> None:
    """The last lines: how it ended and what to type next."""
    from spillover.jobs.job import post

    if url is not None and (
        trouble := post(url, {"run": result.run.id if result.run else None, "message": result.message})
    ):
        text(trouble)
    for line in () if quiet else result.details:
        text(line)
    text(result.message)
    if result.run is not None and result.run.has_course and result.ending.name == "DONE" and not quiet:
        text(f"its course: spill report {result.run.id}")
    if result.next is not None and not quiet:
        text(f"next: {result.next}")


def is_headless(asked: bool | None) -> bool:
    """As asked, as ``SPILL_HEADLESS`` says, or by whether anybody can be watching."""
    if asked is not None:
        return asked
    if (forced := os.environ.get("SPILL_HEADLESS")) in ("0", "1"):
        return forced == "1"
    return not sys.stdout.isatty()


def _fields(kind: Any) -> set[str]:
    return set(kind.__dataclass_fields__)


def _convert(values: dict[str, Any], kind: type[T]) -> T:
    """Build a settings object; `InputError` naming what does not fit (a job file may hold anything)."""

    def decode(wanted: type, value: Any) -> Any:
        if wanted is Path and isinstance(value, str):
            return Path(value)
        raise TypeError(f"cannot be a {wanted.__name__}")

    unknown = next((key for key in values if key not in _fields(kind)), None)
    if unknown is not None:
        raise InputError(f"there is no option {unknown!r}", hint="spill --help")
    try:
        return msgspec.convert(values, kind, dec_hook=decode, strict=False)
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at `$.")
        flag = f"--{where.rstrip('`').replace('_', '-')}: " if where else ""
        raise InputError(f"{flag}{what[0].lower()}{what[1:]}", hint="spill --help") from error
