"""The figures of each study from its stored rows, as PNG and PDF."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedsieve.report.figures import ablation, equal_bytes, robustness, sweeps
from fedsieve.report.figures.style import METRICS, ORDER, TASKS, band, called, count, figure, floor, legend, look, panels_of
from fedsieve.report.tables import Table, grouped, measure_of
from fedsieve.studies import results
from fedsieve.studies.results import Row

Rows = list[Row]
BEYOND = -0.12
"""Where the axis of R2 begins; what lies below it is written there."""


def draw(name: str, rows: Rows, folder: Path, table: Table) -> list[Path]:
    """All figures of a study; none where nothing was finished."""
    if not results.done(rows):
        return []
    if name in ("table-1", "table-2"):
        beside_the_paper(table, folder / name)
        return [folder / f"{name}.png"]
    return DRAWERS[name](rows, folder)


def lines(axes: Axes, rows: Rows, name: str | None = None) -> None:
    """One line a cell, of the metric or of another curve."""
    for group in grouped(rows):
        metric = name or next((row["metric"] for row in results.done(group)), "")
        band(axes, group, metric, label=called(group[0]["label"]), **look(group[0]["label"]))


def beside_the_paper(table: Table, place: Path) -> None:
    """Every cell of a table: the paper's number as a ring, ours as a point with its sd."""
    kinds = [("r2", "accuracy"), ("tdr", "tdr_rows")]
    with figure(place, 7.2, 1.2 + 0.17 * sum(e["measure"] in kinds[0] for e in table.entries)) as made:
        panels = made.subplots(1, 2, sharey=True)
        names = []
        for axes, kind, title in zip(panels, kinds, ("R² (LR), accuracy (LG, MC)", "TDR (MC: over feature rows)"), strict=True):
            entries = [entry for entry in table.entries if entry["measure"] in kind and entry["measured"]["mean"] is not None]
            names = [f"{TASKS[e['task']]}  {called(e)} ({e['target']:g})" + _where(e, table) for e in entries]
            for y, entry in enumerate(entries):
                found = entry["measured"]
                axes.errorbar(
                    found["mean"], y, xerr=found["sd"] or 0, fmt=_mark(entry), ms=4, color=look(entry)["color"], capsize=2, zorder=3
                )
                if found["mean"] < BEYOND:
                    axes.annotate(f"◂ {found['mean']:.1f} ± {found['sd'] or 0:.1f}", (BEYOND, y), fontsize=6.5, va="bottom")
                if entry.get("paper") is not None:
                    axes.plot(entry["paper"], y, "o", ms=7, mfc="none", color="#333333", zorder=2)
            axes.set(xlabel=title, xlim=(BEYOND, 1.04))
        panels[0].set_yticks(range(len(names)), names, fontsize=6.5)
        panels[0].set_ylim(len(names) - 0.4, -0.6)
        made.suptitle("points: measured, mean ± 1 sd over seeds (squares: as published); rings: the paper", fontsize=8.5)


def _mark(entry: dict[str, Any]) -> str:
    return "s" if entry["setting"] == "as published" else "o"


def _where(entry: dict[str, Any], table: Table) -> str:
    return f", {'IID' if entry['skew'] == 'iid' else 'non-IID'}" if len({e["skew"] for e in table.entries}) > 1 else ""


def gates(rows: Rows, folder: Path) -> list[Path]:
    """Density per epoch, as expected and at test time; the dotted line is where scaling begins."""
    tasks = list(dict.fromkeys(row["label"]["task"] for row in rows))
    with figure(folder / "gates", 7.2, 2.8) as made:
        panels = panels_of(made, len(tasks))
        for axes, task in zip(panels, tasks, strict=True):
            part = results.where(rows, task=task)
            band(axes, part, "expected_density", label="expected, mean P(z ≠ 0)", color=ORDER[0])
            band(axes, part, "test_density", label="open test-time gates", color=ORDER[1], linestyle="--")
            axes.axhline(part[0]["density"], color="#7A7A7A", linewidth=0.9, label="target")
            begin = part[0]["config"]["algorithm"]["prune_start"] * part[0]["config"]["rounds"]
            axes.axvline(begin, color=ORDER[0], linestyle=":", linewidth=1.2, label="log-alpha scaling begins")
            axes.set(title=TASKS[task], xlabel="epoch", ylim=(0, 1.03))
        panels[0].set_ylabel("fraction of weights")
        legend(made, panels, count(rows))
    return [folder / "gates.png"]


def heat(made: Figure, axes: Axes, row: Row, key: str = "overlap") -> None:
    """Overlap between epochs."""
    trace = row["trace"]
    first, last = trace["rounds"][0] - 0.5, trace["rounds"][-1] + 0.5
    image = axes.imshow(
        trace[key], origin="lower", cmap="cividis", vmin=0, vmax=1, extent=(first, last, first, last), interpolation="nearest"
    )
    axes.set(xlabel="epoch", ylabel="epoch")
    axes.grid(visible=False)
    made.colorbar(
        image, ax=axes, shrink=0.8, label="soft IoU of gates" if trace["kind"] == "gates" and key == "overlap" else "IoU of masks"
    )


