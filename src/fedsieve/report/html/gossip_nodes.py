"""The section about the nodes of a run without a server: their values, their agreement, and what they sent."""

from fedsieve.formatting import format_bytes, format_number
from fedsieve.report.html.elements import Html, PageLimits, figure_grid, section
from fedsieve.report.html.run_record import RunRecord
from fedsieve.report.html.svg import Axes, curve_figure
from fedsieve.report.html.training_charts import METRIC_LABELS


def nodes_section(run: RunRecord, limits: PageLimits) -> Html | None:
    """Return the charts of single nodes; None for a run with a server."""
    worst, mean = run.column("worst_node"), run.column("mean_node")
    measured = [i for i, value in enumerate(worst) if value is not None]
    if not measured:
        return None
    metric, last = METRIC_LABELS.get(run.metric, run.metric), measured[-1]
    values = curve_figure(
        f"{metric} of single nodes",
        f"Worst node {format_number(worst[last] or 0)}, mean of all nodes {format_number(mean[last] or 0)}, after round {last + 1}.",
        [run.round_numbers[i] for i in measured],
        {"worst node": [worst[i] for i in measured], "mean of all nodes": [mean[i] for i in measured]},
        Axes("round", metric),
        limits,
    )
    agreement, busiest = run.column("support_agreement"), run.total("busiest_node_bytes")
    supports = curve_figure(
        "Agreement on the support",
        f"Mean overlap (IoU) of two nodes' supports, last {format_number(agreement[-1] or 0)}. A node sent and received "
        f"{format_bytes(run.total('node_bytes'))}, the busiest at most {format_bytes(busiest)}.",
        run.round_numbers,
        {"support agreement": agreement},
        Axes("round", "IoU", include_zero=True),
        limits,
    )
    return section("Nodes", figure_grid(values, supports), level=3)
