"""What hostile clients leave of a model: quality and TDR under each mean, as a table and as figures."""

from pathlib import Path
from typing import Any

from fedsieve.report.figures.style import METRICS, NAMES, ORDER, TASKS, count, figure, legend, panels_of
from fedsieve.studies import results
from fedsieve.studies.results import Row

MEANS = ("weighted", "median", "trimmed", "krum", "geometric")
LOST = 0.0
"""Below this a model is worse than none; the table and the axis end here."""
HOLDS = 0.9
"""A mean holds where it keeps this part of what the method has without hostile clients."""


def shown(rows: list[Row]) -> str:
    """Quality and TDR of a cell, means over seeds, the first with its sd, or that nothing is left."""
    if not rows:
        return ""
    done = results.done(rows)
    value = results.mean_sd(done, "value")
    if len(done) < len(rows) or value["mean"] < LOST:
        return "lost"
    tdr = results.mean_sd(done, "tdr")["mean"]
    spread = "" if value["sd"] is None else f" ± {value['sd']:.2f}"
    return f"{value['mean']:.2f}{spread}" + ("" if tdr is None else f" / {tdr:.2f}")


def entries(rows: list[Row]) -> list[dict[str, Any]]:
    """One line a task, method, attack and share; a column a mean."""
    there = [mean for mean in MEANS if results.where(rows, mean=mean)]
    places = dict.fromkeys((row["label"]["task"], row["label"]["method"], row["label"]["attack"], row["label"]["hostile"]) for row in rows)
    found = []
    for task, method, attack, share in sorted(places, key=lambda place: list(dict.fromkeys(p[:2] for p in places)).index(place[:2])):
        cell = results.where(rows, task=task, method=method, attack=attack, hostile=share)
        columns = {mean: shown(results.where(cell, mean=mean)) for mean in there}
        found.append({"task": task, "method": method, "attack": attack, "hostile": f"{share:.0%}", **columns})
    return found


def verdict(rows: list[Row]) -> str:
    """For each mean, in how many hostile cells a method keeps nine tenths of what it has under that mean among honest clients."""
    said = []
    for mean in dict.fromkeys(row["label"]["mean"] for row in rows):
        held, cells = 0, 0
        for task, method in dict.fromkeys((row["label"]["task"], row["label"]["method"]) for row in rows):
            part = results.where(rows, task=task, method=method, mean=mean)
            honest = results.mean_sd(results.where(part, attack="none"), "value")["mean"]
            for attack, share in dict.fromkeys((row["label"]["attack"], row["label"]["hostile"]) for row in part):
                if attack == "none" or honest is None:
                    continue
                group = results.where(part, attack=attack, hostile=share)
                value = results.mean_sd(group, "value")["mean"]
                cells += 1
                held += not results.failures(group) and value is not None and value >= HOLDS * honest
        said.append(f"{mean} {held} of {cells}")
    return f"cells that keep {HOLDS:.0%} of the quality without hostile clients, by mean: " + ", ".join(said)


NOTE = "quality / TDR; lost: worse than predicting the mean (R² below 0 on average), or a run diverged"


def draw(rows: list[Row], folder: Path) -> list[Path]:
    """For each task: one panel a method and attack, quality over the share of hostile clients, one line a mean."""
    places = []
    for task in dict.fromkeys(row["label"]["task"] for row in rows):
        part = results.where(rows, task=task)
        methods = list(dict.fromkeys(row["label"]["method"] for row in part))
        attacks = [attack for attack in dict.fromkeys(row["label"]["attack"] for row in part) if attack != "none"]
        place = folder / f"hostile-{task}"
        with figure(place, 7.2, 1.0 + 1.6 * len(methods)) as made:
            panels = panels_of(made, len(attacks), len(methods))
            for i, method in enumerate(methods):
                for j, attack in enumerate(attacks):
                    axes = panels[i * len(attacks) + j]
                    group = [row for row in results.where(part, method=method) if row["label"]["attack"] in (attack, "none")]
                    for colour, mean in zip(ORDER, MEANS, strict=False):
                        cells = results.where(group, mean=mean)
                        shares = sorted({row["label"]["hostile"] for row in cells})
                        found = [_height(results.where(cells, hostile=share)) for share in shares]
                        if shares:
                            across = [100 * share for share in shares]
                            axes.plot(across, [value for value, _ in found], "o-", ms=3, color=colour, label=mean)
                            low, high = ([value + sign * sd for value, sd in found] for sign in (-1, 1))
                            axes.fill_between(across, low, high, color=colour, alpha=0.15, lw=0)
                    axes.set(ylim=(-0.05, 1.03), xlabel="hostile clients, %" if i == len(methods) - 1 else "")
                    axes.set_title(f"{NAMES.get(method, method)}: {attack}", fontsize=8.5)
                    axes.label_outer()
            metric = next((METRICS[row["metric"]] for row in results.done(part)), "")
            made.suptitle(f"{TASKS.get(task, task)}: {metric} by kind of attack; 0 where it is below or a run diverged", fontsize=8.5)
            legend(made, panels, count(part), 5)
        places.append(place.with_suffix(".png"))
    return places


def _height(rows: list[Row]) -> tuple[float, float]:
    """The mean and sd of a cell, nothing where it is lost."""
    value = results.mean_sd(rows, "value")
    if results.failures(rows) or value["mean"] is None or value["mean"] < LOST:
        return LOST, 0.0
    return value["mean"], value["sd"] or 0.0
