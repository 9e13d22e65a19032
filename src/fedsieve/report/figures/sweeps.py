"""The figures of the sweeps: learning rates, starts, bytes, and the constraint."""

from dataclasses import replace
from math import floor, log10
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from fedsieve.report.figures import style
from fedsieve.report.figures.style import FigureWriter
from fedsieve.report.tables import metric_name
from fedsieve.studies import results
from fedsieve.studies.results import BISECTION, REFERENCE_ALGORITHM, Row, group_by_label

StudyRows = list[Row]


def draw_learning_rates(rows: StudyRows, writer: FigureWriter) -> None:
    """Draw R2 over learning rates."""
    titles = {"weights": "learning rate of the weights\n(step, or factor of Polyak's)", "gates": "learning rate of the gates"}
    lines = results.label_values(rows, "algorithm", "setting")
    with writer.figure("learning-rates", 7.2, 3.0) as figure:
        panels = style.create_panels(figure, 2)
        for axes, (sweep, title) in zip(panels, titles.items(), strict=True):
            for i, (colour, (algorithm, rule)) in enumerate(zip(style.PALETTE, lines, strict=False)):
                groups = group_by_label(results.filter_rows(rows, sweep=sweep, algorithm=algorithm, setting=rule))
                _plot_sweep(axes, groups, "rate", -0.04 - 0.03 * i, color=colour, label=f"{style.ALGORITHM_LABELS[algorithm]}, {rule} step")
            axes.set(xscale="log", xlabel=title, ylim=(-0.18, 1.03))
        panels[0].set_ylabel("test R², LR")
        num_seeds = style.num_finished_seeds(rows)
        style.add_legend(figure, panels[:1], num_seeds, 3, title=_sweep_title(num_seeds))


def _sweep_title(num_seeds: int) -> str:
    return f"points: mean ± 1 sd over up to {num_seeds} seeds; triangles: mean below 0; crosses: a run diverged"


def _plot_sweep(axes: Axes, groups: list[StudyRows], swept_key: str, bottom: float, **line: Any) -> None:
    """Plot the mean of each group over a swept label; at the bottom, a cross marks a failed run and a triangle a negative mean."""
    by_value = {group[0]["label"][swept_key]: group for group in sorted(groups, key=lambda group: group[0]["label"][swept_key])}
    failed = [x for x, group in by_value.items() if results.diverged_or_failed_rows(group)]
    points = {x: results.mean_and_sd_over_seeds(group, "value") for x, group in by_value.items() if x not in failed}
    shown = {x: point for x, point in points.items() if point["mean"] is not None and point["mean"] >= 0}
    below = [x for x in points if x not in shown]
    means, sds = ([point[name] or 0.0 for point in shown.values()] for name in ("mean", "sd"))
    axes.errorbar(list(shown), means, yerr=sds, fmt="o-", ms=3.5, capsize=2, **line)
    for xs, marker in ((failed, "x"), (below, "v")):
        axes.plot(xs, [bottom] * len(xs), marker, ms=4, linestyle="none", color=line["color"])


def draw_starts(rows: StudyRows, writer: FigureWriter) -> None:
    """Draw R2 over rho_init for each setting and prune start."""
    algorithms = results.label_values(rows, "algorithm")
    with writer.figure("starts", 7.2, 3.9) as figure:
        panels = style.create_panels(figure, len(algorithms))
        for axes, algorithm in zip(panels, algorithms, strict=True):
            part = results.filter_rows(rows, algorithm=algorithm)
            settings = results.label_values(part, "setting", "prune start")
            for i, (colour, (setting, prune_start)) in enumerate(zip(style.PALETTE, settings, strict=False)):
                groups = group_by_label(results.filter_rows(part, setting=setting, **{"prune start": prune_start}))
                label = f"{setting}, scaling from {prune_start:.0%} of the rounds"
                _plot_sweep(axes, groups, "start", -0.06 - 0.03 * i, color=colour, label=label)
            xlabel = r"$\rho_{init}$, from sparse to dense starts"
            axes.set(title=style.ALGORITHM_LABELS[algorithm], xlabel=xlabel, xlim=(0, 1), ylim=(-0.2, 1.03))
            axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2))
        panels[0].set_ylabel("test R², LR")
        figure.suptitle(_sweep_title(style.num_finished_seeds(rows)), fontsize=8.0)


