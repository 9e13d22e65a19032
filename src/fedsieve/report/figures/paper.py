"""The figures of the paper's studies from stored rows, as PNG and PDF."""

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedsieve.report.figures import ablation, equal_bytes, robustness, style, sweeps
from fedsieve.report.tables import StudyTable, metric_name
from fedsieve.studies import results
from fedsieve.studies.results import IID, NON_IID, PUBLISHED, Row, group_by_label

StudyRows = list[Row]
OFF_AXIS = -0.12
"""The lower end of the axis; smaller values are written there as numbers."""


def draw(name: str, rows: StudyRows, folder: Path, table: StudyTable) -> list[Path]:
    """Draw all figures of a study and return their paths. Without a finished run there are none."""
    if not results.done_rows(rows):
        return []
    if name in ("table-1", "table-2"):
        paper_comparison(table, folder / name)
        return [folder / f"{name}.png"]
    return DRAWERS[name](rows, folder)


def paper_comparison(table: StudyTable, path: Path) -> None:
    """Draw every cell of a table: the paper's number as a ring, the measured one as a point with its sd."""
    kinds = [("r2", "accuracy"), ("tdr", "tdr_features")]
    with style.saved_figure(path, 7.2, 1.2 + 0.17 * sum(e["measure"] in kinds[0] for e in table.entries)) as figure:
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


def draw_gates(rows: StudyRows, folder: Path) -> list[Path]:
    """Draw the expected and the test-time density per epoch; the dotted line marks the start of log-alpha scaling."""
    tasks = results.label_values(rows, "task")
    with style.saved_figure(folder / "gates", 7.2, 2.8) as figure:
        panels = style.create_panels(figure, len(tasks))
        for axes, task in zip(panels, tasks, strict=True):
            part = results.filter_rows(rows, task=task)
            style.plot_mean_sd(axes, part, "expected_density", label="expected, mean P(z ≠ 0)", color=style.PALETTE[0])
            style.plot_mean_sd(axes, part, "test_density", label="open test-time gates", color=style.PALETTE[1], linestyle="--")
            axes.axhline(part[0]["density"], color=style.REFERENCE_COLOUR, linewidth=0.9, label="target")
            config = part[0]["config"]
            scaling_start = config["algorithm"]["scaling_start"] * config["rounds"]
            axes.axvline(scaling_start, color=style.PALETTE[0], linestyle=":", linewidth=1.2, label="log-alpha scaling starts")
            axes.set(title=style.TASK_LABELS[task], xlabel="epoch", ylim=(0, 1.03))
        panels[0].set_ylabel("fraction of weights")
        style.add_legend(figure, panels, style.num_finished_seeds(rows))
    return [folder / "gates.png"]


def draw_heatmap(figure: Figure, axes: Axes, row: Row, key: str = "overlap") -> None:
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


def draw_iou(rows: StudyRows, folder: Path) -> list[Path]:
    """Draw the heatmaps of the first finished seed."""
    first_rows = [results.done_rows(group)[0] for group in group_by_label(rows) if results.done_rows(group)]
    with style.saved_figure(folder / "iou", 3.3 * len(first_rows), 3.0) as figure:
        for axes, row in zip(style.create_panels(figure, len(first_rows)), first_rows, strict=True):
            draw_heatmap(figure, axes, row)
            axes.set_title(f"{style.line_label(row['label'])}, seed {row['seed']}")
    return [folder / "iou.png"]


