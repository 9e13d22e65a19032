"""The figures of the paper's studies from stored rows, as PNG and PDF."""

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import FigureBase

from fedsieve.report.figures import ablation, equal_bytes, published_tables, rivals, robustness, style, sweeps, topologies
from fedsieve.report.figures.style import FigureWriter
from fedsieve.report.tables import StudyTable, metric_name
from fedsieve.studies import results
from fedsieve.studies.results import IID, NON_IID, PUBLISHED, UNCONSTRAINED, Row, group_by_label
from fedsieve.studies.scale import ScaleName

StudyRows = list[Row]
OFF_AXIS = -0.12
"""The lower end of the axis; smaller values are written there as numbers."""


def draw(name: str, scale: str, rows: StudyRows, folder: Path, table: StudyTable) -> list[Path]:
    """Draw all figures of a study and return their paths. Without a finished run there are none."""
    if not results.done_rows(rows):
        return []
    watermark = "smoke run" if scale == ScaleName.SMOKE else ""
    writer = FigureWriter(folder=folder, caption=results.describe_data(rows), watermark=watermark)
    if name in ("table-1", "table-2"):
        paper_comparison(table, name, writer)
    else:
        DRAWERS[name](rows, writer)
    return writer.paths


def paper_comparison(table: StudyTable, name: str, writer: FigureWriter) -> None:
    """Draw every cell of a table: the paper's number as a ring, the measured one as a point with its sd."""
    kinds = [("r2", "accuracy"), ("tdr", "tdr_features")]
    with writer.figure(name, 7.2, 1.2 + 0.17 * sum(e["measure"] in kinds[0] for e in table.entries)) as figure:
        panels = figure.subplots(1, 2, sharey=True)
        names = []
        for axes, kind, title in zip(panels, kinds, ("R² (LR), accuracy (LG, MC)", "TDR (MC: over feature rows)"), strict=True):
            entries = [entry for entry in table.entries if entry["measure"] in kind and entry["measured"]["mean"] is not None]
            names = [f"{style.TASK_LABELS[e['task']]}  {style.line_label(e)} ({e['target']:g})" + _skew_label(e, table) for e in entries]
            for y, entry in enumerate(entries):
                mean, sd = entry["measured"]["mean"], entry["measured"]["sd"] or 0
                colour, marker = style.line_style(entry)["color"], "s" if entry["setting"] == PUBLISHED else "o"
                axes.errorbar(mean, y, xerr=sd, fmt=marker, ms=4, color=colour, capsize=2, zorder=3)
                if mean < OFF_AXIS:
                    axes.annotate(f"◂ {mean:.1f} ± {sd:.1f}", (OFF_AXIS, y), fontsize=6.5, va="bottom")
                if entry.get("paper") is not None:
                    axes.plot(entry["paper"], y, "o", ms=7, mfc="none", color="#333333", zorder=2)
            axes.set(xlabel=title, xlim=(OFF_AXIS, 1.04))
        panels[0].set_yticks(range(len(names)), names, fontsize=6.5)
        panels[0].set_ylim(len(names) - 0.4, -0.6)
        figure.suptitle("points: measured, mean ± 1 sd over seeds (squares: as published); rings: the paper", fontsize=8.5)


def _skew_label(entry: dict[str, Any], table: StudyTable) -> str:
    return f", {'IID' if entry['skew'] == IID else 'non-IID'}" if len({e["skew"] for e in table.entries}) > 1 else ""


