"""Charts as SVG: lines, columns, stacked bars, images with axes. Colours are the classes s0, s1, ... of page.css."""

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

from fedsieve.formatting import format_bytes
from fedsieve.report.html.axis import AxisScale, format_tick, value_range
from fedsieve.report.html.elements import Html, PageLimits, TableData, downsample, element, figure

WIDTH, HEIGHT = 480, 270
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 16, 44
NUM_COLOURS = 8
INTEGER_AXES = {"round", "rounds"}
MARKER_SHAPES = (
    "M-5,0a5,5 0 1,0 10,0a5,5 0 1,0 -10,0",
    "M-5,-5h10v10h-10z",
    "M0,-6l6,11h-12z",
    "M0,-7l6,7l-6,7l-6,-7z",
    "M-6,-5h12l-6,11z",
)
"""Markers of end points, so that series differ not only by colour."""


class Line(NamedTuple):
    """A curve, optionally with a band and a marker at its end."""

    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    low: Sequence[float | None] = ()
    high: Sequence[float | None] = ()
    has_end_marker: bool = False


class Mark(NamedTuple):
    """A dashed reference line with a label."""

    value: float
    label: str


class Axes(NamedTuple):
    """The names and scales of both axes."""

    x_label: str
    y_label: str
    log_x: bool = False
    log_y: bool = False
    include_zero: bool = False
    interactive: bool = True
    """whether the page shows the numbers of the table at the pointer"""


def line_chart(
    lines: Sequence[Line],
    axes: Axes,
    *,
    horizontal_marks: Sequence[Mark] = (),
    vertical_marks: Sequence[Mark] = (),
    pareto_path: Sequence[tuple[float, float]] = (),
    max_points: int = 400,
) -> Html:
    """Return curves over a shared axis, with reference lines, and a dashed path along the Pareto front."""
    xs = [v for line in lines for v in line.x]
    ys = [v for line in lines for v in (*line.y, *line.low, *line.high) if v is not None and (v > 0 or not axes.log_y)]
    x = AxisScale(*value_range(xs), LEFT, WIDTH - RIGHT, axes.log_x and min(xs, default=0) > 0)
    low, high = value_range([*ys, *(mark.value for mark in horizontal_marks)], include_zero=axes.include_zero)
    margin = 0 if axes.log_y else 0.04 * (high - low)
    y = AxisScale(low if axes.include_zero and low == 0 else low - margin, high + margin, HEIGHT - BOTTOM, TOP, axes.log_y)
    shapes = [_axes_svg(x, y, axes)]
    shapes += [f'<path class="ref" d="M{LEFT},{y(mark.value):.1f}H{WIDTH - RIGHT}"/>' for mark in horizontal_marks]
    shapes += [f'<path class="ref" d="M{x(mark.value):.1f},{TOP}V{HEIGHT - BOTTOM}"/>' for mark in vertical_marks]
    shapes += [_curve_svg(line, i, x, y, max_points) for i, line in enumerate(lines)]
    for mark in horizontal_marks:
        shapes.append(f'<text class="ref" x="{WIDTH - RIGHT}" y="{y(mark.value) - 5:.1f}" text-anchor="end">{escape(mark.label)}</text>')
    for i, mark in enumerate(vertical_marks):
        anchor, gap = ("end", -5) if x(mark.value) > 0.7 * WIDTH else ("start", 5)
        position = f'x="{x(mark.value) + gap:.1f}" y="{TOP + 14 + 16 * i}" text-anchor="{anchor}"'
        shapes.append(f'<text class="ref" {position}>{escape(mark.label)}</text>')
    if pareto_path:
        shapes.append(f'<path class="ref front" d="M{"L".join(f"{x(a):.1f},{y(b):.1f}" for a, b in pareto_path)}"/>')
    scale = "log" if x.is_log else "linear"
    attributes = f' tabindex="0" data-x0="{x.low:.9g}" data-x1="{x.high:.9g}" data-scale="{scale}"' if axes.interactive else ""
    names = [line.name for line in lines]
    has_markers = any(line.has_end_marker for line in lines)
    alt_text = f"{axes.y_label} against {axes.x_label}: {', '.join(names)}"
    chart = svg_element("".join(shapes), alt_text, attributes=attributes)
    return Html((legend(names, markers=has_markers) if len(names) > 1 or has_markers else "") + chart)


