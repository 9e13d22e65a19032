"""The figures of each study from its stored rows, as PNG and PDF."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedsieve.report.figures import ablation, equal_bytes, robustness, sweeps
from fedsieve.report.figures.style import (
    METRIC_LABELS,
    PALETTE,
    TASK_LABELS,
    add_legend,
    clip_axis,
    create_panels,
    line_label,
    line_style,
    num_finished_seeds,
    plot_mean_sd,
    saved_figure,
)
from fedsieve.report.tables import StudyTable, group_by_label, metric_name
from fedsieve.studies import results
from fedsieve.studies.results import Row

StudyRows = list[Row]
OFF_AXIS = -0.12
"""Where the axis of R2 begins; what lies below it is written there."""


def draw(name: str, rows: StudyRows, folder: Path, table: StudyTable) -> list[Path]:
    """All figures of a study; none where nothing was finished."""
    if not results.done_rows(rows):
        return []
    if name in ("table-1", "table-2"):
        paper_comparison(table, folder / name)
        return [folder / f"{name}.png"]
    return DRAWERS[name](rows, folder)


def plot_curves(axes: Axes, rows: StudyRows, name: str | None = None) -> None:
    """One line a cell, of the metric or of another curve."""
    for group in group_by_label(rows):
        metric = name or next((row["metric"] for row in results.done_rows(group)), "")
        plot_mean_sd(axes, group, metric, label=line_label(group[0]["label"]), **line_style(group[0]["label"]))


def paper_comparison(table: StudyTable, path: Path) -> None:
    """Every cell of a table: the paper's number as a ring, ours as a point with its sd."""
    kinds = [("r2", "accuracy"), ("tdr", "tdr_features")]
    with saved_figure(path, 7.2, 1.2 + 0.17 * sum(e["measure"] in kinds[0] for e in table.entries)) as made:
        panels = made.subplots(1, 2, sharey=True)
        names = []
        for axes, kind, title in zip(panels, kinds, ("R² (LR), accuracy (LG, MC)", "TDR (MC: over feature rows)"), strict=True):
            entries = [entry for entry in table.entries if entry["measure"] in kind and entry["measured"]["mean"] is not None]
            names = [f"{TASK_LABELS[e['task']]}  {line_label(e)} ({e['target']:g})" + _skew_label(e, table) for e in entries]
            for y, entry in enumerate(entries):
                found = entry["measured"]
                axes.errorbar(
                    found["mean"], y, xerr=found["sd"] or 0, fmt=_marker(entry), ms=4, color=line_style(entry)["color"], capsize=2, zorder=3
                )
                if found["mean"] < OFF_AXIS:
                    axes.annotate(f"◂ {found['mean']:.1f} ± {found['sd'] or 0:.1f}", (OFF_AXIS, y), fontsize=6.5, va="bottom")
                if entry.get("paper") is not None:
                    axes.plot(entry["paper"], y, "o", ms=7, mfc="none", color="#333333", zorder=2)
            axes.set(xlabel=title, xlim=(OFF_AXIS, 1.04))
        panels[0].set_yticks(range(len(names)), names, fontsize=6.5)
        panels[0].set_ylim(len(names) - 0.4, -0.6)
        made.suptitle("points: measured, mean ± 1 sd over seeds (squares: as published); rings: the paper", fontsize=8.5)


def _marker(entry: dict[str, Any]) -> str:
    return "s" if entry["setting"] == "as published" else "o"


def _skew_label(entry: dict[str, Any], table: StudyTable) -> str:
    return f", {'IID' if entry['skew'] == 'iid' else 'non-IID'}" if len({e["skew"] for e in table.entries}) > 1 else ""


def draw_gates(rows: StudyRows, folder: Path) -> list[Path]:
    """Density per epoch, as expected and at test time; the dotted line is where scaling begins."""
    tasks = list(dict.fromkeys(row["label"]["task"] for row in rows))
    with saved_figure(folder / "gates", 7.2, 2.8) as made:
        panels = create_panels(made, len(tasks))
        for axes, task in zip(panels, tasks, strict=True):
            part = results.filter_rows(rows, task=task)
            plot_mean_sd(axes, part, "expected_density", label="expected, mean P(z ≠ 0)", color=PALETTE[0])
            plot_mean_sd(axes, part, "test_density", label="open test-time gates", color=PALETTE[1], linestyle="--")
            axes.axhline(part[0]["density"], color="#7A7A7A", linewidth=0.9, label="target")
            begin = part[0]["config"]["algorithm"]["scaling_start"] * part[0]["config"]["rounds"]
            axes.axvline(begin, color=PALETTE[0], linestyle=":", linewidth=1.2, label="log-alpha scaling begins")
            axes.set(title=TASK_LABELS[task], xlabel="epoch", ylim=(0, 1.03))
        panels[0].set_ylabel("fraction of weights")
        add_legend(made, panels, num_finished_seeds(rows))
    return [folder / "gates.png"]


def draw_heatmap(figure: Figure, axes: Axes, row: Row, key: str = "overlap") -> None:
    """Overlap between epochs."""
    trace = row["trace"]
    first, last = trace["rounds"][0] - 0.5, trace["rounds"][-1] + 0.5
    image = axes.imshow(
        trace[key], origin="lower", cmap="cividis", vmin=0, vmax=1, extent=(first, last, first, last), interpolation="nearest"
    )
    axes.set(xlabel="epoch", ylabel="epoch")
    axes.grid(visible=False)
    figure.colorbar(
        image, ax=axes, shrink=0.8, label="soft IoU of gates" if trace["kind"] == "gates" and key == "overlap" else "IoU of masks"
    )


