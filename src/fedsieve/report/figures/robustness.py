"""Table and figures of the robustness study: quality and TDR with malicious clients, under each aggregator."""

from math import inf
from typing import Any

from fedsieve.report.figures import style
from fedsieve.report.figures.style import FigureWriter
from fedsieve.studies import results
from fedsieve.studies.results import NO_ATTACK, WEIGHTED_MEAN, Row

MIN_QUALITY = 0.0
"""A model below this is worse than none; it is shown as lost, and the axis ends here."""
MAX_LOSS = 0.02
"""An aggregator is robust in a case if it loses at most this against the weighted mean without malicious clients."""
NOTE = "quality / TDR; lost: worse than predicting the mean (R² below 0 on average), or a run diverged"


def is_lost(rows: list[Row]) -> bool:
    """Return whether a run did not finish or the mean quality is worse than none."""
    mean = results.mean_over_seeds(rows, "value")
    return bool(results.diverged_or_failed_rows(rows)) or mean is None or mean < MIN_QUALITY


def format_quality(rows: list[Row]) -> str:
    """Return quality with its sd and TDR, means over seeds, or "lost"."""
    if not rows:
        return ""
    if is_lost(rows):
        return "lost"
    value, tdr = results.mean_and_sd_over_seeds(rows, "value"), results.mean_over_seeds(rows, "tdr")
    sd = "" if value["sd"] is None else f" ± {value['sd']:.2f}"
    return f"{value['mean']:.2f}{sd}" + ("" if tdr is None else f" / {tdr:.2f}")


def table_entries(rows: list[Row]) -> list[dict[str, Any]]:
    """Return one entry per task, algorithm, attack and malicious fraction, with a column per aggregator."""
    aggregators = results.label_values(rows, "aggregator")
    entries = []
    for task, algorithm in results.label_values(rows, "task", "algorithm"):
        group = results.filter_rows(rows, task=task, algorithm=algorithm)
        for attack, fraction in results.label_values(group, "attack", "malicious"):
            case = results.filter_rows(group, attack=attack, malicious=fraction)
            columns = {name: format_quality(results.filter_rows(case, aggregator=name)) for name in aggregators}
            entries.append({"task": task, "algorithm": algorithm, "attack": attack, "malicious": f"{fraction:.0%}", **columns})
    return entries


def summarize(rows: list[Row]) -> str:
    """Return for each aggregator in how many cases it loses little, and where it loses most, of the quality without malicious clients.

    The quality is that of the weighted mean: a robust aggregator also loses what it costs without malicious clients.
    """
    counts = []
    for aggregator in results.label_values(rows, "aggregator"):
        losses = {}
        for task, algorithm in results.label_values(rows, "task", "algorithm"):
            group = results.filter_rows(rows, task=task, algorithm=algorithm)
            honest = results.mean_over_seeds(results.filter_rows(group, attack=NO_ATTACK, aggregator=WEIGHTED_MEAN), "value")
            for attack, fraction in results.label_values(group, "attack", "malicious"):
                case = results.filter_rows(group, attack=attack, malicious=fraction, aggregator=aggregator)
                if attack != NO_ATTACK and honest is not None and case:
                    value = results.mean_over_seeds(case, "value")
                    losses[f"{task}, {algorithm}, {attack} {fraction:.0%}"] = inf if is_lost(case) or value is None else honest - value
        num_robust = sum(loss <= MAX_LOSS for loss in losses.values())
        worst = max(losses, key=lambda name: losses[name], default=None)
        claim = "" if worst is None or num_robust == len(losses) else f" (worst: {worst}, {_format_loss(losses[worst])})"
        counts.append(f"{aggregator} {num_robust} of {len(losses)}{claim}")
    return f"cases that lose at most {MAX_LOSS:g} against the weighted mean without malicious clients, by aggregator: " + ", ".join(counts)


def _format_loss(loss: float) -> str:
    return "lost" if loss == inf else f"{loss:.2f} below"


def draw(rows: list[Row], writer: FigureWriter) -> None:
    """Draw one figure per task: a panel per algorithm and attack, quality over the malicious fraction, one line per aggregator."""
    for task in results.label_values(rows, "task"):
        part = results.filter_rows(rows, task=task)
        algorithms = results.label_values(part, "algorithm")
        attacks = [attack for attack in results.label_values(part, "attack") if attack != NO_ATTACK]
        with writer.figure(f"robustness-{task}", max(7.2, 1.6 * len(attacks)), 1.0 + 1.6 * len(algorithms)) as figure:
            panels = style.create_panels(figure, len(attacks), len(algorithms))
            cases = [(algorithm, attack) for algorithm in algorithms for attack in attacks]
            for axes, (algorithm, attack) in zip(panels, cases, strict=True):
                group = [row for row in results.filter_rows(part, algorithm=algorithm) if row["label"]["attack"] in (attack, NO_ATTACK)]
                for colour, aggregator in zip(style.PALETTE, results.label_values(rows, "aggregator"), strict=False):
                    line = results.filter_rows(group, aggregator=aggregator)
                    fractions = sorted(results.label_values(line, "malicious"))
                    percent = [100 * fraction for fraction in fractions]
                    points = [_mean_and_sd(results.filter_rows(line, malicious=fraction)) for fraction in fractions]
                    axes.plot(percent, [mean for mean, _ in points], "o-", ms=3, color=colour, label=aggregator)
                    low, high = ([mean + sign * sd for mean, sd in points] for sign in (-1, 1))
                    axes.fill_between(percent, low, high, color=colour, alpha=0.15, lw=0)
                axes.set(ylim=(-0.05, 1.03), xlabel="malicious clients, %" if algorithm == algorithms[-1] else "")
                axes.set_title(f"{style.ALGORITHM_LABELS.get(algorithm, algorithm)}: {attack}", fontsize=8.5)
                axes.label_outer()
            metric = next((style.METRIC_LABELS[row["metric"]] for row in results.done_rows(part)), "")
            title = f"{style.TASK_LABELS.get(task, task)}: {metric} by kind of attack; 0 if it is negative or a run diverged"
            figure.suptitle(title, fontsize=8.5)
            style.add_legend(figure, panels, style.num_finished_seeds(part), 5)


def _mean_and_sd(rows: list[Row]) -> tuple[float, float]:
    """Return mean and sd of a case, the lower end of the axis if it is lost."""
    value = results.mean_and_sd_over_seeds(rows, "value")
    return (MIN_QUALITY, 0.0) if is_lost(rows) else (value["mean"] or 0.0, value["sd"] or 0.0)