def draw_gates(rows: StudyRows, writer: FigureWriter) -> None:
    """Draw the expected and the test-time density per epoch, one row of panels per setting; the dotted line marks the start of scaling."""
    cases = results.label_values(results.done_rows(rows), "setting", "task")
    num_columns = len(results.label_values(results.done_rows(rows), "task"))
    num_rows = -(-len(cases) // num_columns)
    with writer.figure("gates", 7.2, 0.9 + 2.0 * num_rows) as figure:
        panels = style.create_panels(figure, num_columns, num_rows, num_used=len(cases))
        for i, (axes, (setting, task)) in enumerate(zip(panels, sorted(cases, key=lambda case: case[0]), strict=True)):
            part = results.done_rows(results.filter_rows(rows, task=task, setting=setting))
            style.plot_mean_sd(axes, part, "expected_density", label="expected, mean P(z ≠ 0)", color=style.PALETTE[0])
            style.plot_mean_sd(axes, part, "test_density", label="open test-time gates", color=style.PALETTE[1], linestyle="--")
            axes.axhline(part[0]["density"], color=style.REFERENCE_COLOUR, linewidth=0.9, label="target")
            config = part[0]["config"]
            scaling_start = config["algorithm"]["scaling_start"] * config["rounds"]
            axes.axvline(scaling_start, color=style.PALETTE[0], linestyle=":", linewidth=1.2, label="log-alpha scaling starts")
            axes.set(title=f"{style.TASK_LABELS[task]}, FLoPS {setting}", xlabel="epoch", ylim=(0, 1.03))
            if i % num_columns == 0:
                axes.set_ylabel("fraction of weights")
        style.add_legend(figure, panels, style.num_finished_seeds(rows))


def draw_heatmap(figure: FigureBase, axes: Axes, row: Row, key: str = "overlap") -> None:
    """Draw the overlap between epochs."""
    trace = row["trace"]
    first, last = trace["rounds"][0] - 0.5, trace["rounds"][-1] + 0.5
    image = axes.imshow(
        trace[key], origin="lower", cmap="cividis", vmin=0, vmax=1, extent=(first, last, first, last), interpolation="nearest"
    )
    axes.set(xlabel="epoch", ylabel="epoch")
    axes.grid(visible=False)
    label = "soft IoU of gates" if trace["kind"] == "gates" and key == "overlap" else "IoU of masks"
    figure.colorbar(image, ax=axes, shrink=0.8, label=label)


def draw_iou(rows: StudyRows, writer: FigureWriter) -> None:
    """Draw the heatmaps of the first finished seed."""
    first_rows = [results.done_rows(group)[0] for group in group_by_label(rows) if results.done_rows(group)]
    num_columns = min(len(first_rows), 2)
    num_rows = -(-len(first_rows) // num_columns)
    with writer.figure("iou", 3.6 * num_columns, 2.9 * num_rows) as figure:
        for axes, row in zip(style.create_panels(figure, num_columns, num_rows, num_used=len(first_rows)), first_rows, strict=True):
            draw_heatmap(figure, axes, row)
            axes.set_title(f"{style.line_label(row['label'])}, seed {row['seed']}")


def draw_gate_paths(figure: FigureBase, axes: Axes, row: Row) -> None:
    """Draw some gates over the epochs, the kept ones above the line."""
    trace = row["trace"]
    values, num_kept = np.array(trace["gates"]).T, trace["num_kept"]
    extent = (trace["rounds"][0] - 0.5, trace["rounds"][-1] + 0.5, len(values), 0)
    image = axes.imshow(values, aspect="auto", cmap="cividis", vmin=0, vmax=1, extent=extent, interpolation="nearest")
    axes.axhline(num_kept, color="white", linewidth=1.2)
    axes.set_yticks([num_kept / 2, (num_kept + len(values)) / 2], [f"{num_kept} kept", f"{len(values) - num_kept} others"])
    axes.set_xlabel("epoch")
    axes.grid(visible=False)
    figure.colorbar(image, ax=axes, shrink=0.9, label="gate")


def draw_test_time_gates(rows: StudyRows, writer: FigureWriter) -> None:
    """Draw individual gates over the epochs and their overlap, one row of panels per setting: the first finished seed."""
    first_rows = [results.done_rows(group)[0] for group in group_by_label(rows) if results.done_rows(group)]
    with writer.figure("test-time-gates", 7.2, 0.3 + 2.9 * len(first_rows)) as figure:
        panels = figure.subplots(len(first_rows), 2, width_ratios=(1.25, 1), squeeze=False)
        for (left, right), row in zip(panels, first_rows, strict=True):
            draw_gate_paths(figure, left, row)
            left.set_title(f"test-time gates on LR, {style.line_label(row['label'])}, seed {row['seed']}", fontsize=8.0)
            draw_heatmap(figure, right, row)
            right.set_title("overlap between epochs", fontsize=8.0)


def draw_convergence(rows: StudyRows, writer: FigureWriter) -> None:
    """Draw LR, LG, and LR over many instances, IID and non-IID. Dashed lines are settings as published."""
    panels_of_figure = [
        (task, f"{style.TASK_LABELS[task]}, non-IID", results.filter_rows(rows, part="curves", task=task)) for task in ("lr", "lg")
    ]
    for skew, title in ((IID, "IID"), (NON_IID, "non-IID")):
        instances = results.filter_rows(rows, part="instances", skew=skew)
        panels_of_figure.append(("lr", f"LR, {title}, {style.num_finished_seeds(instances)} instances", instances))
    with writer.figure("convergence", 7.2, 5.6) as figure:
        panels = style.create_panels(figure, 2, 2)
        for axes, (task, title, part) in zip(panels, panels_of_figure, strict=True):
            metric = metric_name(task, "quality")
            style.plot_curves(axes, part, metric)
            style.clip_axis(axes, part, metric)
            axes.set(title=title, xlabel="round", ylabel=style.METRIC_LABELS[metric])
        num_seeds = style.num_finished_seeds(results.filter_rows(rows, part="curves"))
        style.add_legend(figure, panels, num_seeds, 3, title=f"lines: mean of {num_seeds} seeds or of the instances; bands: ± 1 sd")


def draw_heterogeneity(rows: StudyRows, writer: FigureWriter) -> None:
    """Draw quality per round on each task: gated models, and the dense models without a constraint."""
    tasks = results.label_values(rows, "task")
    with writer.figure("heterogeneity", 7.2, 3.2) as figure:
        panels = style.create_panels(figure, len(tasks))
        for axes, task in zip(panels, tasks, strict=True):
            part, metric = results.filter_rows(rows, task=task), metric_name(task, "quality")
            dense = [row for row in part if row["label"]["algorithm"] in UNCONSTRAINED.values()]
            style.plot_curves(axes, [row for row in part if row not in dense], metric)
            for group in group_by_label(dense):
                label = group[0]["label"]
                style.plot_mean_sd(
                    axes, group, "dense_value", label=f"{style.line_label(label)}, dense", **style.line_style(label), linewidth=0.9
                )
            style.clip_axis(axes, part, metric)
            axes.set(title=f"{style.TASK_LABELS[task]}, non-IID", xlabel="round or epoch", ylabel=style.METRIC_LABELS[metric])
        style.add_legend(figure, panels, style.num_finished_seeds(rows), 3)


def draw_real_data(rows: StudyRows, writer: FigureWriter) -> None:
    """Draw one panel per data set and density."""
    cases = results.label_values(results.done_rows(rows), "task", "target")
    num_columns = min(len(cases), 3)
    num_rows = -(-len(cases) // num_columns)
    with writer.figure("real-data", max(2.5 * num_columns, 4.5), 0.9 + 2.3 * num_rows) as figure:
        panels = style.create_panels(figure, num_columns, num_rows, num_used=len(cases))
        for axes, (task, target) in zip(panels, cases, strict=True):
            part = results.done_rows(results.filter_rows(rows, task=task, target=target))
            style.plot_curves(axes, part)
            stand_in = " (stand-in)" if "stand-in" in part[0]["label"] else ""
            axes.set(
                title=f"{style.TASK_LABELS.get(task, task)}{stand_in}, {100 * target:g} % kept",
                xlabel="round",
                ylabel=style.METRIC_LABELS[part[0]["metric"]],
            )
        style.add_legend(figure, panels, style.num_finished_seeds(rows), 3)


def draw_regimes(rows: StudyRows, writer: FigureWriter) -> None:
    """Draw TDR per epoch, one panel per task and regime."""
    cases = results.label_values(rows, "task"), results.label_values(rows, "regime")
    with writer.figure("regimes", 7.2, 6.2) as figure:
        panels = style.create_panels(figure, len(cases[1]), len(cases[0]))
        for axes, (task, regime) in zip(panels, product(*cases), strict=True):
            style.plot_curves(axes, results.filter_rows(rows, task=task, regime=regime), metric_name(task, "tdr"))
            axes.set(
                title=f"{style.TASK_LABELS[task]}: {regime}",
                ylim=(0, 1.03),
                ylabel=style.METRIC_LABELS[metric_name(task, "tdr")],
                xlabel="epoch",
            )
            axes.label_outer()
            axes.title.set_fontsize(8.5)
        style.add_legend(figure, panels, style.num_finished_seeds(rows), 3)


DRAWERS: dict[str, Callable[[StudyRows, FigureWriter], None]] = {
    "gates": draw_gates,
    "iou": draw_iou,
    "learning-rates": sweeps.draw_learning_rates,
    "convergence": draw_convergence,
    "real-data": draw_real_data,
    "test-time-gates": draw_test_time_gates,
    "regimes": draw_regimes,
    "heterogeneity": draw_heterogeneity,
    "communication": sweeps.draw_communication,
    "starts": sweeps.draw_starts,
    "constraint": sweeps.draw_constraint,
    "equal-bytes": equal_bytes.draw,
    "rivals": rivals.draw,
    "robustness": robustness.draw,
    "ablation": ablation.draw,
    "tables": published_tables.draw,
    "topologies": topologies.draw,
}
