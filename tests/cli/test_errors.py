"""Mistakes: one line, the place, what to do next, exit 1, and nothing written."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from cli.command import Outcome, Shell, shell_in, tree
from spillover.jobs.data.parse import DEPTH_LIMIT

ROW = b'{"prompt": "the capital", "answer": "of France"}\n'
DEEP = b"[" * (DEPTH_LIMIT + 1) + b"]" * (DEPTH_LIMIT + 1)
BATCH = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions"}
BATCH |= {"body": {"model": "m", "messages": [{"role": "user", "content": "x"}]}}

# What is in the file, the line that the message names, and words of the message.
HOSTILE: dict[str, tuple[bytes, int, str]] = {
    "UTF-16": (ROW.decode().encode("utf-16"), 1, "UTF-16, not UTF-8"),
    "UTF-32": (ROW.decode().encode("utf-32"), 1, "UTF-32, not UTF-8"),
    "not UTF-8": (ROW + b'{"prompt": "caf\xe9", "answer": "b"}\n', 2, "not valid UTF-8"),
    "lone surrogate": (ROW + rb'{"prompt": "\ud800", "answer": "b"}', 2, "lone surrogate"),
    "NUL": (ROW + b'{"prompt": "a\0", "answer": "b"}\n', 2, "NUL byte"),
    "NaN": (ROW + b'{"prompt": "a", "answer": NaN}\n', 2, "NaN"),
    "Infinity": (ROW + b'{"prompt": "a", "answer": -Infinity}\n', 2, "Infinity"),
    "duplicate key": (ROW + b'{"prompt": "a", "prompt": "b"}\n', 2, "appears twice"),
    "duplicate id": (
        b'{"prompt": "a", "answer": "b", "custom_id": "x"}\n' * 2,
        2,
        "the id 'x' is already used on line 1",
    ),
    "bare scalar": (ROW * 2 + b"3\n", 3, "must be a JSON object, not a number"),
    "mixed shapes": (ROW + json.dumps(BATCH).encode(), 2, "a batch row in a file of plain rows"),
    "misspelt key": (ROW + b'{"promt": "a", "answer": "b"}\n', 2, "did you mean 'prompt'?"),
    "deep nesting": (ROW + b'{"prompt": ' + DEEP + b"}\n", 2, "nested more than"),
    "stray carriage return": (ROW + b'{"prompt": "a\rb", "answer": "b"}\n', 2, "bare carriage return"),
    "cut off": (ROW + ROW[:20], 2, "ends before it is complete"),
    "line above the limit": (ROW + b'{"prompt": "' + b"x" * (64 << 20) + b'"}\n', 2, "longer than"),
    "gzip": (gzip.compress(ROW), 1, "a gzip file"),
    "empty": (b"", 1, "the file has no rows"),
    "blank lines alone": (b"\n \n\n", 1, "the file has no rows"),
}


@pytest.fixture(scope="module")
def still(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Shell:
    """A shell for commands that must leave no trace, shared by many."""
    return shell_in(tmp_path_factory.mktemp("still"), model)


def one_line(outcome: Outcome) -> str:
    """The single line on stderr of a command that was refused, but for the progress of reading a model."""
    assert outcome.code == 1
    [line] = [line for line in outcome.err.splitlines() if not line.startswith("hash weights: ")]
    assert line.startswith("spill: ")
    return line


def refused(shell: Shell, *commands: str) -> list[str]:
    """The lines with which commands are refused, after checking that they wrote nothing."""
    before = tree(shell.folder)
    lines = [one_line(process.end()) for process in [shell.start(*words.split()) for words in commands]]
    assert tree(shell.folder) == before
    assert not (shell.home / "adapters").exists()
    return lines


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_file_is_refused_with_its_line(still, kind):
    data, number, words = HOSTILE[kind]
    (still.folder / "rows.jsonl").write_bytes(data)
    [line] = refused(still, "check rows.jsonl")
    assert line.startswith(f"spill: rows.jsonl:{number}: ")
    assert words in line


@pytest.mark.slow
@pytest.mark.parametrize("kind", HOSTILE)
def test_jobs_refuse_it_with_the_same_line_and_write_nothing(still, kind):
    (still.folder / "rows.jsonl").write_bytes(HOSTILE[kind][0])
    lines = refused(still, "check rows.jsonl", "run tiny rows.jsonl", "tune tiny rows.jsonl --name x")
    assert len(set(lines)) == 1


@pytest.mark.parametrize(
    ("file", "words"),
    [("absent.jsonl", "no such file. Try: "), ("tiny", "is a directory"), ("/dev/null", "is not a regular")],
)
def test_what_is_no_file_is_refused_by_every_command(still, file, words):
    lines = refused(still, f"check {file}", f"run tiny {file}", f"tune tiny {file} --name x")
    assert len(set(lines)) == 1
    assert lines[0].startswith(f"spill: {file}: {words}")


def test_harmless_oddities_are_read(shell):
    crlf = ROW.replace(b"\n", b"\r\n")
    pair = rb'{"prompt": "\ud83d\ude42 ' + "🙂 東京".encode() + b'", "answer": "b"}'
    large = b'{"prompt": "' + b"x" * (50 << 20) + b'", "answer": "b"}\n'
    data = b"\xef\xbb\xbf" + ROW + b"\n  \n" + crlf + large + b"\n" + pair
    (shell.folder / "rows.jsonl").write_bytes(data)
    outcome = shell("check", "rows.jsonl", "--json")
    assert outcome.code == 0
    facts = json.loads(outcome.out)
    assert (facts["rows"], facts["shape"], facts["bytes"]) == (4, "plain", len(data))
    assert {"prompt", "train"} <= set(facts["fits"])


RUN = "run tiny prompts.jsonl"
TUNE = "tune tiny train.jsonl --name x"


@pytest.mark.parametrize(
    ("command", "words", "next"),
    [
        ("run absent prompts.jsonl", "there is no model tag 'absent'", "use demo"),
        ("run ./absent prompts.jsonl", "the model folder ./absent does not exist", "ls ."),
        ("run work-in-progress/nothing@v1:x prompts.jsonl", "'work-in-progress/nothing@v1:x'", ""),
        ("run tiny+absent prompts.jsonl", "there is no adapter 'absent'", "spill adapters"),
        ("tune tiny prompts.jsonl --name x", "prompts.jsonl:1: there is no reply to learn", "add 'answer'"),
        ("tune tiny+a train.jsonl --name x", "already has an adapter", "name the base model alone"),
        ("tune tiny train.jsonl --name a/b", "'a/b' is no adapter name", "use letters"),
        (f"{TUNE} --val absent.jsonl", "absent.jsonl: no such file", "spill example"),
        (f"{RUN} --engine abacus", "there is no engine 'abacus'", "use --engine torch"),
        (f"{RUN} --device cuda", "CUDA", "use --device cpu"),
        (f"{RUN} --numerics int3", "--numerics int3 is unknown", "use float32 or bf16"),
        (f"{RUN} --placement disk", "--placement disk is unknown", "use resident or streamed"),
        (f"{RUN} --memory much", "--memory 'much' is no size", "--memory 2GB"),
        (f"{RUN} --memory 1MB", "even with its layers streamed", "allow more memory"),
        ("distill tiny prompts.jsonl --logprobs 65", "--logprobs 65 makes no sense", "spill distill --help"),
        ("distill tiny prompts.jsonl --score", "prompts.jsonl:1: ", ""),
        (f"{RUN} --temperature -1", "--temperature -1.0 makes no sense", "spill run --help"),
        (f"{RUN} --samples 2", "2 samples at temperature 0 are the same", "--temperature 1"),
        (f"{RUN} --stop-after 0", "--stop-after must be at least 1, not 0", ""),
        (f"{RUN} --out .", "--out . is a folder", "name a file"),
        (f"{TUNE} --schedule round", "--schedule: invalid enum value 'round'", "spill"),
        (f"{TUNE} --targets gate", "'gate' is no module to adapt", "use all, or some of q_proj"),
        (f"{TUNE} --lr 0", "--lr 0.0 makes no sense", "spill tune --help"),
        (f"{TUNE} --steps 3 --epochs 1", "either --epochs or --steps", "--epochs 1"),
        ("export absent", "there is no model tag 'absent'", "use demo"),
        ("export tiny+absent", "there is no adapter 'absent'", "spill adapters"),
        ("export tiny --type q5_k", "--type q5_k is unknown", "use f32, f16, bf16, q8_0"),
        ("export tiny --to tiny", "tiny exists already", "choose another --to, or add --overwrite"),
        ("export tiny --overwrite --to tiny", "tiny is no export: it is not replaced", "choose another --to"),
        ("export tiny --ollama", "a Modelfile goes with a GGUF file", "add --format gguf"),
        ("export tiny --parity train.jsonl", "train.jsonl has 16 rows; answers to at least 50", "add rows"),
        ("export tiny --memory much", "--memory 'much' is no size", "--memory 2GB"),
        ("status", "there are no runs in", "spill run or spill tune starts one"),
        ("status file:///absent/state", "nothing was ever started at", "spill runs"),
        ("adapters --remove absent", "there is no adapter 'absent'", "spill adapters"),
        ("adapters --remove ../tiny", "there is no adapter '../tiny'", "spill adapters"),
        ("models --fetch absent", "there is no model tag 'absent'", "use demo"),
        ("example absent", "there is no example 'absent'", "spill example tickets"),
        (
            "example prompts --to prompts.jsonl",
            "prompts.jsonl exists already",
            "spill example prompts --to OTHER",
        ),
        ("example prompts --to prompts.jsonl/x", "prompts.jsonl/x cannot be written", "--to OTHER"),
    ],
)
def test_a_mistake_is_told_in_one_line_and_nothing_is_written(still, command, words, next):
    [line] = refused(still, command)
    assert words in line
    assert not next or f". Try: {next}" in line


@pytest.mark.parametrize(
    "command",
    [
        "run tiny",
        "tune tiny train.jsonl",
        "dance",
        f"{RUN} --max-tokens many",
        f"{TUNE} --rank 1.5",
        f"{RUN} --no-such-option",
    ],
)
def test_a_malformed_command_line_is_one_line_that_names_the_help(still, command):
    [line] = refused(still, command)
    assert "--help" in line


@pytest.mark.parametrize("place", [0, 3])
def test_debug_anywhere_on_the_line_shows_the_traceback(still, place):
    words = ["run", "tiny", "absent.jsonl"]
    words.insert(place, "--debug")
    outcome = still(*words)
    assert outcome.code == 1
    assert outcome.err.startswith("Traceback (most recent call last)")
    assert "InputError: absent.jsonl: no such file" in outcome.err.splitlines()[-1]


def test_help_and_version_are_not_errors(still):
    for words in ("--help", "--version", "tune --help"):
        outcome = still(*words.split())
        assert (outcome.code, outcome.err) == (0, "")
        assert outcome.out
    assert still().out == still("--help").out
