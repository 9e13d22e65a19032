"""The figures of each study from its stored rows, as PNG and PDF."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedsieve.experiments import results
from fedsieve.experiments.results import Row
from fedsieve.report.style import METRICS, NAMES, ORDER, TASKS, band, called, figure, floor, legend, look
from fedsieve.report.tables import Table, grouped, measure_of

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


def count(rows: Rows) -> int:
    """Seeds that finished."""
    return len(results.seeds_of(results.done(rows)))


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


def panels_of(made: Figure, columns: int, rows: int = 1) -> list[Axes]:
    """A grid of panels, row by row."""
    return list(made.subplots(rows, columns, squeeze=False).flat)


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


def learning_rates(rows: Rows, folder: Path) -> list[Path]:
    """R2 over rates; a cross at the bottom where a run failed."""
    sweeps = {"weights": "rate of the weights\n(step, or factor of Polyak's)", "gates": "rate of the gates"}
    rules = list(dict.fromkeys(row["label"]["setting"] for row in rows))
    with figure(folder / "learning-rates", 7.2, 3.0) as made:
        panels = panels_of(made, 2)
        for axes, (sweep, title) in zip(panels, sweeps.items(), strict=True):
            for colour, rule in zip(ORDER, rules, strict=False):
                cells = grouped(results.where(rows, sweep=sweep, setting=rule))
                cells.sort(key=lambda group: group[0]["label"]["rate"])
                good = [(g[0]["label"]["rate"], results.mean_sd(g, "value")) for g in cells if not results.failures(g)]
                bad = [g[0]["label"]["rate"] for g in cells if results.failures(g)]
                means = [max(found["mean"], -0.05) for _, found in good]
                sds = [found["sd"] or 0 for _, found in good]
                axes.errorbar([rate for rate, _ in good], means, yerr=sds, fmt="o-", ms=3.5, capsize=2, color=colour, label=f"{rule} step")
                axes.plot(bad, [-0.03 - 0.03 * rules.index(rule)] * len(bad), "x", color=colour)
            axes.set(xscale="log", xlabel=title, ylim=(-0.12, 1.03))
        panels[0].set_ylabel("test R², LR")
        found = {text: handle for handle, text in zip(*panels[0].get_legend_handles_labels(), strict=True)}
        seeds = count(rows)
        title = f"points: mean ± 1 sd, seeds: {seeds}, none below -.05; crosses: a run diverged"
        made.legend(list(found.values()), list(found), loc="outside lower center", ncols=3, title=title, title_fontsize=8.0)
    return [folder / "learning-rates.png"]


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


def communication(rows: Rows, folder: Path) -> list[Path]:
    """Bytes by three counts, and quality against bytes that crossed."""
    tasks = list(dict.fromkeys(row["label"]["task"] for row in rows))
    methods = list(dict.fromkeys(row["label"]["method"] for row in rows))
    with figure(folder / "communication", 7.2, 3.4) as made:
        panels = panels_of(made, len(tasks))
        for axes, task in zip(panels, tasks, strict=True):
            for i, (part, title) in enumerate(
                (("_formula", "the paper's formula"), ("_payload", "payload"), ("", "wire: all that crossed"))
            ):
                parts = [results.done(results.where(rows, task=task, method=method)) for method in methods]
                sent = [np.mean([r["bytes"]["up" + part] + r["bytes"]["down" + part] for r in group]) if group else 0 for group in parts]
                axes.barh(np.arange(len(methods)) + 0.27 * (i - 1), np.array(sent) / 1e6, height=0.25, color=ORDER[i], label=title)
            axes.set_yticks(range(len(methods)), [NAMES.get(method, method) for method in methods])
            axes.set(xscale="log", xlabel="MB, up and down, all rounds", title=TASKS[task])
            axes.invert_yaxis()
            axes.grid(visible=False, axis="y")
            axes.label_outer()
        found = dict(zip(*reversed(panels[0].get_legend_handles_labels()), strict=True))
        made.legend(list(found.values()), list(found), loc="outside lower center", ncols=3)
    with figure(folder / "quality-against-bytes", 7.2, 3.4) as made:
        panels = panels_of(made, len(tasks))
        for axes, task in zip(panels, tasks, strict=True):
            metric = measure_of(task, "quality")
            part = results.where(rows, task=task)
            for group in grouped(part):
                band(axes, group, metric, x="bytes", label=called(group[0]["label"]), **look(group[0]["label"]))
            floor(axes, part, metric)
            axes.set(xscale="log", xlabel="bytes that crossed, up and down", ylabel=METRICS[metric], title=TASKS[task])
        legend(made, panels, count(rows))
    return [folder / "communication.png", folder / "quality-against-bytes.png"]


def starts(rows: Rows, folder: Path) -> list[Path]:
    """R2 over rho_init for each scaling rate and prune start."""
    methods = list(dict.fromkeys(row["label"]["method"] for row in rows))
    with figure(folder / "starts", 7.2, 3.9) as made:
        for axes, method in zip(panels_of(made, len(methods)), methods, strict=True):
            part = results.where(rows, method=method)
            settings = list(dict.fromkeys((row["label"]["r"], row["label"]["prune start"]) for row in part))
            for colour, (strength, prune) in zip(ORDER, settings, strict=False):
                cells = grouped(results.where(part, r=strength, **{"prune start": prune}))
                found = [(g[0]["label"]["start"], results.mean_sd(g, "value")) for g in cells if results.done(g)]
                values = [max(f["mean"], -0.05) for _, f in found]
                style = {
                    "fmt": "o-",
                    "ms": 3.5,
                    "capsize": 2,
                    "color": colour,
                    "label": f"r = {strength:g}, from {prune:.0%} of the rounds",
                }
                axes.errorbar([s for s, _ in found], values, yerr=[f["sd"] or 0 for _, f in found], **style)
            axes.set(title=NAMES[method], xlabel=r"$\rho_{init}$, from sparse to dense starts", ylabel="test R², LR", ylim=(-0.08, 1.03))
            title = f"points: mean ± 1 sd, seeds: {count(part)}"
            axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), title=title, title_fontsize=8.0)
    return [folder / "starts.png"]


def constraint(rows: Rows, folder: Path) -> list[Path]:
    """For each task: density (expected solid, test-time dashed) and multiplier per round, one column a target, from both starts."""
    places = []
    for task in dict.fromkeys(row["label"]["task"] for row in rows):
        for start in ("dense", "sparse"):
            part = [row for row in results.where(rows, task=task) if row["label"]["start"] in (start, "its own")]
            place = folder / f"constraint-{task}-{start}"
            _constraint(part, f"{TASKS.get(task, task)}, {start} start, log-alpha scaling off", place)
            places.append(place.with_suffix(".png"))
    return places


def _constraint(rows: Rows, title: str, place: Path) -> None:
    targets = list(dict.fromkeys(row["label"]["target"] for row in rows))
    variants = list(dict.fromkeys((row["label"]["method"], row["label"]["variant"]) for row in rows))
    with figure(place, 1.2 + 2.0 * len(targets), 4.6) as made:
        panels = panels_of(made, len(targets), 2)
        for i, target in enumerate(targets):
            above, below = panels[i], panels[len(targets) + i]
            for colour, (method, variant) in zip(ORDER, variants, strict=False):
                group = results.where(rows, target=target, method=method, variant=variant)
                band(above, group, "expected_density", color=colour, label=f"{NAMES[method]}: {variant}")
                band(above, group, "test_density", color=colour, linestyle="--")
                if method == "sieve" or not variant.startswith("exact"):  # where the dual is solved, FLoPS keeps no multiplier
                    band(below, group, "multiplier", color=colour)
            above.axhline(target, color="#7A7A7A", linewidth=0.9, label="target")
            above.set_yscale("symlog", linthresh=target / 10)
            above.set(title=f"target {target:g}", ylim=(-target / 40, 1.3))
            below.set_yscale("symlog", linthresh=1e-4)
            below.set_xlabel("round")
        panels[0].set_ylabel("fraction of gates")
        panels[len(targets)].set_ylabel("multiplier")
        made.suptitle(
            f"{title}\nsolid: expected density, dashed: open test-time gates; multiplier of sieve: its shift of log-alpha", fontsize=8.5
        )
        legend(made, panels, count(rows), 3)


DRAWERS: dict[str, Callable[[Rows, Path], list[Path]]] = {
    "gates": gates,
    "iou": iou,
    "learning-rates": learning_rates,
    "convergence": convergence,
    "real-data": real_data,
    "test-time-gates": test_time_gates,
    "regimes": regimes,
    "communication": communication,
    "starts": starts,
    "constraint": constraint,
}
