"""The overview of several runs: quality against bytes, the Pareto front, the tables of a comparison, one row per run."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedsieve.formatting import format_bytes, format_number
from fedsieve.report.html.elements import Cell, Html, PageLimits, TableData, element, figure, figure_grid, html_table, section
from fedsieve.report.html.run_record import RunRecord
from fedsieve.report.html.svg import Axes, Line, line_chart
from fedsieve.report.html.training_charts import METRIC_LABELS

Settings = dict[str, Any]


def overview_sections(
    runs: Sequence[RunRecord], limits: PageLimits, comparison: Mapping[str, Any] | None, links: Mapping[int, str]
) -> Html:
    """Return the overview by task. `links` are the anchors of the runs on the page."""
    by_task: dict[tuple[str, str], list[RunRecord]] = {}
    for run in runs:
        by_task.setdefault((run.task, run.metric), []).append(run)
    parts = [
        section(f"Quality against bytes: {task}", trade_off_figure(members, metric, limits)) for (task, metric), members in by_task.items()
    ]
    if comparison:
        parts.append(section("Comparison", *comparison_tables(comparison, PageLimits())))
    return Html("".join([*parts, section("Runs", runs_table(runs, PageLimits(), links))]))


def group_by_settings(runs: Sequence[RunRecord]) -> dict[str, list[RunRecord]]:
    """Group runs that differ only in their seed, by the name of the algorithm and the settings that distinguish the groups."""
    by_algorithm: dict[str, list[RunRecord]] = {}
    for run in runs:
        by_algorithm.setdefault(run.algorithm, []).append(run)
    out: dict[str, list[RunRecord]] = {}
    for algorithm, members in by_algorithm.items():
        settings = [flatten(run.config) for run in members]
        keys = sorted({key for options in settings for key in options})
        differing = [key for key in keys if key != "seed" and len({str(options.get(key)) for options in settings}) > 1]
        for run, options in zip(members, settings, strict=True):
            out.setdefault(", ".join([algorithm, *(f"{key} {options.get(key, 'unset')}" for key in differing[:3])]), []).append(run)
    return out


def flatten(config: Settings) -> Settings:
    """Return the settings by dotted names."""
    flat: Settings = {}
    for key, value in config.items():
        flat |= {f"{key}.{inner}": v for inner, v in value.items()} if isinstance(value, dict) else {key: value}
    return flat


def mean_curve(name: str, runs: Sequence[RunRecord], metric: str) -> Line | None:
    """Return the mean over seeds with a band of one standard deviation; unfinished runs are used only if there are no others."""
    runs = [run for run in runs if run.is_finished] or [run for run in runs if run.rows]
    if not runs:
        return None
    rounds = min(len(run.rows) for run in runs)
    x = np.mean([run.cumulative_bytes[:rounds] for run in runs], axis=0)
    y = np.array([[np.nan if v is None else v for v in run.column(metric)[:rounds]] for run in runs], dtype=float)
    mean = y.mean(0)
    band = y.std(0, ddof=1) if len(runs) > 1 else None
    edges = ((mean - band).tolist(), (mean + band).tolist()) if band is not None else ((), ())
    return Line(name, x.tolist(), mean.tolist(), *edges, has_end_marker=True)


def pareto_front(points: Mapping[str, tuple[float, float]]) -> list[str]:
    """Return the names on the Pareto front of bytes and quality, cheapest first."""
    best, names = -np.inf, []
    for name, (_, value) in sorted(points.items(), key=lambda item: (item[1][0], -item[1][1])):
        if value > best:
            names.append(name)
            best = value
    return names


def trade_off_figure(runs: Sequence[RunRecord], metric: str, limits: PageLimits) -> Html:
    """Return the chart of quality against bytes, with the Pareto front of the final values."""
    groups = group_by_settings(runs)
    lines = [line for name, members in groups.items() if (line := mean_curve(name, members, metric))]
    if not lines:
        return element("p", "No round is finished yet.")
    ends = {line.name: (line.x[-1], value) for line in lines if (value := line.y[-1]) is not None}
    front = pareto_front(ends)
    name = METRIC_LABELS.get(metric, metric)
    sizes = {len(members) for members in groups.values()}
    seeds = f"{min(sizes)} to {max(sizes)} seeds" if len(sizes) > 1 else ("one seed" if sizes == {1} else f"{sizes.pop()} seeds")
    floor = min(end[1] for end in ends.values())
    clipped = [_clip_below(line, floor - 1.5 * max(max(e[1] for e in ends.values()) - floor, 0.1)) for line in lines]
    corners = [corner for a, b in zip(front, front[1:], strict=False) for corner in ((ends[b][0], ends[a][1]), ends[b])]
    chart = line_chart(
        clipped,
        Axes("bytes sent, up and down", name, log_x=True, interactive=False),
        pareto_path=[ends[front[0]], *corners] if len(front) > 1 else [],
        max_points=limits.max_points,
    )
    description = f"Mean of {seeds}; the band is one standard deviation, markers are the last rounds. Pareto front: {', '.join(front)}."
    if any(len(short.x) < len(line.x) for short, line in zip(clipped, lines, strict=True)):
        description += " Early rounds far below are not drawn."
    rows = [(line.name, len(groups[line.name]), *ends[line.name], _final_sd(line), "yes" if line.name in front else "no") for line in lines]
    numbers = TableData(
        f"{name} and bytes after the last round", ["algorithm", "seeds", "bytes", name, "standard deviation", "on the Pareto front"], rows
    )
    return figure_grid(figure(f"{name} against bytes", description, chart, numbers, limits, wide=True))


def _clip_below(line: Line, min_value: float) -> Line:
    """Return the part of a curve that is drawn; the first rounds would compress the rest."""
    keep = [i for i, v in enumerate(line.y) if v is not None and v >= min_value]
    pick: list[Any] = [[column[i] for i in keep] if column else () for column in line[1:5]]
    low = [max(v, min_value) for v in pick[2]]
    return Line(line.name, pick[0], pick[1], low, pick[3], has_end_marker=line.has_end_marker)


def _final_sd(line: Line) -> float | None:
    if not line.high:
        return None
    high, mean = line.high[-1], line.y[-1]
    assert high is not None
    assert mean is not None
    return high - mean


def comparison_tables(result: Mapping[str, Any], limits: PageLimits) -> list[Html]:
    """Return the tables of `fedsieve compare`, from its result.json."""
    metric = METRIC_LABELS.get(result["metric"], result["metric"])
    seeds = ", ".join(map(str, result["seeds"]))
    limit = format_bytes(result["equal_bytes_limit"])
    columns = ["algorithm", "rounds", metric, "sd", f"minus {result['base']}", "95 % half-width", "TDR"]
    columns += ["bytes up", "bytes down", "by formula"]
    out = []
    for key, title in (("equal_rounds", "after all rounds"), ("equal_bytes", f"at {limit} sent, the bytes of the cheapest")):
        rows: list[list[Cell]] = []
        for name, entry in result["algorithms"].items():
            part, own = entry[key], name == result["base"]
            difference = [None, None] if own else [part["difference"], part["interval"]]
            sent = [entry["bytes_up"], entry["bytes_down"], entry["bytes_up_paper_formula"] + entry["bytes_down_paper_formula"]]
            rows.append([name, entry["rounds"], part["mean"], part["sd"], *difference, entry["tdr"]["mean"], *sent])
        out.append(html_table(TableData(f"{metric} {title} (seeds {seeds})", columns, rows), limits))
    return out


def runs_table(runs: Sequence[RunRecord], limits: PageLimits, links: Mapping[int, str]) -> Html:
    """Return a table with one row per run."""
    rows: list[list[Cell]] = []
    for i, run in enumerate(runs):
        name = element("a", run.name, href=f"#{links[i]}") if i in links else run.name
        value, sent = run.last(run.metric), int(run.cumulative_bytes[-1]) if len(run.cumulative_bytes) else 0
        density = float(run.config.get("density", 0))
        quality = None if value is None else float(value)
        rows.append([name, run.task, run.algorithm, run.seed, density, len(run.rows), quality, run.last("tdr"), sent])
    columns = ["run", "task", "algorithm", "seed", "density", "rounds", "quality", "TDR", "bytes"]
    values = [(value, run.name) for run in runs if (value := run.last(run.metric)) is not None]
    best = max(values, key=lambda pair: pair[0], default=None)
    highest = f"; the highest quality is {format_number(best[0])} ({best[1]})" if best and len({run.task for run in runs}) == 1 else ""
    return html_table(TableData(f"{len(runs)} runs{highest}", columns, rows), limits)