def iou(rows: Rows, folder: Path) -> list[Path]:
    """Maps of the first seed."""
    cells = [results.done(group)[0] for group in grouped(rows) if results.done(group)]
    with figure(folder / "iou", 3.3 * len(cells), 3.0) as made:
        for axes, row in zip(panels_of(made, len(cells)), cells, strict=True):
            heat(made, axes, row)
            axes.set_title(f"{called(row['label'])}, seed {row['seed']}")
    return [folder / "iou.png"]


def test_time_gates(rows: Rows, folder: Path) -> list[Path]:
    """Gates one by one through the epochs, and their overlap."""
    row = results.done(rows)[0]
    trace = row["trace"]
    with figure(folder / "test-time-gates", 7.2, 3.2) as made:
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
        heat(made, right, row)
        right.set_title("overlap between epochs")
    return [folder / "test-time-gates.png"]


def convergence(rows: Rows, folder: Path) -> list[Path]:
    """LR, LG, and LR over many instances."""
    with figure(folder / "convergence", 7.2, 3.3) as made:
        panels = panels_of(made, 3)
        for axes, task in zip(panels, ("lr", "lg"), strict=False):
            part = results.where(rows, part="curves", task=task)
            lines(axes, part)
            metric = measure_of(task, "quality")
            floor(axes, part, metric)
            axes.set(title=f"{TASKS[task]}, non-IID", xlabel="round", ylabel=METRICS[metric])
        many = results.where(rows, part="instances")
        for group in grouped(many):
            label, style = group[0]["label"], look(group[0]["label"])
            style["linestyle"] = "--" if label["skew"] == "non-iid" else "-"
            style["alpha"] = 0.55 if label["setting"] == "as published" else 1.0
            band(panels[2], group, "r2", **style)
        panels[2].plot([], [], color="#7A7A7A", label="right panel: IID")
        panels[2].plot([], [], color="#7A7A7A", linestyle="--", label="right panel: non-IID")
        floor(panels[2], many, "r2")
        panels[2].set(title=f"LR, {count(many)} instances", xlabel="round", ylabel=METRICS["r2"])
        legend(made, panels, count(results.where(rows, part="curves")), 3)
    return [folder / "convergence.png"]


def real_data(rows: Rows, folder: Path) -> list[Path]:
    """One panel a data set and density."""
    cells = list(dict.fromkeys((row["label"]["task"], row["label"]["target"]) for row in results.done(rows)))
    wide = min(len(cells), 3)
    with figure(folder / "real-data", max(2.5 * wide, 4.5), 0.9 + 2.3 * -(-len(cells) // wide)) as made:
        panels = panels_of(made, wide, -(-len(cells) // wide))
        for axes, (task, target) in zip(panels, cells, strict=False):
            part = results.done(results.where(rows, task=task, target=target))
            lines(axes, part)
            stand_in = " (stand-in)" if "stand-in" in part[0]["label"] else ""
            axes.set(title=f"{TASKS.get(task, task)}{stand_in}, {100 * target:g} % kept", xlabel="round", ylabel=METRICS[part[0]["metric"]])
        for axes in panels[len(cells) :]:
            axes.remove()
        legend(made, panels[: len(cells)], count(rows), 3)
    return [folder / "real-data.png"]


def regimes(rows: Rows, folder: Path) -> list[Path]:
    """Nine panels of TDR per epoch."""
    tasks, kinds = (list(dict.fromkeys(row["label"][key] for row in rows)) for key in ("task", "regime"))
    with figure(folder / "regimes", 7.2, 6.2) as made:
        panels = panels_of(made, len(kinds), len(tasks))
        for axes, (task, regime) in zip(panels, ((task, regime) for task in tasks for regime in kinds), strict=True):
            lines(axes, results.where(rows, task=task, regime=regime), measure_of(task, "tdr"))
            axes.set(title=f"{TASKS[task]}: {regime}", ylim=(0, 1.03), ylabel=METRICS[measure_of(task, "tdr")], xlabel="epoch")
            axes.label_outer()
            axes.title.set_fontsize(8.5)
        legend(made, panels, count(rows), 3)
    return [folder / "regimes.png"]


DRAWERS: dict[str, Callable[[Rows, Path], list[Path]]] = {
    "gates": gates,
    "iou": iou,
    "learning-rates": sweeps.learning_rates,
    "convergence": convergence,
    "real-data": real_data,
    "test-time-gates": test_time_gates,
    "regimes": regimes,
    "communication": sweeps.communication,
    "starts": sweeps.starts,
    "constraint": sweeps.constraint,
    "equal-bytes": equal_bytes.draw,
    "hostile": robustness.draw,
    "ablation": ablation.draw,
}
