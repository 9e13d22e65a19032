"""The section about clients: examples, labels, participation and rejected replies."""

from collections import Counter

import numpy as np

from fedsieve.formatting import format_number
from fedsieve.report.html.elements import Html, PageLimits, TableData, element, figure, figure_grid, section
from fedsieve.report.html.png_encoder import heatmap_png
from fedsieve.report.html.run_record import RunRecord
from fedsieve.report.html.svg import Axes, column_chart, curve_figure, image_chart


def clients_section(run: RunRecord, limits: PageLimits) -> Html:
    """Return the section about all clients, in decreasing order of their numbers of examples."""
    known = run.run_info.get("clients", {})
    sampled = Counter(client for row in run.rows for client in row.get("cohort", ()))
    replied = Counter(client for row in run.rows for client in row.get("replied", ()))
    rejected = [(client, reason) for row in run.rows for client, reason in row.get("rejected", ())]
    num_clients = known.get("count") or run.config.get("federation", {}).get("clients", 0)
    num_empty_rounds = sum(not row.get("replied") for row in run.rows)
    description = f"{len(sampled)} of {num_clients} clients were sampled at least once. "
    description += f"{replied.total()} of {sampled.total()} replies were aggregated, {len(rejected)} were rejected."
    description += f" In {num_empty_rounds} rounds no client replied, and the model did not change." if num_empty_rounds else ""
    reasons = Counter(reason for _, reason in rejected).most_common(5)
    note = element("p", "Rejected: " + "; ".join(f"{reason} ({count} times)" for reason, count in reasons) + ".") if reasons else ""
    if "num_examples" not in known:
        return section("Clients", element("p", description), note, level=3)
    num_examples = np.array(known["num_examples"])
    order = np.argsort(-num_examples, kind="stable").tolist()
    labels = None if known.get("labels") is None else np.array(known["labels"])
    num_rejected = Counter(client for client, _ in rejected)
    columns = ["client", "examples", "rounds sampled", "rounds replied", "replies rejected", *(["labels"] if labels is not None else [])]
    rows = [
        (i, int(num_examples[i]), sampled[i], replied[i], num_rejected[i], *([int((labels[i] > 0).sum())] if labels is not None else []))
        for i in order
    ]
    x_range = (0, len(order))
    figures = [
        figure(
            "Examples of each client",
            f"{num_examples.sum()} examples; {num_examples.min()} to {num_examples.max()} per client, median {np.median(num_examples):g}.",
            column_chart(num_examples[order].tolist(), x_range, Axes("client, largest first", "examples")),
            TableData("Clients", columns, rows),
            limits,
        ),
        figure(
            "Participation of each client",
            description,
            column_chart([sampled[i] for i in order], x_range, Axes("client, largest first", "rounds"), 2),
            TableData("Participation of each client", ["client", "rounds sampled"], [(i, sampled[i]) for i in order]),
            limits,
        ),
    ]
    if labels is not None and labels.size:
        figures.append(label_figure(labels[order], order, limits))
    return section("Clients", note, figure_grid(*figures), level=3)


def privacy_section(run: RunRecord, limits: PageLimits) -> Html:
    """Return the privacy loss by round, or nothing for a run without differential privacy."""
    epsilon = run.column("epsilon")
    if not any(value is not None for value in epsilon):
        return Html("")
    assert epsilon[-1] is not None, "every round of a private run has it"
    settings = run.config["privacy"]
    description = f"Epsilon {format_number(epsilon[-1])} at delta {settings['delta']:.2g} after {len(epsilon)} rounds, "
    description += f"noise multiplier {settings['noise_multiplier']:g}. It bounds how much broadcasts and model reveal about one client. "
    description += "Client messages and this page are not protected; only the server should see them."
    axes = Axes("round", "epsilon", include_zero=True)
    return section(
        "Privacy",
        figure_grid(curve_figure("Epsilon per round", description, run.round_numbers, {"epsilon": epsilon}, axes, limits)),
        level=3,
    )


def label_figure(labels: np.ndarray, order: list[int], limits: PageLimits) -> Html:
    """Return the fraction of each label in a client's examples."""
    fractions = labels / labels.sum(1, keepdims=True).clip(1)
    axes = ("client, largest first", 0, len(fractions)), ("label", 0, labels.shape[1])
    chart = image_chart(heatmap_png(fractions.T[::-1]), *axes, "fraction of each label in the examples of each client")
    rows = [(client, *map(int, counts)) for client, counts in zip(order, labels, strict=True)]
    numbers = TableData("Examples of each label", ["client", *(f"label {i}" for i in range(labels.shape[1]))], rows)
    return figure("Labels of each client", "Dark: none of a client's examples; bright yellow: all of them.", chart, numbers, limits)
