"""Charts as SVG text: lines, columns, stacked bars, pictures on axes. Colours are classes s0, s1, ..., set by page.css."""

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from fedsieve.formatting import size
from fedsieve.report.html.axis import Scale, span, tick_text
from fedsieve.report.html.elements import Markup, tag, thinned

WIDTH, HEIGHT = 480, 270
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 16, 44
COLOURS = 8
COUNTED = {"round", "rounds"}
SHAPES = ("M-5,0a5,5 0 1,0 10,0a5,5 0 1,0 -10,0", "M-5,-5h10v10h-10z", "M0,-6l6,11h-12z", "M0,-7l6,7l-6,7l-6,-7z", "M-6,-5h12l-6,11z")
"""Markers of end points: a disc, a square, triangles, a diamond, so that colour is not all that tells them apart."""


class Line(NamedTuple):
    """One curve; a band around it where there is one; a marker at its end where asked for."""

    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    low: Sequence[float | None] = ()
    high: Sequence[float | None] = ()
    end: bool = False


class Mark(NamedTuple):
    """A dashed line across: at a number, with words."""

    at: float
    says: str


class Axes(NamedTuple):
    """The names and kinds of both axes."""

    x: str
    y: str
    log_x: bool = False
    log_y: bool = False
    zero: bool = False
    follow: bool = True
    """whether the pointer reads the numbers below the chart, row by row"""


def line_chart(
    lines: Sequence[Line],
    axes: Axes,
    *,
    across: Sequence[Mark] = (),
    down: Sequence[Mark] = (),
    front: Sequence[tuple[float, float]] = (),
    points: int = 400,
) -> Markup:
    """Curves over a shared axis. `across` are horizontal references, `down` vertical ones, `front` a dashed path through points."""
    xs = [v for line in lines for v in line.x]
    ys = [v for line in lines for v in (*line.y, *line.low, *line.high) if v is not None and (v > 0 or not axes.log_y)]
    x = Scale(*span(xs), LEFT, WIDTH - RIGHT, axes.log_x and min(xs, default=0) > 0)
    low, high = span([*ys, *(mark.at for mark in across)], zero=axes.zero)
    margin = 0 if axes.log_y else 0.04 * (high - low)
    y = Scale(low if axes.zero and low == 0 else low - margin, high + margin, HEIGHT - BOTTOM, TOP, axes.log_y)
    drawn = [_axes(x, y, axes)]
    drawn += [f'<path class="ref" d="M{LEFT},{y(mark.at):.1f}H{WIDTH - RIGHT}"/>' for mark in across]
    drawn += [f'<path class="ref" d="M{x(mark.at):.1f},{TOP}V{HEIGHT - BOTTOM}"/>' for mark in down]
    drawn += [_curve(line, i, x, y, points) for i, line in enumerate(lines)]
    for mark in across:
        drawn.append(f'<text class="ref" x="{WIDTH - RIGHT}" y="{y(mark.at) - 5:.1f}" text-anchor="end">{escape(mark.says)}</text>')
    for i, mark in enumerate(down):
        anchor, gap = ("end", -5) if x(mark.at) > 0.7 * WIDTH else ("start", 5)
        place = f'x="{x(mark.at) + gap:.1f}" y="{TOP + 14 + 16 * i}" text-anchor="{anchor}"'
        drawn.append(f'<text class="ref" {place}>{escape(mark.says)}</text>')
    if front:
        drawn.append(f'<path class="ref front" d="M{"L".join(f"{x(a):.1f},{y(b):.1f}" for a, b in front)}"/>')
    kind = "log" if x.log else "linear"
    asked = f' tabindex="0" data-x0="{x.low:.9g}" data-x1="{x.high:.9g}" data-scale="{kind}"' if axes.follow else ""
    alternative = f"{axes.y} against {axes.x}: {', '.join(line.name for line in lines)}"
    names = [line.name for line in lines]
    shapes = any(line.end for line in lines)
    return Markup((legend(names, shapes=shapes) if len(names) > 1 or shapes else "") + svg("".join(drawn), alternative, extra=asked))


def _curve(line: Line, number: int, x: Scale, y: Scale, points: int) -> str:
    colour = f"s{number % COLOURS}"
    out = ""
    if line.low:
        whole = thinned([p for p in zip(line.x, line.low, line.high, strict=True) if _real(p[1], y) and _real(p[2], y)], points)
        if whole:
            outline = [(a, low) for a, low, _ in whole] + [(a, high) for a, _, high in reversed(whole)]
            out += f'<path class="band {colour}" d="M{"L".join(f"{x(a):.1f},{y(b):.1f}" for a, b in outline)}z"/>'
    there = thinned([(a, b) for a, b in zip(line.x, line.y, strict=True) if _real(b, y)], points)
    if not there:
        return out
    path = "L".join(f"{x(a):.1f},{y(b):.1f}" for a, b in there)
    out += f'<path class="line {colour} d{number % COLOURS}" d="M{path}{"h.1" if len(there) == 1 else ""}"/>'
    if line.end:
        a, b = there[-1]
        hint = f"<title>{escape(line.name)}: {b:.5g} at {a:.5g}</title>"
        out += f'<path class="dot {colour}" transform="translate({x(a):.1f},{y(b):.1f})" d="{SHAPES[number % len(SHAPES)]}">{hint}</path>'
    return out