def draw_test_time_gates(rows: StudyRows, folder: Path) -> list[Path]:
    """Draw individual gates over the epochs, and their overlap."""
    row = results.done_rows(rows)[0]
    trace = row["trace"]
    with style.saved_figure(folder / "test-time-gates", 7.2, 3.2) as figure:
        left, right = figure.subplots(1, 2, width_ratios=(1.25, 1))
        values = np.array(trace["gates"]).T
        extent = (trace["rounds"][0] - 0.5, trace["rounds"][-1] + 0.5, len(values), 0)
        image = left.imshow(values, aspect="auto", cmap="cividis", vmin=0, vmax=1, extent=extent, interpolation="nearest")
        num_kept = trace["num_kept"]
        left.axhline(num_kept, color="white", linewidth=1.2)
        left.set_yticks([num_kept / 2, (num_kept + len(values)) / 2], [f"{num_kept} kept", f"{len(values) - num_kept} others"])
        left.set(xlabel="epoch", title=f"test-time gates, FLoPS on LR, seed {row['seed']}")
        left.grid(visible=False)
        figure.colorbar(image, ax=left, shrink=0.9, label="gate")
        draw_heatmap(figure, right, row)
        right.set_title("overlap between epochs")
    return [folder / "test-time-gates.png"]


def draw_convergence(rows: StudyRows, folder: Path) -> list[Path]:
    """Draw LR, LG, and LR over many instances."""
    with style.saved_figure(folder / "convergence", 7.2, 3.3) as figure:
        panels = style.create_panels(figure, 3)
        for axes, task in zip(panels, ("lr", "lg"), strict=False):
            part = results.filter_rows(rows, part="curves", task=task)
            style.plot_curves(axes, part)
            metric = metric_name(task, "quality")
            style.clip_axis(axes, part, metric)
            axes.set(title=f"{style.TASK_LABELS[task]}, non-IID", xlabel="round", ylabel=style.METRIC_LABELS[metric])
        instances = results.filter_rows(rows, part="instances")
        for group in group_by_label(instances):
            label = group[0]["label"]
            line = style.line_style(label) | {"linestyle": "--" if label["skew"] == NON_IID else "-"}
            style.plot_mean_sd(panels[2], group, "r2", alpha=0.55 if label["setting"] == PUBLISHED else 1.0, **line)
        panels[2].plot([], [], color=style.REFERENCE_COLOUR, label="right panel: IID")
        panels[2].plot([], [], color=style.REFERENCE_COLOUR, linestyle="--", label="right panel: non-IID")
        style.clip_axis(panels[2], instances, "r2")
        panels[2].set(title=f"LR, {style.num_finished_seeds(instances)} instances", xlabel="round", ylabel=style.METRIC_LABELS["r2"])
        style.add_legend(figure, panels, style.num_finished_seeds(results.filter_rows(rows, part="curves")), 3)
    return [folder / "convergence.png"]


def draw_real_data(rows: StudyRows, folder: Path) -> list[Path]:
    """Draw one panel per data set and density."""
    cases = results.label_values(results.done_rows(rows), "task", "target")
    num_columns = min(len(cases), 3)
    num_rows = -(-len(cases) // num_columns)
    with style.saved_figure(folder / "real-data", max(2.5 * num_columns, 4.5), 0.9 + 2.3 * num_rows) as figure:
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
    return [folder / "real-data.png"]


def draw_regimes(rows: StudyRows, folder: Path) -> list[Path]:
    """Draw TDR per epoch, one panel per task and regime."""
    cases = results.label_values(rows, "task"), results.label_values(rows, "regime")
    with style.saved_figure(folder / "regimes", 7.2, 6.2) as figure:
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
    return [folder / "regimes.png"]


DRAWERS: dict[str, Callable[[StudyRows, Path], list[Path]]] = {
    "gates": draw_gates,
    "iou": draw_iou,
    "learning-rates": sweeps.draw_learning_rates,
    "convergence": draw_convergence,
    "real-data": draw_real_data,
    "test-time-gates": draw_test_time_gates,
    "regimes": draw_regimes,
    "communication": sweeps.draw_communication,
    "starts": sweeps.draw_starts,
    "constraint": sweeps.draw_constraint,
    "equal-bytes": equal_bytes.draw,
    "robustness": robustness.draw,
    "ablation": ablation.draw,
}
