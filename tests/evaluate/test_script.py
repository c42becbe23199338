"""Programs that score: those that do, and those that crash, hang or babble."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path

import pytest

from spillover.evaluate import ScriptFault, script_scores

GOOD = """
import json, sys
for line in sys.stdin:
    answer = json.loads(line)["answer"]
    print(json.dumps({"score": len(answer) / 10} if answer else None))
"""
ALL_AT_ONCE = """
import sys
lines = sys.stdin.readlines()
sys.stdout.write("\\n".join("true" if "5" in line else "0" for line in lines))
"""
ANSWERS = [json.dumps({"answer": str(n)}).encode() for n in range(8)]


def run(tmp_path: Path, source: str, answers: list[bytes] = ANSWERS, timeout: float = 20.0) -> list[float]:
    path = tmp_path / "score.py"
    path.write_text(source)
    return [*script_scores(path, iter(answers), timeout)]


def test_a_score_for_each_answer(tmp_path: Path) -> None:
    found = run(tmp_path, GOOD, [b'{"answer": "abc"}', b'{"answer": ""}', b'{"answer": "abcdefghij"}'])
    assert found[0] == 0.3 and math.isnan(found[1]) and found[2] == 1.0
    assert run(tmp_path, ALL_AT_ONCE) == [0, 0, 0, 0, 0, 1, 0, 0]
    assert run(tmp_path, GOOD, []) == []


def test_many_answers_do_not_fill_a_pipe(tmp_path: Path) -> None:
    assert run(tmp_path, ALL_AT_ONCE, [b'{"answer": "' + b"x" * 500 + b'"}'] * 20_000) == [0.0] * 20_000


@pytest.mark.parametrize(
    ("source", "number", "words"),
    [
        ("import sys\nprint(1); print(0)\nsys.exit('no more')", 2, "exit code 1: no more"),
        ("raise ValueError('bad')", 0, "exit code 1: ValueError: bad"),
        ("print(1)", 1, "exit code 0"),
        ("print(1)\nprint('fine')", 1, "wrote 'fine', which is no score"),
        ("print('NaN')", 0, "wrote 'NaN'"),
        ("print('[1]')", 0, "wrote '[1]'"),
        ("print('{\"value\": 1}')", 0, "no score"),
        ("print('\"1\"')", 0, "no score"),
        ("print('x' * 5_000_000)", 0, "no score"),
        ("import os\nos.write(1, bytes(range(128, 200)) + b'\\n')", 0, "no score"),
        ("for _ in range(9): print(1)", 7, "more lines than it was given answers"),
        ("for _ in range(8): print(1)\nraise SystemExit(3)", 7, "exit code 3"),
        ("import os\nos.kill(os.getpid(), 9)", 0, "exit code -9"),
    ],
)
def test_a_program_that_fails_names_the_answer(tmp_path: Path, source: str, number: int, words: str) -> None:
    with pytest.raises(ScriptFault) as caught:
        run(tmp_path, source)
    assert caught.value.number == number
    assert words in caught.value.message and "\n" not in caught.value.message


def test_a_program_that_hangs_is_ended_with_all_it_started(tmp_path: Path) -> None:
    source = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open({str(tmp_path / "pids")!r}, "w").write(f"{{child.pid}}")
print(1)
time.sleep(600)
"""
    before = time.monotonic()
    with pytest.raises(ScriptFault, match=r"gave no score within 2 s") as caught:
        run(tmp_path, source, timeout=2.0)
    assert caught.value.number == 1 and time.monotonic() - before < 20
    pid = int((tmp_path / "pids").read_text())
    for _ in range(200):  # a killed process is gone, or waits for init to look
        try:
            os.kill(pid, 0)
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (ProcessLookupError, FileNotFoundError):
            return
        if state == "Z":
            return
        time.sleep(0.05)
    raise AssertionError("the child lives on")


def test_the_time_limit_is_for_each_score(tmp_path: Path) -> None:
    source = "import time\nfor _ in range(8):\n    time.sleep(0.3)\n    print(1)\n"
    assert run(tmp_path, source, timeout=2.0) == [1.0] * 8
