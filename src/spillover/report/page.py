"""The page: one file of HTML that loads nothing, reads well without scripts, and trusts no text.

Its policy allows no script but its own, by digest, and no address at all, so that even a text that was not
escaped could do nothing.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Iterator, Sequence
from html import escape
from importlib import resources
from typing import Any

import msgspec

from spillover.report.axis import Curve, smoothed
from spillover.report.chart import Bars, Chart, Flag, Series, bars, chart
from spillover.report.history import History, Point
from spillover.report.summary import Summary, clock, duration, processes, rows

__all__ = ["page"]

SMOOTH_FROM = 50
"""Values from which on they are also drawn smoothed, over a fiftieth of them."""

SHOWN = 200
"""Rows of the table of values."""

BINS = 24


def page(found: Summary, history: History) -> str:
    """The page of a run."""
    title = f"{found.run}: {found.status}"
    drawn: list[tuple[str, dict[str, Any] | None]] = [
        chart(one, number) if isinstance(one, Chart) else (bars(one, number), None)
        for number, one in enumerate(_charts(found, history))
    ]
    script, style = _part("page.js"), _part("page.css")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    data = msgspec.json.encode([known for _, known in drawn]).decode().replace("<", "\\u003c")
    return "".join(
        [
            '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n',
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n',
            '<link rel="icon" href="data:,">\n',
            f"<title>{escape(title)}</title>\n<style>\n{style}</style></head>\n<body>\n",
            f"<h1>{escape(title)}</h1>\n<p class=what>{escape(_what(found))}</p>\n",
            _facts(rows(found)[1:]),
            f"<div class=charts>\n{''.join(html for html, _ in drawn)}</div>\n" if drawn else _NOTHING,
            _processes(found),
            _values(found, history),
            f'<script type="application/json" id="curves">{data}</script>\n',
            f"<script>{script}</script>\n</body></html>\n",
        ]
    )


_NOTHING = "<p>No step or row is on record yet, so there is nothing to draw.</p>\n"


def _charts(found: Summary, history: History) -> Iterator[Chart | Bars]:
    yield from _tuned(history) if found.command == "tune" else _answered(history)


def _tuned(history: History) -> Iterator[Chart]:
    """A tune's curves by step."""
    points = history.points
    durable = [float(step) for step in history.durable]
    flags = [
        Flag(float(one.after), number, _continued(number, history))
        for number, one in enumerate(history.processes, 1)
        if number > 1 and one.after is not None
    ]
    series = _series("loss", _curve(points, "loss"))
    validation = [
        (float(step), one) for step, one in sorted(history.validations.items()) if math.isfinite(one)
    ]
    series.append(Series("validation loss", validation, "dots"))
    for title, unit, curves, zero in (
        ("Loss", "mean over a step's target tokens, nats", series, False),
        ("Learning rate", "", [Series("learning rate", _curve(points, "lr"))], True),
        ("Gradient norm", "before clipping", _series("gradient norm", _curve(points, "grad_norm")), True),
        ("Throughput", "tokens/s", _series("tokens/s", _curve(points, "tokens_per_s")), True),
    ):
        if any(one.curve for one in curves):
            yield Chart(title, unit, "optimizer step", curves, durable, flags, zero=zero)


