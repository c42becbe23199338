"""The page in a browser: it loads without a complaint, draws its marks, and shows values under a pointer."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from reporting.made import a_row_job, a_tune
from spillover.jobs.runs import Run
from spillover.report import page, read_history, summary

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs chromium: apt-get install chromium")

PROBE = """
<script>
onerror = (message) => console.error(`uncaught: ${message}`);
onload = () => {
  const plot = document.querySelector(".plot"), box = plot.getBoundingClientRect();
  const place = { clientX: box.left + box.width / 2, clientY: box.top + 9, bubbles: true };
  plot.dispatchEvent(new PointerEvent("pointermove", place));
  document.body.dataset.width = document.documentElement.scrollWidth;
  document.body.dataset.alerts = window.alerts || 0;
};
alert = () => { window.alerts = (window.alerts || 0) + 1; };
</script>
"""


def loaded(html: str, folder: Path, width: int = 1280) -> tuple[str, list[str]]:
    """The document after it was loaded, and what the console said."""
    path = folder / "page.html"
    path.write_text(html)
    done = subprocess.run(
        [
            str(BROWSER),
            *"--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage".split(),
            "--enable-logging=stderr",
            *(f"--user-data-dir={folder / 'browser'}", f"--window-size={width},900", "--dump-dom"),
            path.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def a_page(folder: Path) -> str:
    history = read_history(Run(folder))
    return page(summary(Run(folder), history), history)


def probed(html: str) -> str:
    """The page with a script of the tests, which its policy would forbid."""
    assert "http-equiv" in html
    return re.sub(r'<meta http-equiv="[^>]*>', PROBE, html)


def test_a_tune_is_drawn_with_its_marks(tmp_path: Path) -> None:
    html = a_page(a_tune(tmp_path / "tune-a-1").write())
    document, console = loaded(html, tmp_path)
    assert console == []
    assert document.count('class="cursor"') == 4  # its script ran, under its own policy
    assert len(re.findall(r'<path class="durable" data-count="3"', document)) == 4
    assert re.findall(r'<path class="interruption" data-number="(\d)"', document) == ["2", "3"] * 4
    assert document.count('class="curve line"') == 4 and document.count('class="dot dots"') == 1


def test_a_pointer_sees_the_values(tmp_path: Path) -> None:
    made = a_tune(tmp_path / "tune-a-1")
    document, console = loaded(probed(a_page(made.write())), tmp_path)
    assert console == []
    found = re.search(r'class="told"[^>]*>([^<]*)<', document)
    assert found is not None
    step, loss, smooth, validation = found[1].splitlines()
    assert step in ("optimizer step 60", "optimizer step 61")
    assert re.fullmatch(r"loss \d\.\d+", loss) and re.fullmatch(r"smoothed over about 5 \d\.\d+", smooth)
    assert validation.startswith("validation loss 1.5")


def test_a_run_has_no_complaint_either(tmp_path: Path) -> None:
    document, console = loaded(probed(a_page(a_row_job(tmp_path / "run-a-1").write())), tmp_path)
    assert console == []
    found = re.search(r'class="told"[^>]*>([^<]*)<', document)
    assert found is not None and re.match(r"0:00:5\d at work\nrows 50", found[1])
    assert document.count('<rect class="bar"') >= 10


def test_texts_that_are_scripts_do_not_run(tmp_path: Path) -> None:
    evil = "</title></script><script>alert(1)</script><img src=x onerror=alert(1)>"
    made = a_tune(tmp_path / "tune-a-1", model=evil, data=f'" onload="alert(1)" {evil}')
    made.start(evil, evil)
    made.event("error", message=evil)
    document, console = loaded(probed(a_page(made.write())), tmp_path)
    assert console == []
    assert 'data-alerts="0"' in document and "<img" not in document


def test_a_narrow_window_needs_no_scrolling_aside(tmp_path: Path) -> None:
    made = a_tune(tmp_path / "tune-a-1", 100_000 // 50, data="a" * 300)
    document, _ = loaded(probed(a_page(made.write())), tmp_path, width=500)
    found = re.search(r'data-width="(\d+)"', document)
    assert found is not None and int(found[1]) <= 500
