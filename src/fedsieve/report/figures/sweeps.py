"""The figures of studies that vary something: rates, starts, what is sent, the constraint."""

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from fedsieve.report.figures.style import (
    ALGORITHM_LABELS,
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
from fedsieve.report.tables import group_by_label, metric_name
from fedsieve.studies import results
from fedsieve.studies.results import Row

StudyRows = list[Row]


def draw_learning_rates(rows: StudyRows, folder: Path) -> list[Path]:
    """R2 over rates; a cross at the bottom where a run failed."""
    sweeps = {"weights": "rate of the weights\n(step, or factor of Polyak's)", "gates": "rate of the gates"}
    lines = list(dict.fromkeys((row["label"]["method"], row["label"]["setting"]) for row in rows))
    with saved_figure(folder / "learning-rates", 7.2, 3.0) as made:
        panels = create_panels(made, 2)
        for axes, (sweep, title) in zip(panels, sweeps.items(), strict=True):
            for i, (colour, (method, rule)) in enumerate(zip(PALETTE, lines, strict=False)):
                cells = group_by_label(results.filter_rows(rows, sweep=sweep, method=method, setting=rule))
                _plot_sweep(axes, cells, "rate", -0.03 - 0.03 * i, color=colour, label=f"{ALGORITHM_LABELS[method]}, {rule} step")
            axes.set(xscale="log", xlabel=title, ylim=(-0.12, 1.03))
        panels[0].set_ylabel("test R², LR")
        found = {text: handle for handle, text in zip(*panels[0].get_legend_handles_labels(), strict=True)}
        seeds = num_finished_seeds(rows)
        made.legend(list(found.values()), list(found), loc="outside lower center", ncols=3, title=_legend_title(seeds), title_fontsize=8.0)
    return [folder / "learning-rates.png"]


def _legend_title(num_seeds: int) -> str:
    return f"points: mean ± 1 sd, seeds: {num_seeds}, none below -.05; crosses: a run diverged"


def _plot_sweep(axes: Axes, cells: list[StudyRows], swept_key: str, bottom: float, **style: Any) -> None:
    """Means over what is swept; a cross at the bottom where a run failed."""
    cells = sorted(cells, key=lambda group: group[0]["label"][swept_key])
    good = [(g[0]["label"][swept_key], results.mean_and_sd_over_seeds(g, "value")) for g in cells if not results.diverged_or_failed_rows(g)]
    bad = [g[0]["label"][swept_key] for g in cells if results.diverged_or_failed_rows(g)]
    means = [max(found["mean"], -0.05) for _, found in good]
    sds = [found["sd"] or 0 for _, found in good]
    axes.errorbar([place for place, _ in good], means, yerr=sds, fmt="o-", ms=3.5, capsize=2, **style)
    axes.plot(bad, [bottom] * len(bad), "x", color=style["color"])


def draw_starts(rows: StudyRows, folder: Path) -> list[Path]:
    """R2 over rho_init for each scaling rate and prune start; a cross at the bottom where a run failed."""
    methods = list(dict.fromkeys(row["label"]["method"] for row in rows))
    with saved_figure(folder / "starts", 7.2, 3.9) as made:
        panels = create_panels(made, len(methods))
        for axes, method in zip(panels, methods, strict=True):
            part = results.filter_rows(rows, method=method)
            settings = list(dict.fromkeys((row["label"]["r"], row["label"]["prune start"]) for row in part))
            for colour, (strength, prune) in zip(PALETTE, settings, strict=False):
                cells = group_by_label(results.filter_rows(part, r=strength, **{"prune start": prune}))
                bottom = -0.06 - 0.03 * settings.index((strength, prune))
                _plot_sweep(axes, cells, "start", bottom, color=colour, label=f"r = {strength:g}, from {prune:.0%} of the rounds")
            axes.set(title=ALGORITHM_LABELS[method], xlabel=r"$\rho_{init}$, from sparse to dense starts", xlim=(0, 1), ylim=(-0.2, 1.03))
            axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2))
        panels[0].set_ylabel("test R², LR")
        made.suptitle(_legend_title(num_finished_seeds(rows)), fontsize=8.0)
    return [folder / "starts.png"]