def _real(value: float | None, axis: Scale) -> bool:
    return value is not None and math.isfinite(value) and (value > 0 or not axis.log)


def _axes(x: Scale, y: Scale, axes: Axes) -> str:
    out = []
    for value in whole_ticks(y, axes.y):
        out.append(f'<path class="grid" d="M{LEFT},{y(value):.1f}H{WIDTH - RIGHT}"/>')
        out.append(f'<text x="{LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{tick_text(value)}</text>')
    floor = HEIGHT - BOTTOM
    for value in whole_ticks(x, axes.x):
        out.append(f'<path class="grid" d="M{x(value):.1f},{floor}v4"/>')
        out.append(f'<text x="{x(value):.1f}" y="{floor + 18}" text-anchor="middle">{tick_text(value)}</text>')
    out.append(f'<path class="axis" d="M{LEFT},{floor}H{WIDTH - RIGHT}"/>')
    out.append(f'<text class="name" x="{WIDTH - RIGHT}" y="{HEIGHT - 8}" text-anchor="end">{escape(axes.x)}</text>')
    out.append(f'<text class="name" x="2" y="11">{escape(axes.y)}</text>')
    return "".join(out)


def whole_ticks(axis: Scale, name: str) -> list[float]:
    """An axis's ticks; there is no half of a round."""
    return [value for value in axis.ticks() if name not in COUNTED or value == int(value)]


def svg(content: str, alternative: str, *, height: int = HEIGHT, extra: str = "") -> Markup:
    """A drawing with its text alternative."""
    label = escape(alternative)
    return Markup(f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{label}" class="chart"{extra}>{content}</svg>')


def legend(names: Sequence[str], *, filled: bool = False, shapes: bool = False) -> Markup:
    """Which colour and stroke is whose."""
    items = []
    for i, name in enumerate(names):
        colour = f"s{i % COLOURS}"
        sample = f'<path class="line {colour} d{i % COLOURS}" d="M0,7H26"/>'
        if filled:
            sample = f'<rect class="fill {colour}" width="14" height="14" x="6"/>'
        if shapes:
            sample += f'<path class="dot {colour}" transform="translate(13,7)" d="{SHAPES[i % len(SHAPES)]}"/>'
        items.append(tag("li", Markup(f'<svg viewBox="0 0 26 14" aria-hidden="true">{sample}</svg>'), name))
    return tag("ul", *items, class_="legend")


def column_chart(values: Sequence[float], reach: tuple[float, float], axes: Axes, colour: int = 0) -> Markup:
    """Columns side by side over [low, high]; a logarithmic height begins at one half."""
    x = Scale(*reach, LEFT, WIDTH - RIGHT)
    least = 0.5 if axes.log_y else 0.0
    y = Scale(least, max([*values, 1.0 if axes.log_y else 1e-12]) * 1.05, HEIGHT - BOTTOM, TOP, axes.log_y)
    wide = (WIDTH - RIGHT - LEFT) / max(len(values), 1)
    path = "".join(
        f"M{LEFT + i * wide:.2f},{HEIGHT - BOTTOM}V{y(value):.1f}h{wide * (0.9 if wide > 3 else 1):.2f}V{HEIGHT - BOTTOM}z"
        for i, value in enumerate(values)
        if value > least
    )
    return svg(_axes(x, y, axes) + f'<path class="fill s{colour}" d="{path}"/>', f"{axes.y} against {axes.x}")


def stacked_bars(bars: Sequence[tuple[str, Sequence[float]]], parts: Sequence[str], what: str) -> Markup:
    """Horizontal bars of bytes, each split into the same parts, its sum beside it."""
    most = max((sum(values) for _, values in bars), default=0) or 1.0
    x = Scale(0, most, 0, WIDTH - 78)
    out = []
    for row, (name, values) in enumerate(bars):
        top = 18 + row * 44
        out.append(f'<text x="0" y="{top}">{escape(name)}</text>')
        at = 0.0
        for i, value in enumerate(values):
            if value > 0:
                hint = f"<title>{escape(name)}, {escape(parts[i])}: {size(value)}</title>"
                out.append(f'<rect class="fill s{i}" x="{x(at):.1f}" y="{top + 5}" width="{x(value):.2f}" height="16">{hint}</rect>')
            at += value
        out.append(f'<text x="{x(at) + 6:.1f}" y="{top + 18}">{size(at)}</text>')
    drawing = svg("".join(out), what, height=18 + 44 * len(bars))
    return Markup((legend(parts, filled=True) if len(parts) > 1 else "") + drawing)


def image_chart(uri: str, x: tuple[str, float, float], y: tuple[str, float, float], what: str) -> Markup:
    """A picture on axes, its first row on top: (name, first, last) of both."""
    across = Scale(x[1], x[2], LEFT, WIDTH - RIGHT)
    downwards = Scale(y[1], y[2], HEIGHT - BOTTOM, TOP)
    stretched = f'width="{WIDTH - RIGHT - LEFT}" height="{HEIGHT - BOTTOM - TOP}" preserveAspectRatio="none"'
    picture = f'<image href="{uri}" x="{LEFT}" y="{TOP}" {stretched}/>'
    return svg(_axes(across, downwards, Axes(x[0], y[0])) + picture, what)