def curve_figure(
    title: str,
    description: str,
    x: Sequence[float],
    columns: Mapping[str, Sequence[Any]],
    axes: Axes,
    limits: PageLimits,
    *,
    curves: Mapping[str, Sequence[float | None]] | None = None,
    horizontal_marks: Sequence[Mark] = (),
    vertical_marks: Sequence[Mark] = (),
) -> Html:
    """Return the figure of `curves` (default: the columns) over `x`, with a table of the columns."""
    lines = [Line(name, x, values) for name, values in (curves or columns).items()]
    chart = line_chart(lines, axes, horizontal_marks=horizontal_marks, vertical_marks=vertical_marks, max_points=limits.max_points)
    rows = list(zip(x, *columns.values(), strict=True))
    return figure(title, description, chart, TableData(title, [axes.x_label, *columns], rows), limits)


def _curve_svg(line: Line, index: int, x: AxisScale, y: AxisScale, max_points: int) -> str:
    colour = f"s{index % NUM_COLOURS}"
    out = ""
    if line.low:
        band = [p for p in zip(line.x, line.low, line.high, strict=True) if _is_drawable(p[1], y) and _is_drawable(p[2], y)]
        if band := downsample(band, max_points):
            outline = [(a, low) for a, low, _ in band] + [(a, high) for a, _, high in reversed(band)]
            out += f'<path class="band {colour}" d="M{"L".join(f"{x(a):.1f},{y(b):.1f}" for a, b in outline)}z"/>'
    points = downsample([(a, b) for a, b in zip(line.x, line.y, strict=True) if _is_drawable(b, y)], max_points)
    if not points:
        return out
    path = "L".join(f"{x(a):.1f},{y(b):.1f}" for a, b in points)
    out += f'<path class="line {colour} d{index % NUM_COLOURS}" d="M{path}{"h.1" if len(points) == 1 else ""}"/>'
    if line.has_end_marker:
        a, b = points[-1]
        hint = f"<title>{escape(line.name)}: {b:.5g} at {a:.5g}</title>"
        shape = MARKER_SHAPES[index % len(MARKER_SHAPES)]
        out += f'<path class="dot {colour}" transform="translate({x(a):.1f},{y(b):.1f})" d="{shape}">{hint}</path>'
    return out


def _is_drawable(value: float | None, axis: AxisScale) -> bool:
    return value is not None and math.isfinite(value) and (value > 0 or not axis.is_log)


def _axes_svg(x: AxisScale, y: AxisScale, axes: Axes) -> str:
    out = []
    for value in axis_ticks(y, axes.y_label):
        out.append(f'<path class="grid" d="M{LEFT},{y(value):.1f}H{WIDTH - RIGHT}"/>')
        out.append(f'<text x="{LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{format_tick(value)}</text>')
    floor = HEIGHT - BOTTOM
    for value in axis_ticks(x, axes.x_label):
        out.append(f'<path class="grid" d="M{x(value):.1f},{floor}v4"/>')
        out.append(f'<text x="{x(value):.1f}" y="{floor + 18}" text-anchor="middle">{format_tick(value)}</text>')
    out.append(f'<path class="axis" d="M{LEFT},{floor}H{WIDTH - RIGHT}"/>')
    out.append(f'<text class="name" x="{WIDTH - RIGHT}" y="{HEIGHT - 8}" text-anchor="end">{escape(axes.x_label)}</text>')
    out.append(f'<text class="name" x="2" y="11">{escape(axes.y_label)}</text>')
    return "".join(out)


def axis_ticks(axis: AxisScale, label: str) -> list[float]:
    """Return the ticks of an axis; rounds have integer ticks."""
    return [value for value in axis.ticks() if label not in INTEGER_AXES or value == int(value)]


