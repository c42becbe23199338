"""What a judge is asked, and what counts as a verdict."""

from __future__ import annotations

from pathlib import Path

import pytest

from spillover.errors import InputError
from spillover.evaluate import Judge, Question, Unfit, verdict


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("It names the city.\nVerdict: correct", 1.0),
        ("Verdict: incorrect", 0.0),
        ("**Verdict:** **Incorrect**.", 0.0),
        ("verdict - Correct!", 1.0),
        ("Verdict: correct? No.\nVerdict: incorrect", 0.0),  # the last one
        ("incorrect.", 0.0),
        ("Correct", 1.0),
        ("Verdict: 0.75", 0.75),
        ("Verdict: 1.", 1.0),
        ("Verdict: 0", 0.0),
        ("Verdict: 7", None),
        ("Verdict: -0.5", None),
        ("Verdict: not correct", None),
        ("Verdict: correctly put", None),
        ("The answer is correct", None),
        ("Verdict: NaN", None),
        ("Verdict: 1.2.3", None),
        ("", None),
        ("Verdict:", None),
    ],
)
def test_verdicts(text: str, score: float | None) -> None:
    assert verdict(text) == score


def test_the_question_shows_everything_and_looks_into_nothing() -> None:
    asked = Judge().asking("What is {answer}?", "It is {expected}.", ["42", "forty-two"])
    assert "What is {answer}?" in asked and "It is {expected}." in asked
    assert "42 / forty-two" in asked and asked.endswith("Verdict: incorrect\n")
    assert "Reference" not in Judge().asking("a", "b", None)


def test_a_question_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "prompt.txt"
    path.write_text("Is {answer} like {expected}? {other}")
    judge = Judge.read(path)
    assert judge.asking("p", "a", {"k": 1}) == 'Is a like {"k":1}? {other}'
    with pytest.raises(Unfit, match=r"shows \{expected\}"):
        judge.check(Question())
    path.write_text("Is it right?")
    with pytest.raises(InputError, match=r"has no \{answer\}"):
        Judge.read(path)
    path.write_bytes(b"\xff{answer}")
    with pytest.raises(InputError, match="is not UTF-8"):
        Judge.read(path)
    with pytest.raises(InputError, match="No such file"):
        Judge.read(tmp_path / "none")