def _answered(history: History) -> Iterator[Chart | Bars]:
    """A row job's curves by time at work, and how long its answers are."""
    points = [one for one in history.points if one.worked is not None]
    durable = [one.worked for one in history.durable.values()]
    flags = [
        Flag(one.began, number, _continued(number, history))
        for number, one in enumerate(history.processes, 1)
        if number > 1
    ]
    done = [(one.worked or 0.0, float(one.step)) for one in points]
    rates = [(one.worked or 0.0, one.tokens_per_s) for one in points if one.tokens_per_s is not None]
    for title, unit, curve in (("Rows done", "rows", done), ("Throughput", "tokens/s", rates)):
        if curve:
            series = _series(unit, curve) if title == "Throughput" else [Series(unit, curve)]
            yield Chart(title, unit, "time at work", series, durable, flags, clock=True, zero=True)
    lengths = [one.tokens for one in points if one.tokens is not None and one.finish != "error"]
    if lengths:
        width = max(1, math.ceil((max(lengths) + 1 - min(lengths)) / BINS))
        start = min(lengths) // width * width
        counts = [0] * ((max(lengths) - start) // width + 1)
        for length in lengths:
            counts[(length - start) // width] += 1
        edges = [float(start + width * number) for number in range(len(counts) + 1)]
        yield Bars("Answer lengths", "rows", "tokens of an answer", edges, counts)


def _series(name: str, curve: Curve) -> list[Series]:
    """A figure that jumps from step to step: smoothed before itself, where there is enough of it."""
    if len(curve) < SMOOTH_FROM:
        return [Series(name, curve)]
    span = max(5, len(curve) // 50)
    return [Series(name, curve, "thin"), Series(f"smoothed over about {span:,}", smoothed(curve, span))]


def _continued(number: int, history: History) -> str:
    """What happened where process ``number`` took over."""
    before, now = history.processes[number - 2 : number]
    host = f" on {now.host}" if now.host else ""
    ended = before.ending or "killed or lost"
    return f"process {number}{host} continued after {now.after or 0:,}; the one before: {ended}"


def _curve(points: Sequence[Point], name: str) -> Curve:
    """A figure by step, where it is known and finite."""
    known = [(float(one.step), getattr(one, name)) for one in points]
    return [(x, y) for x, y in known if y is not None and math.isfinite(y)]


def _what(found: Summary) -> str:
    return rows(found)[0][1]


def _facts(named: Sequence[tuple[str, str]]) -> str:
    body = "".join(f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>\n" for name, text in named)
    return f"<table class=facts>\n{body}</table>\n"


def _processes(found: Summary) -> str:
    if not found.processes:
        return ""
    head = ("", "began", "host", "computed by", found.unit, "took", "ended")
    return f"<h2>Processes</h2>\n{_table(head, processes(found), long=6)}"


def _values(found: Summary, history: History) -> str:
    """The values as a table, of evenly spread steps where there are many."""
    points = history.points
    if not points:
        return ""
    every = -(-len(points) // SHOWN)
    chosen = [*points[::every], *([points[-1]] if (len(points) - 1) % every else [])]
    if found.command == "tune":
        head: tuple[str, ...] = (
            "step",
            "loss",
            "validation",
            "learning rate",
            "gradient norm",
            "tokens/s",
            "time",
        )
        body: list[tuple[str, ...]] = [
            (
                f"{one.step:,}",
                _number(one.loss, ".4f"),
                _number(history.validations.get(one.step), ".4f"),
                _number(one.lr, ".3g"),
                _number(one.grad_norm, ".4g"),
                _number(one.tokens_per_s, ",.0f"),
                clock(one.time) if one.time is not None else "",
            )
            for one in chosen
        ]
    else:
        head = ("rows", "tokens", "finish", "tokens/s", "at work", "time")
        body = [
            (
                f"{one.step:,}",
                _number(one.tokens, ",d"),
                one.finish or "",
                _number(one.tokens_per_s, ",.0f"),
                duration(one.worked) if one.worked is not None else "",
                clock(one.time) if one.time is not None else "",
            )
            for one in chosen
        ]
    what = f"Values, every {every:,}th of {len(points):,}" if every > 1 else f"Values of all {len(points):,}"
    return f"<details><summary>{what} {found.unit}</summary>\n{_table(head, body)}</details>\n"


def _table(head: Sequence[str], body: Sequence[Sequence[str]], long: int | None = None) -> str:
    def cell(kind: str, place: int, text: str) -> str:
        named = " class=long" if place == long and kind == "td" else ""
        return f"<{kind}{named}>{escape(text)}</{kind}>"

    lines = ["".join(cell("th", place, text) for place, text in enumerate(head))]
    lines += ["".join(cell("td", place, text) for place, text in enumerate(row)) for row in body]
    return (
        f"<div class=wide><table>\n{''.join(f'<tr>{line}</tr>' + chr(10) for line in lines)}</table></div>\n"
    )


def _number(value: float | None, shape: str) -> str:
    return "" if value is None else format(value, shape)


def _part(name: str) -> str:
    return (resources.files("spillover.report") / name).read_text(encoding="utf-8")