def svg_element(content: str, alt_text: str, *, height: int = HEIGHT, attributes: str = "") -> Html:
    """Return an SVG with its text alternative."""
    label = escape(alt_text)
    return Html(f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{label}" class="chart"{attributes}>{content}</svg>')


def legend(names: Sequence[str], *, filled: bool = False, markers: bool = False) -> Html:
    """Return the legend of lines, or of filled areas."""
    items = []
    for i, name in enumerate(names):
        colour = f"s{i % NUM_COLOURS}"
        sample = f'<path class="line {colour} d{i % NUM_COLOURS}" d="M0,7H26"/>'
        if filled:
            sample = f'<rect class="fill {colour}" width="14" height="14" x="6"/>'
        if markers:
            sample += f'<path class="dot {colour}" transform="translate(13,7)" d="{MARKER_SHAPES[i % len(MARKER_SHAPES)]}"/>'
        items.append(element("li", Html(f'<svg viewBox="0 0 26 14" aria-hidden="true">{sample}</svg>'), name))
    return element("ul", *items, class_="legend")


def column_chart(values: Sequence[float], x_range: tuple[float, float], axes: Axes, colour: int = 0) -> Html:
    """Return a column chart over [low, high]; a logarithmic axis starts at one half."""
    x = AxisScale(*x_range, LEFT, WIDTH - RIGHT)
    base = 0.5 if axes.log_y else 0.0
    y = AxisScale(base, max([*values, 1.0 if axes.log_y else 1e-12]) * 1.05, HEIGHT - BOTTOM, TOP, axes.log_y)
    width = (WIDTH - RIGHT - LEFT) / max(len(values), 1)
    path = "".join(
        f"M{LEFT + i * width:.2f},{HEIGHT - BOTTOM}V{y(value):.1f}h{width * (0.9 if width > 3 else 1):.2f}V{HEIGHT - BOTTOM}z"
        for i, value in enumerate(values)
        if value > base
    )
    return svg_element(_axes_svg(x, y, axes) + f'<path class="fill s{colour}" d="{path}"/>', f"{axes.y_label} against {axes.x_label}")


def stacked_bar_chart(bars: Sequence[tuple[str, Sequence[float]]], parts: Sequence[str], alt_text: str) -> Html:
    """Return stacked horizontal bars of bytes with their sums."""
    largest = max((sum(values) for _, values in bars), default=0) or 1.0
    x = AxisScale(0, largest, 0, WIDTH - 78)
    out = []
    for row, (name, values) in enumerate(bars):
        top = 18 + row * 44
        out.append(f'<text x="0" y="{top}">{escape(name)}</text>')
        total = 0.0
        for i, value in enumerate(values):
            if value > 0:
                hint = f"<title>{escape(name)}, {escape(parts[i])}: {format_bytes(value)}</title>"
                out.append(f'<rect class="fill s{i}" x="{x(total):.1f}" y="{top + 5}" width="{x(value):.2f}" height="16">{hint}</rect>')
            total += value
        out.append(f'<text x="{x(total) + 6:.1f}" y="{top + 18}">{format_bytes(total)}</text>')
    chart = svg_element("".join(out), alt_text, height=18 + 44 * len(bars))
    return Html((legend(parts, filled=True) if len(parts) > 1 else "") + chart)


def image_chart(uri: str, x_axis: tuple[str, float, float], y_axis: tuple[str, float, float], alt_text: str) -> Html:
    """Return an image with axes, its first row on top; an axis is (name, first, last)."""
    x = AxisScale(x_axis[1], x_axis[2], LEFT, WIDTH - RIGHT)
    y = AxisScale(y_axis[1], y_axis[2], HEIGHT - BOTTOM, TOP)
    size = f'width="{WIDTH - RIGHT - LEFT}" height="{HEIGHT - BOTTOM - TOP}" preserveAspectRatio="none"'
    image = f'<image href="{uri}" x="{LEFT}" y="{TOP}" {size}/>'
    return svg_element(_axes_svg(x, y, Axes(x_axis[0], y_axis[0])) + image, alt_text)
