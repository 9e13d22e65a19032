"""What hostile clients leave of a model: quality and TDR under each mean, as a table and as figures."""

from pathlib import Path
from typing import Any

from fedsieve.report.figures.style import (
    ALGORITHM_LABELS,
    METRIC_LABELS,
    PALETTE,
    TASK_LABELS,
    add_legend,
    create_panels,
    num_finished_seeds,
    saved_figure,
)
from fedsieve.studies import results
from fedsieve.studies.results import Row

AGGREGATORS = ("weighted", "median", "trimmed", "krum", "geometric-median")
MIN_QUALITY = 0.0
"""Below this a model is worse than none; the table and the axis end here."""
MIN_KEPT_FRACTION = 0.9
"""A mean holds where it keeps this part of what the method has without hostile clients."""


def format_quality(rows: list[Row]) -> str:
    """Quality and TDR of a cell, means over seeds, the first with its sd, or that nothing is left."""
    if not rows:
        return ""
    done = results.done_rows(rows)
    value = results.mean_and_sd_over_seeds(done, "value")
    if len(done) < len(rows) or value["mean"] < MIN_QUALITY:
        return "lost"
    tdr = results.mean_and_sd_over_seeds(done, "tdr")["mean"]
    spread = "" if value["sd"] is None else f" ± {value['sd']:.2f}"
    return f"{value['mean']:.2f}{spread}" + ("" if tdr is None else f" / {tdr:.2f}")


def table_entries(rows: list[Row]) -> list[dict[str, Any]]:
    """One line a task, method, attack and share; a column a mean."""
    there = [aggregator for aggregator in AGGREGATORS if results.filter_rows(rows, aggregator=aggregator)]
    places = dict.fromkeys(
        (row["label"]["task"], row["label"]["method"], row["label"]["attack"], row["label"]["malicious"]) for row in rows
    )
    found = []
    for task, method, attack, share in sorted(places, key=lambda place: list(dict.fromkeys(p[:2] for p in places)).index(place[:2])):
        cell = results.filter_rows(rows, task=task, method=method, attack=attack, malicious=share)
        columns = {aggregator: format_quality(results.filter_rows(cell, aggregator=aggregator)) for aggregator in there}
        found.append({"task": task, "method": method, "attack": attack, "malicious": f"{share:.0%}", **columns})
    return found


def summarize(rows: list[Row]) -> str:
    """For each mean, in how many hostile cells a method keeps nine tenths of what it has under that mean among honest clients."""
    said = []
    for mean in dict.fromkeys(row["label"]["aggregator"] for row in rows):
        held, cells = 0, 0
        for task, method in dict.fromkeys((row["label"]["task"], row["label"]["method"]) for row in rows):
            part = results.filter_rows(rows, task=task, method=method, aggregator=mean)
            honest = results.mean_and_sd_over_seeds(results.filter_rows(part, attack="none"), "value")["mean"]
            for attack, share in dict.fromkeys((row["label"]["attack"], row["label"]["malicious"]) for row in part):
                if attack == "none" or honest is None:
                    continue
                group = results.filter_rows(part, attack=attack, malicious=share)
                value = results.mean_and_sd_over_seeds(group, "value")["mean"]
                cells += 1
                held += not results.diverged_or_failed_rows(group) and value is not None and value >= MIN_KEPT_FRACTION * honest
        said.append(f"{mean} {held} of {cells}")
    return f"cells that keep {MIN_KEPT_FRACTION:.0%} of the quality without hostile clients, by mean: " + ", ".join(said)


NOTE = "quality / TDR; lost: worse than predicting the mean (R² below 0 on average), or a run diverged"


def draw(rows: list[Row], folder: Path) -> list[Path]:
    """For each task: one panel a method and attack, quality over the share of hostile clients, one line a mean."""
    places = []
    for task in dict.fromkeys(row["label"]["task"] for row in rows):
        part = results.filter_rows(rows, task=task)
        methods = list(dict.fromkeys(row["label"]["method"] for row in part))
        attacks = [attack for attack in dict.fromkeys(row["label"]["attack"] for row in part) if attack != "none"]
        place = folder / f"robustness-{task}"
        with saved_figure(place, 7.2, 1.0 + 1.6 * len(methods)) as made:
            panels = create_panels(made, len(attacks), len(methods))
            for i, method in enumerate(methods):
                for j, attack in enumerate(attacks):
                    axes = panels[i * len(attacks) + j]
                    group = [row for row in results.filter_rows(part, method=method) if row["label"]["attack"] in (attack, "none")]
                    for colour, mean in zip(PALETTE, AGGREGATORS, strict=False):
                        cells = results.filter_rows(group, aggregator=mean)
                        shares = sorted({row["label"]["malicious"] for row in cells})
                        found = [_mean_and_sd(results.filter_rows(cells, malicious=share)) for share in shares]
                        if shares:
                            across = [100 * share for share in shares]
                            axes.plot(across, [value for value, _ in found], "o-", ms=3, color=colour, label=mean)
                            low, high = ([value + sign * sd for value, sd in found] for sign in (-1, 1))
                            axes.fill_between(across, low, high, color=colour, alpha=0.15, lw=0)
                    axes.set(ylim=(-0.05, 1.03), xlabel="hostile clients, %" if i == len(methods) - 1 else "")
                    axes.set_title(f"{ALGORITHM_LABELS.get(method, method)}: {attack}", fontsize=8.5)
                    axes.label_outer()
            metric = next((METRIC_LABELS[row["metric"]] for row in results.done_rows(part)), "")
            made.suptitle(f"{TASK_LABELS.get(task, task)}: {metric} by kind of attack; 0 where it is below or a run diverged", fontsize=8.5)
            add_legend(made, panels, num_finished_seeds(part), 5)
        places.append(place.with_suffix(".png"))
    return places


def _mean_and_sd(rows: list[Row]) -> tuple[float, float]:
    """The mean and sd of a cell, nothing where it is lost."""
    value = results.mean_and_sd_over_seeds(rows, "value")
    if results.diverged_or_failed_rows(rows) or value["mean"] is None or value["mean"] < MIN_QUALITY:
        return MIN_QUALITY, 0.0
    return value["mean"], value["sd"] or 0.0