def draw_communication(rows: StudyRows, writer: FigureWriter) -> None:
    """Draw bytes by three counts, and quality against bytes."""
    tasks, lines = results.label_values(rows, "task"), results.label_values(rows, "algorithm", "setting")
    counts = (("_paper_formula", "the paper's formula"), ("_payload", "payload"), ("", "wire: everything that was sent"))
    with writer.figure("communication", 7.2, 3.4) as figure:
        panels = style.create_panels(figure, len(tasks))
        for axes, task in zip(panels, tasks, strict=True):
            groups = [results.filter_rows(rows, task=task, algorithm=algorithm, setting=setting) for algorithm, setting in lines]
            for i, (count, title) in enumerate(counts):
                megabytes = [(results.bytes_over_seeds(group, count)["mean"] or 0.0) / 1e6 for group in groups]
                axes.barh(np.arange(len(lines)) + 0.27 * (i - 1), megabytes, height=0.25, color=style.PALETTE[i], label=title)
            axes.set_yticks(range(len(lines)), [style.line_label({"algorithm": name, "setting": setting}) for name, setting in lines])
            axes.set(xscale="log", xlabel="MB, up and down, all rounds", title=style.TASK_LABELS[task])
            axes.invert_yaxis()
            axes.grid(visible=False, axis="y")
            axes.label_outer()
        style.add_legend(figure, panels[:1], "", 3, title="")
    with writer.figure("quality-against-bytes", 7.2, 3.4) as figure:
        panels = style.create_panels(figure, len(tasks))
        for axes, task in zip(panels, tasks, strict=True):
            metric = metric_name(task, "quality")
            part = results.filter_rows(rows, task=task)
            style.plot_quality_against_bytes(axes, part, metric, task)
        style.add_legend(figure, panels, style.num_finished_seeds(rows))


def draw_constraint(rows: StudyRows, writer: FigureWriter) -> None:
    """Draw density and multiplier per round, one figure per task and start, one column per target."""
    for task in results.label_values(rows, "task"):
        for start in ("dense", "sparse"):
            part = results.filter_rows(rows, task=task, start=start)
            title = f"{style.TASK_LABELS.get(task, task)}, {start} start, log-alpha scaling off"
            _draw_constraint_figure(part, title, f"constraint-{task}-{start}", replace(writer, caption=results.describe_data(part)))


def _draw_constraint_figure(rows: StudyRows, title: str, name: str, writer: FigureWriter) -> None:
    targets = results.label_values(rows, "target")
    variants = results.label_values(rows, "algorithm", "variant")
    colours = [colour for colour in style.PALETTE if colour != style.REFERENCE_COLOUR]
    with writer.figure(name, max(1.2 + 2.0 * len(targets), 7.2), 4.6) as figure:
        panels = style.create_panels(figure, len(targets), 2)
        for i, target in enumerate(targets):
            density_axes, multiplier_axes = panels[i], panels[len(targets) + i]
            for j, (colour, (algorithm, variant)) in enumerate(zip(colours, variants, strict=False)):
                group = results.filter_rows(rows, target=target, algorithm=algorithm, variant=variant)
                line = {"color": colour, "zorder": 2 + 1 / (1 + j)}  # sieve on top of lines that coincide
                style.plot_mean_sd(density_axes, group, "expected_density", label=f"{style.ALGORITHM_LABELS[algorithm]}: {variant}", **line)
                style.plot_mean_sd(density_axes, group, "test_density", linestyle="--", **line)
                if algorithm == REFERENCE_ALGORITHM or not variant.startswith(BISECTION):  # with bisection FLoPS keeps no multiplier
                    style.plot_mean_sd(multiplier_axes, group, "multiplier", color=colour)
            density_axes.axhline(target, color=style.REFERENCE_COLOUR, linewidth=0.9, label="target")
            density_axes.set(title=f"target {target:g}", ylim=(-target / 40, 1.3))
            style.set_symlog(density_axes, target / 10, range(floor(log10(target)), 1))
            style.set_symlog(multiplier_axes, 1e-4, (-3, -1, 1, 3))
            multiplier_axes.set_xlabel("round")
        panels[0].set_ylabel("fraction of gates")
        panels[len(targets)].set_ylabel("multiplier")
        legend = "solid: expected density, dashed: open test-time gates; multiplier of sieve and mirror ascent: a shift of log-alpha"
        figure.suptitle(f"{title}\n{legend}", fontsize=8.5)
        style.add_legend(figure, panels, style.count_seeds(group_by_label(rows)), 2)
