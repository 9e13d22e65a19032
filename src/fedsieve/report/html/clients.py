"""The section about clients: examples, labels, participation and rejected replies."""

from collections import Counter

import numpy as np

from fedsieve.formatting import format_number
from fedsieve.report.html import png
from fedsieve.report.html.elements import Html, PageLimits, TableData, element, figure, figure_grid, section
from fedsieve.report.html.run_record import RunRecord
from fedsieve.report.html.svg import Axes, Line, column_chart, image_chart, line_chart


def clients_section(run: RunRecord, limits: PageLimits) -> Html:
    """Return the section about all clients, largest first."""
    known = run.run_info.get("clients", {})
    picked = Counter(client for row in run.rows for client in row.get("cohort", ()))
    replied = Counter(client for row in run.rows for client in row.get("replied", ()))
    rejected = [(client, why) for row in run.rows for client, why in row.get("rejected", ())]
    count = known.get("count") or run.config.get("federation", {}).get("clients", 0)
    asked, came = picked.total(), replied.total()
    silent = sum(not row.get("replied") for row in run.rows)
    says = f"{len(picked)} of {count} clients were asked at least once; {came} of {asked} replies counted, {len(rejected)} were rejected."
    says += f" In {silent} rounds nobody answered, and nothing changed." if silent else ""
    reasons = Counter(why for _, why in rejected)
    refused = element("p", "Rejected: " + "; ".join(f"{why} ({n} times)" for why, n in reasons.most_common(5)) + ".") if reasons else ""
    if "num_examples" not in known:
        return section("Clients", element("p", says), refused, level=3)
    rows = np.array(known["num_examples"])
    order = np.argsort(-rows, kind="stable")
    labels = None if known.get("labels") is None else np.array(known["labels"])
    bad = Counter(client for client, _ in rejected)
    columns = ["client", "rows", "rounds asked", "rounds replied", "replies rejected"] + (["labels held"] if labels is not None else [])
    table = TableData(
        "Clients",
        columns,
        [
            (int(i), int(rows[i]), picked[i], replied[i], bad[i], *([int((labels[i] > 0).sum())] if labels is not None else []))
            for i in order.tolist()
        ],
    )
    reach = (0, len(rows))
    drawn = [
        figure(
            "Rows of each client",
            f"{rows.sum()} rows; {rows.min()} to {rows.max()} a client, median {np.median(rows):g}.",
            column_chart(rows[order].tolist(), reach, Axes("client, largest first", "rows")),
            table,
            limits,
        ),
        figure(
            "Rounds each client was asked",
            says,
            column_chart([picked[i] for i in order.tolist()], reach, Axes("client, largest first", "rounds"), 2),
            TableData("Rounds each client was asked", ["client", "rounds asked"], [(i, picked[i]) for i in order.tolist()]),
            limits,
        ),
    ]
    if labels is not None and labels.size:
        drawn.append(label_figure(labels[order], order, limits))
    return section("Clients", refused, figure_grid(*drawn), level=3)


def privacy_section(run: RunRecord, limits: PageLimits) -> Html:
    """Return the privacy loss by round, or nothing for a run without differential privacy."""
    spent, rounds = run.column("epsilon"), [row["round"] for row in run.rows]
    if not any(value is not None for value in spent):
        return Html("")
    assert spent[-1] is not None, "every round of a private run has it"
    chosen = run.config["privacy"]
    says = f"Epsilon {format_number(spent[-1])} at delta {chosen['delta']:.2g} after {len(rounds)} rounds, "
    says += f"noise multiplier {chosen['noise_multiplier']:g}. "
    says += "It bounds what broadcasts and model tell of one client replaced by another; messages and this page are for the server."
    chart = line_chart([Line("epsilon", rounds, spent)], Axes("round", "epsilon", include_zero=True), max_points=limits.max_points)
    numbers = TableData("Epsilon per round", ["round", "epsilon"], list(zip(rounds, spent, strict=True)))
    return section("Privacy", figure_grid(figure("Epsilon per round", says, chart, numbers, limits)), level=3)


def label_figure(labels: np.ndarray, order: np.ndarray, limits: PageLimits) -> Html:
    """Return the fraction of each label in a client's examples."""
    share = labels / labels.sum(1, keepdims=True).clip(1)
    what = "share of each label in the rows of each client"
    axes = ("client, largest first", 0, len(share)), ("label", 0, labels.shape[1])
    rows = [(int(client), *map(int, counts)) for client, counts in zip(order, labels, strict=True)]
    numbers = TableData("Rows of each label", ["client", *(f"label {i}" for i in range(labels.shape[1]))], rows)
    says = "Dark is none, bright yellow is all of a client's rows."
    return figure("Labels of each client", says, image_chart(png.heatmap_png(share.T[::-1]), *axes, what), numbers, limits)