def draw_communication(rows: StudyRows, folder: Path) -> list[Path]:
    """Bytes by three counts, and quality against bytes that crossed."""
    tasks = list(dict.fromkeys(row["label"]["task"] for row in rows))
    methods = list(dict.fromkeys(row["label"]["method"] for row in rows))
    with saved_figure(folder / "communication", 7.2, 3.4) as made:
        panels = create_panels(made, len(tasks))
        for axes, task in zip(panels, tasks, strict=True):
            for i, (part, title) in enumerate(
                (("_paper_formula", "the paper's formula"), ("_payload", "payload"), ("", "wire: all that crossed"))
            ):
                parts = [results.done_rows(results.filter_rows(rows, task=task, method=method)) for method in methods]
                sent = [np.mean([r["bytes"]["up" + part] + r["bytes"]["down" + part] for r in group]) if group else 0 for group in parts]
                axes.barh(np.arange(len(methods)) + 0.27 * (i - 1), np.array(sent) / 1e6, height=0.25, color=PALETTE[i], label=title)
            axes.set_yticks(range(len(methods)), [ALGORITHM_LABELS.get(method, method) for method in methods])
            axes.set(xscale="log", xlabel="MB, up and down, all rounds", title=TASK_LABELS[task])
            axes.invert_yaxis()
            axes.grid(visible=False, axis="y")
            axes.label_outer()
        found = dict(zip(*reversed(panels[0].get_legend_handles_labels()), strict=True))
        made.legend(list(found.values()), list(found), loc="outside lower center", ncols=3)
    with saved_figure(folder / "quality-against-bytes", 7.2, 3.4) as made:
        panels = create_panels(made, len(tasks))
        for axes, task in zip(panels, tasks, strict=True):
            metric = metric_name(task, "quality")
            part = results.filter_rows(rows, task=task)
            for group in group_by_label(part):
                plot_mean_sd(axes, group, metric, x="bytes", label=line_label(group[0]["label"]), **line_style(group[0]["label"]))
            clip_axis(axes, part, metric)
            axes.set(xscale="log", xlabel="bytes that crossed, up and down", ylabel=METRIC_LABELS[metric], title=TASK_LABELS[task])
        add_legend(made, panels, num_finished_seeds(rows))
    return [folder / "communication.png", folder / "quality-against-bytes.png"]


def draw_constraint(rows: StudyRows, folder: Path) -> list[Path]:
    """For each task: density (expected solid, test-time dashed) and multiplier per round, one column a target, from both starts."""
    places = []
    for task in dict.fromkeys(row["label"]["task"] for row in rows):
        for start in ("dense", "sparse"):
            part = results.filter_rows(rows, task=task, start=start)
            place = folder / f"constraint-{task}-{start}"
            _draw_constraint_figure(part, f"{TASK_LABELS.get(task, task)}, {start} start, log-alpha scaling off", place)
            places.append(place.with_suffix(".png"))
    return places


def _draw_constraint_figure(rows: StudyRows, title: str, path: Path) -> None:
    targets = list(dict.fromkeys(row["label"]["target"] for row in rows))
    variants = list(dict.fromkeys((row["label"]["method"], row["label"]["variant"]) for row in rows))
    with saved_figure(path, 1.2 + 2.0 * len(targets), 4.6) as made:
        panels = create_panels(made, len(targets), 2)
        for i, target in enumerate(targets):
            above, below = panels[i], panels[len(targets) + i]
            for behind, (colour, (method, variant)) in enumerate(zip(PALETTE, variants, strict=False)):
                group = results.filter_rows(rows, target=target, method=method, variant=variant)
                line = {"color": colour, "zorder": 2 + 1 / (1 + behind)}  # ours on top, where several lie on one another
                plot_mean_sd(above, group, "expected_density", label=f"{ALGORITHM_LABELS[method]}: {variant}", **line)
                plot_mean_sd(above, group, "test_density", linestyle="--", **line)
                if method == "sieve" or not variant.startswith("exact"):  # where the dual is solved, FLoPS keeps no multiplier
                    plot_mean_sd(below, group, "multiplier", color=colour)
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
        add_legend(made, panels, num_finished_seeds(rows), 3)
