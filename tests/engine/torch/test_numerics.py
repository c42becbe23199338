"""``docs/numerics.md`` has every gate, each within its bound; its script compares what it says."""

from __future__ import annotations

import numpy as np
import pytest

from engine.tiny import loaded, prompt
from engine.torch.scripts import DOCS, script

TEXT = (DOCS / "numerics.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def measure():
    return script("measure")


def test_the_page_is_what_the_script_would_write(measure):
    """All but the measured figures."""
    assert measure.page(*measure.written(TEXT)) == TEXT, "python docs/measure.py"


def test_every_gate_of_the_page_is_within_its_bound(measure):
    tables, _, _ = measure.written(TEXT)
    assert missed(measure, tables) == []


def missed(measure, tables):
    return [
        (gate.text, cell)
        for name, section in measure.SECTIONS.items()
        for gate, cells in zip(section.gates, tables[name], strict=True)
        for cell in gate.missed(cells)
    ]


@pytest.mark.parametrize(
    ("bound", "within", "beyond"),
    [
        ("all", "20 of 20", "19 of 20"),
        ("0", "0 of 83,558,400", "1 of 83,558,400"),
        ("0", "0", "1e-12"),
        ("1e-4", "1.0e-04", "1.1e-04"),
        ("1e-4", "0", "not measured"),
        ("none claimed", "76%", "not measured"),
    ],
)
def test_a_figure_beyond_its_bound_is_seen(measure, bound, within, beyond):
    gate = measure.Gate("a gate", (bound, "none claimed"))
    assert gate.missed((within, "3")) == []
    assert gate.missed((beyond, "3")) == [beyond]


@pytest.mark.parametrize("numerics", ["float32", "bf16"])
def test_bits_are_compared_after_the_same_tokens(measure, llama, numerics):
    """The compiled kernels are the same to the bit; torch's are near, and another token is not."""
    asked, follow = [list(prompt(length, length)) for length in (9, 30, 1)], [[3, 4, 5, 6], [8] * 4, [9] * 4]
    ours, plain = (
        loaded(llama[0], batch=3, numerics=numerics, kernels=kernels) for kernels in ("compiled", "torch")
    )
    together = measure.forced(ours, asked, follow)
    assert together.shape == (1 + measure.FORCED, 3, 256)
    assert (
        measure.differing(together, measure.by_token(ours, asked, follow)) == f"0 of {32 * together.size:,}"
    )
    for one in (measure.forced(plain, asked, follow), measure.by_token(plain, asked, follow)):
        np.testing.assert_allclose(one, together, atol=1e-4 if numerics == "float32" else 0.5)
    follow[1][2] += 1
    other = measure.forced(ours, asked, follow)
    assert np.argwhere((other != together).any(-1)).tolist() == [[3, 1], [4, 1]]
    assert int(measure.differing(other, together).partition(" of ")[0].replace(",", "")) > 256


def test_bits_are_counted(measure):
    one = np.array([1.0, -2.0, 0.0], np.float32)
    assert measure.differing(one, np.array([1.0, 2.0, -0.0], np.float32)) == "2 of 96"
    assert measure.differing(one, np.nextafter(one, np.float32(4))) != "0 of 96"