def draw_iou(rows: StudyRows, folder: Path) -> list[Path]:
    """Maps of the first seed."""
    cells = [results.done_rows(group)[0] for group in group_by_label(rows) if results.done_rows(group)]
    with saved_figure(folder / "iou", 3.3 * len(cells), 3.0) as made:
        for axes, row in zip(create_panels(made, len(cells)), cells, strict=True):
            draw_heatmap(made, axes, row)
            axes.set_title(f"{line_label(row['label'])}, seed {row['seed']}")
    return [folder / "iou.png"]


def draw_test_time_gates(rows: StudyRows, folder: Path) -> list[Path]:
    """Gates one by one through the epochs, and their overlap."""
    row = results.done_rows(rows)[0]
    trace = row["trace"]
    with saved_figure(folder / "test-time-gates", 7.2, 3.2) as made:
        left, right = made.subplots(1, 2, width_ratios=(1.25, 1))
        values = np.array(trace["gates"]).T
        extent = (trace["rounds"][0] - 0.5, trace["rounds"][-1] + 0.5, len(values), 0)
        image = left.imshow(values, aspect="auto", cmap="cividis", vmin=0, vmax=1, extent=extent, interpolation="nearest")
        left.axhline(trace["kept"], color="white", linewidth=1.2)
        left.set_yticks(
            [trace["kept"] / 2, (trace["kept"] + len(values)) / 2], [f"{trace['kept']} kept", f"{len(values) - trace['kept']} others"]
        )
        left.set(xlabel="epoch", title=f"test-time gates, FLoPS on LR, seed {row['seed']}")
        left.grid(visible=False)
        made.colorbar(image, ax=left, shrink=0.9, label="gate")
        draw_heatmap(made, right, row)
        right.set_title("overlap between epochs")
    return [folder / "test-time-gates.png"]


def draw_convergence(rows: StudyRows, folder: Path) -> list[Path]:
    """LR, LG, and LR over many instances."""
    with saved_figure(folder / "convergence", 7.2, 3.3) as made:
        panels = create_panels(made, 3)
        for axes, task in zip(panels, ("lr", "lg"), strict=False):
            part = results.filter_rows(rows, part="curves", task=task)
            plot_curves(axes, part)
            metric = metric_name(task, "quality")
            clip_axis(axes, part, metric)
            axes.set(title=f"{TASK_LABELS[task]}, non-IID", xlabel="round", ylabel=METRIC_LABELS[metric])
        many = results.filter_rows(rows, part="instances")
        for group in group_by_label(many):
            label, style = group[0]["label"], line_style(group[0]["label"])
            style["linestyle"] = "--" if label["skew"] == "non-iid" else "-"
            style["alpha"] = 0.55 if label["setting"] == "as published" else 1.0
            plot_mean_sd(panels[2], group, "r2", **style)
        panels[2].plot([], [], color="#7A7A7A", label="right panel: IID")
        panels[2].plot([], [], color="#7A7A7A", linestyle="--", label="right panel: non-IID")
        clip_axis(panels[2], many, "r2")
        panels[2].set(title=f"LR, {num_finished_seeds(many)} instances", xlabel="round", ylabel=METRIC_LABELS["r2"])
        add_legend(made, panels, num_finished_seeds(results.filter_rows(rows, part="curves")), 3)
    return [folder / "convergence.png"]


def draw_real_data(rows: StudyRows, folder: Path) -> list[Path]:
    """One panel a data set and density."""
    cells = list(dict.fromkeys((row["label"]["task"], row["label"]["target"]) for row in results.done_rows(rows)))
    wide = min(len(cells), 3)
    with saved_figure(folder / "real-data", max(2.5 * wide, 4.5), 0.9 + 2.3 * -(-len(cells) // wide)) as made:
        panels = create_panels(made, wide, -(-len(cells) // wide))
        for axes, (task, target) in zip(panels, cells, strict=False):
            part = results.done_rows(results.filter_rows(rows, task=task, target=target))
            plot_curves(axes, part)
            stand_in = " (stand-in)" if "stand-in" in part[0]["label"] else ""
            axes.set(
                title=f"{TASK_LABELS.get(task, task)}{stand_in}, {100 * target:g} % kept",
                xlabel="round",
                ylabel=METRIC_LABELS[part[0]["metric"]],
            )
        for axes in panels[len(cells) :]:
            axes.remove()
        add_legend(made, panels[: len(cells)], num_finished_seeds(rows), 3)
    return [folder / "real-data.png"]


def draw_regimes(rows: StudyRows, folder: Path) -> list[Path]:
    """Nine panels of TDR per epoch."""
    tasks, kinds = (list(dict.fromkeys(row["label"][key] for row in rows)) for key in ("task", "regime"))
    with saved_figure(folder / "regimes", 7.2, 6.2) as made:
        panels = create_panels(made, len(kinds), len(tasks))
        for axes, (task, regime) in zip(panels, ((task, regime) for task in tasks for regime in kinds), strict=True):
            plot_curves(axes, results.filter_rows(rows, task=task, regime=regime), metric_name(task, "tdr"))
            axes.set(title=f"{TASK_LABELS[task]}: {regime}", ylim=(0, 1.03), ylabel=METRIC_LABELS[metric_name(task, "tdr")], xlabel="epoch")
            axes.label_outer()
            axes.title.set_fontsize(8.5)
        add_legend(made, panels, num_finished_seeds(rows), 3)
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
