"""Charts as HTML: curves and bars in SVG that stretches, numbers as text that does not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any, Literal, NamedTuple

from spillover.report.axis import Curve, labels, thinned, ticks

__all__ = ["Bars", "Chart", "Flag", "Series", "bars", "chart"]

SIZE = 1000  # both sides of what is drawn in, before it stretches


@dataclass(frozen=True)
class Series:
    """One curve: a line, a thin one behind another, or dots with a line between them."""

    name: str
    curve: Curve
    style: Literal["line", "thin", "dots"] = "line"


class Flag(NamedTuple):
    """An interruption at ``x``, after which process ``number`` went on."""

    x: float
    number: int
    text: str


@dataclass(frozen=True)
class Chart:
    """Curves over steps, or over seconds if ``clock``; ``zero`` shows the origin of y."""

    title: str
    unit: str
    over: str
    series: list[Series]
    durable: list[float] = field(default_factory=list)
    flags: list[Flag] = field(default_factory=list)
    clock: bool = False
    zero: bool = False
    decimals: int = 0


@dataclass(frozen=True)
class Bars:
    """How often: ``counts[n]`` is from ``edges[n]`` up to ``edges[n + 1]``."""

    title: str
    unit: str
    over: str
    edges: list[float]
    counts: list[int]


class Scale(NamedTuple):
    """Where values are, as a share from 0 to 1 of the way from ``low`` to ``high``."""

    low: float
    high: float

    def at(self, value: float) -> float:
        return (value - self.low) / (self.high - self.low)


def chart(drawn: Chart, number: int) -> tuple[str, dict[str, Any]]:
    """The HTML of chart ``number`` of a page, and what its pointer needs to know of it."""
    series = [Series(one.name, thinned(one.curve), one.style) for one in drawn.series if one.curve]
    values = [y for one in series for _, y in one.curve]
    across = [x for one in series for x, _ in one.curve]
    marks = ticks(min(0.0, *values) if drawn.zero else min(values), max(values))
    upward = Scale(marks[0], marks[-1])
    first, last = min(across), max(across)
    first = 0.0 if drawn.clock else first
    along = Scale(first, last) if last > first else Scale(first - 1, first + 1)
    divisor, unit = _clock(along.high) if drawn.clock else (1.0, "")
    over = f"{drawn.over}, {unit}" if unit else drawn.over
    pieces = [*_grid(marks, upward), *_marks(drawn, along), *(_curve(one, along, upward) for one in series)]
    name, legend = f"<b>{escape(drawn.title)}</b>", _legend(drawn, series, number == 0)
    html = _figure(
        number,
        f"{drawn.title}, {drawn.unit}, by {over}",
        f"{name} <span class=unit>{escape(drawn.unit)}</span>{legend}",
        "".join(pieces),
        _flags(drawn.flags, along),
        _sides(marks, upward, _across(along, divisor), along, divisor, over),
    )
    named = [
        {"name": one.name, "x": [x for x, _ in one.curve], "y": [_short(y) for _, y in one.curve]}
        for one in series
    ]
    return html, {
        "low": along.low,
        "high": along.high,
        "clock": drawn.clock,
        "over": drawn.over,
        "series": named,
    }


def bars(drawn: Bars, number: int) -> str:
    """The HTML of a chart of bars."""
    marks = ticks(0.0, max(drawn.counts))
    upward, along = Scale(marks[0], marks[-1]), Scale(drawn.edges[0], drawn.edges[-1])
    boxes = []
    for count, left, right in zip(drawn.counts, drawn.edges, drawn.edges[1:], strict=False):
        x, width, top = (
            along.at(left) * SIZE,
            (along.at(right) - along.at(left)) * SIZE,
            upward.at(count) * SIZE,
        )
        said = (
            f"{left:,.0f} to {right - 1:,.0f}: {count:,}" if right - 1 > left else f"{left:,.0f}: {count:,}"
        )
        boxes.append(
            f'<rect class=bar x="{x + width * 0.06:.1f}" y="{SIZE - top:.1f}" width="{width * 0.88:.1f}" '
            f'height="{top:.1f}"><title>{said}</title></rect>'
        )
    return _figure(
        number,
        f"{drawn.title}, {drawn.unit}, by {drawn.over}",
        f"<b>{escape(drawn.title)}</b> <span class=unit>{escape(drawn.unit)}</span>",
        "".join([*_grid(marks, upward), *boxes]),
        "",
        _sides(marks, upward, _across(along, 1.0), along, 1.0, drawn.over),
    )


def _figure(number: int, said: str, caption: str, drawing: str, above: str, sides: str) -> str:
    return (
        f'<figure data-chart="{number}"><figcaption>{caption}</figcaption><div class=frame>'
        f'<div class=plot><svg viewBox="0 0 {SIZE} {SIZE}" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(said)}">{drawing}</svg>{above}</div>{sides}</div></figure>\n'
    )


def _grid(marks: Sequence[float], upward: Scale) -> Iterator[str]:
    for mark in marks:
        y = SIZE - upward.at(mark) * SIZE
        yield f'<path class=grid d="M0 {y:.1f}H{SIZE}"/>'


def _curve(series: Series, along: Scale, upward: Scale) -> str:
    places = [
        f"{along.at(x) * SIZE:.1f} {SIZE - upward.at(y) * SIZE:.1f}" for x, y in series.curve
    ]  # a place is a tenth of a thousandth: finer than any screen
    path = f'<path class="curve {series.style}" d="M{"L".join(places)}"/>'
    if series.style == "dots" or len(places) == 1:
        path += f'<path class="dot {series.style}" d="M{"h0M".join(places)}h0"/>'
    return path


def _marks(drawn: Chart, along: Scale) -> Iterator[str]:
    """Ticks at the foot for durable points, and lines for interruptions."""
    feet = sorted({round(along.at(x) * SIZE) for x in drawn.durable if along.low <= x <= along.high})
    if feet:
        path = "".join(f"M{foot} {SIZE}v-35" for foot in feet)
        yield f'<path class=durable data-count="{len(drawn.durable)}" d="{path}"/>'
    for flag in drawn.flags:
        x = along.at(min(max(flag.x, along.low), along.high)) * SIZE
        yield (
            f'<path class=interruption data-number="{flag.number}" d="M{x:.1f} 0V{SIZE}">'
            f"<title>{escape(flag.text)}</title></path>"
        )


def _flags(flags: Sequence[Flag], along: Scale) -> str:
    """The numbers of processes over their lines, where there is room for them."""
    if len(flags) > 12:
        return ""
    places = [(along.at(min(max(one.x, along.low), along.high)), one) for one in flags]
    return "".join(
        f'<span class=flag style="left:{place:.2%}" title="{escape(one.text)}">{one.number}</span>'
        for place, one in places
    )


def _legend(drawn: Chart, series: Sequence[Series], first: bool) -> str:
    """What is what; the first chart of a page says it of the marks, too."""
    named = [(f"key {one.style}", one.name) for one in series] if len(series) > 1 else []
    named += [("key durable", "durable point")] if drawn.durable and first else []
    named += [("key interruption", "continued by another process")] if drawn.flags and first else []
    return "".join(f'<span class=legend><i class="{kind}"></i>{escape(name)}</span>' for kind, name in named)


def _sides(
    marks: Sequence[float], upward: Scale, across: Sequence[float], along: Scale, divisor: float, over: str
) -> str:
    """The numbers at the left and at the foot."""
    left = "".join(
        f'<span style="bottom:{upward.at(mark):.2%}">{text}</span>'
        for mark, text in zip(marks, labels(marks), strict=True)
    )
    foot = "".join(
        f'<span style="left:{along.at(mark * divisor):.2%}">{text}</span>'
        for mark, text in zip(across, labels(across), strict=True)
        if -0.001 <= along.at(mark * divisor) <= 1.001
    )
    return f"<div class=y>{left}</div><div class=x>{foot}</div><div class=over>{escape(over)}</div>"


def _across(along: Scale, divisor: float) -> list[float]:
    """What is marked at the foot; steps and rows are whole."""
    found = ticks(along.low / divisor, along.high / divisor, 7)
    if divisor == 1.0 and found[1] - found[0] < 1:
        found = [float(number) for number in range(int(found[0]), int(found[-1]) + 2)]
    return found


def _clock(seconds: float) -> tuple[float, str]:
    """How many seconds the unit has that ``seconds`` are told in, and its name."""
    units = ((86_400.0, "days"), (3_600.0, "hours"), (60.0, "minutes"))
    return next(((size, name) for size, name in units if seconds >= 3 * size), (1.0, "seconds"))


def _short(value: float) -> float:
    """Six digits, which are enough to read."""
    return float(f"{value:.6g}")
