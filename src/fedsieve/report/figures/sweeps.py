"""The figures of studies that vary something: rates, starts, what is sent, the constraint."""

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from fedsieve.report.figures.style import METRICS, NAMES, ORDER, TASKS, band, called, count, figure, floor, legend, look, panels_of
from fedsieve.report.tables import grouped, measure_of
from fedsieve.studies import results
from fedsieve.studies.results import Row

Rows = list[Row]


def learning_rates(rows: Rows, folder: Path) -> list[Path]:
    """R2 over rates; a cross at the bottom where a run failed."""
    sweeps = {"weights": "rate of the weights\n(step, or factor of Polyak's)", "gates": "rate of the gates"}
    lines = list(dict.fromkeys((row["label"]["method"], row["label"]["setting"]) for row in rows))
    with figure(folder / "learning-rates", 7.2, 3.0) as made:
        panels = panels_of(made, 2)
        for axes, (sweep, title) in zip(panels, sweeps.items(), strict=True):
            for i, (colour, (method, rule)) in enumerate(zip(ORDER, lines, strict=False)):
                cells = grouped(results.where(rows, sweep=sweep, method=method, setting=rule))
                _swept(axes, cells, "rate", -0.03 - 0.03 * i, color=colour, label=f"{NAMES[method]}, {rule} step")
            axes.set(xscale="log", xlabel=title, ylim=(-0.12, 1.03))
        panels[0].set_ylabel("test R², LR")
        found = {text: handle for handle, text in zip(*panels[0].get_legend_handles_labels(), strict=True)}
        seeds = count(rows)
        made.legend(list(found.values()), list(found), loc="outside lower center", ncols=3, title=_points(seeds), title_fontsize=8.0)
    return [folder / "learning-rates.png"]


def _points(seeds: int) -> str:
    return f"points: mean ± 1 sd, seeds: {seeds}, none below -.05; crosses: a run diverged"


def _swept(axes: Axes, cells: list[Rows], along: str, bottom: float, **style: Any) -> None:
    """Means over what is swept; a cross at the bottom where a run failed."""
    cells = sorted(cells, key=lambda group: group[0]["label"][along])
    good = [(g[0]["label"][along], results.mean_sd(g, "value")) for g in cells if not results.failures(g)]
    bad = [g[0]["label"][along] for g in cells if results.failures(g)]
    means = [max(found["mean"], -0.05) for _, found in good]
    sds = [found["sd"] or 0 for _, found in good]
    axes.errorbar([place for place, _ in good], means, yerr=sds, fmt="o-", ms=3.5, capsize=2, **style)
    axes.plot(bad, [bottom] * len(bad), "x", color=style["color"])


def starts(rows: Rows, folder: Path) -> list[Path]:
    """R2 over rho_init for each scaling rate and prune start; a cross at the bottom where a run failed."""
    methods = list(dict.fromkeys(row["label"]["method"] for row in rows))
    with figure(folder / "starts", 7.2, 3.9) as made:
        panels = panels_of(made, len(methods))
        for axes, method in zip(panels, methods, strict=True):
            part = results.where(rows, method=method)
            settings = list(dict.fromkeys((row["label"]["r"], row["label"]["prune start"]) for row in part))
            for colour, (strength, prune) in zip(ORDER, settings, strict=False):
                cells = grouped(results.where(part, r=strength, **{"prune start": prune}))
                bottom = -0.06 - 0.03 * settings.index((strength, prune))
                _swept(axes, cells, "start", bottom, color=colour, label=f"r = {strength:g}, from {prune:.0%} of the rounds")
            axes.set(title=NAMES[method], xlabel=r"$\rho_{init}$, from sparse to dense starts", xlim=(0, 1), ylim=(-0.2, 1.03))
            axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2))
        panels[0].set_ylabel("test R², LR")
        made.suptitle(_points(count(rows)), fontsize=8.0)
    return [folder / "starts.png"]


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


def constraint(rows: Rows, folder: Path) -> list[Path]:
    """For each task: density (expected solid, test-time dashed) and multiplier per round, one column a target, from both starts."""
    places = []
    for task in dict.fromkeys(row["label"]["task"] for row in rows):
        for start in ("dense", "sparse"):
            part = results.where(rows, task=task, start=start)
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
            for behind, (colour, (method, variant)) in enumerate(zip(ORDER, variants, strict=False)):
                group = results.where(rows, target=target, method=method, variant=variant)
                line = {"color": colour, "zorder": 2 + 1 / (1 + behind)}  # ours on top, where several lie on one another
                band(above, group, "expected_density", label=f"{NAMES[method]}: {variant}", **line)
                band(above, group, "test_density", linestyle="--", **line)
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
            f"{title}\nsolid: expected density, dashed: open test-time gates; multiplier of sieve and natural ascent: a shift of log-alpha",
            fontsize=8.5,
        )
        legend(made, panels, count(rows), 3)
