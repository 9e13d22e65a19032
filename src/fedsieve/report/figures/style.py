"""One look for every figure: colours that colour-blind readers tell apart (Okabe and Ito), sizes that print well."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedsieve.studies import results
from fedsieve.studies.results import Row

ALGORITHM_COLOURS = {
    "flops": "#0072B2",
    "flops-pa": "#D55E00",
    "fed-iter-ht": "#009E73",
    "fed-avg": "#000000",
    "sieve": "#CC79A7",
    "central": "#E69F00",
    "fed-round-ht": "#56B4E9",
    "fed-ht": "#7A7A7A",
    "gradual": "#B8A800",
    "fed-l1": "#8C4B2F",
    "random-mask": "#7B5EA7",
}
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#7A7A7A")
ALGORITHM_LABELS = {"flops": "FLoPS", "flops-pa": "FLoPS-PA", "fed-iter-ht": "FedIter-HT", "fed-avg": "FedAvg", "sieve": "sieve (ours)"}
ALGORITHM_LABELS |= {
    "fed-round-ht": "Fed-Round-HT",
    "fed-ht": "Fed-HT",
    "gradual": "gradual pruning",
    "fed-l1": "L1",
    "random-mask": "random mask",
}
TASK_LABELS = {
    "lr": "LR",
    "lg": "LG",
    "mc": "MC",
    "mnist": "MNIST, softmax",
    "mnist-cnn": "MNIST, LeNet",
    "emnist": "EMNIST",
    "rcv1": "RCV1",
}
METRIC_LABELS = {
    "r2": "test R²",
    "accuracy": "test accuracy",
    "micro_f1": "test micro-F1",
    "tdr": "TDR",
    "tdr_features": "TDR over feature rows",
}
STYLE = {
    "font.size": 9.0,
    "axes.titlesize": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.5,
    "legend.frameon": False,
    "legend.fontsize": 8.0,
    "figure.dpi": 100,
    "savefig.dpi": 200,
    "pdf.fonttype": 42,
}


@contextmanager
def saved_figure(path: Path, width: float, height: float) -> Iterator[Figure]:
    """A figure that is saved as PNG and PDF when it is finished; the same rows give the same bytes."""
    with mpl.rc_context(STYLE):
        made = Figure(figsize=(width, height), layout="constrained")
        yield made
        for suffix, metadata in ((".png", {"Software": None}), (".pdf", {"CreationDate": None})):
            made.savefig(path.with_suffix(suffix), metadata=metadata)


def line_label(label: dict[str, Any]) -> str:
    """A line's name: the method, and its setting where there are several."""
    name, setting = ALGORITHM_LABELS.get(label["method"], label["method"]), label.get("setting")
    return f"Central {name}" if setting == "central" else f"{name}, {setting}" if label["method"] == "fed-iter-ht" and setting else name


def line_style(label: dict[str, Any]) -> dict[str, Any]:
    """A line's colour and dashes: a method keeps its colour everywhere, settings as published are dashed."""
    kind = "central" if label.get("setting") == "central" else label["method"]
    return {"color": ALGORITHM_COLOURS.get(kind, "#7A7A7A"), "linestyle": "--" if label.get("setting") == "as published" else "-"}


def plot_mean_sd(axes: Axes, rows: Sequence[Row], name: str, *, x: str = "round", **style: Any) -> int:
    """The mean of a curve over seeds with a band of one sd; how many seeds there were."""
    there = [row for row in results.done_rows(rows) if results.get_curve(row, name) is not None]
    if not there:
        return 0
    shortest = min(len(row["curves"][x]) for row in there)
    values = np.array([row["curves"][name][:shortest] for row in there], dtype=float)
    places = np.array([row["curves"][x][:shortest] for row in there], dtype=float).mean(0)
    mean = values.mean(0)
    axes.plot(places, mean, **style)
    if len(there) > 1:
        sd = values.std(0, ddof=1)
        axes.fill_between(places, mean - sd, mean + sd, color=style.get("color"), alpha=0.18, linewidth=0)
    return len(there)


def add_legend(figure: Figure, axes: Sequence[Axes], num_seeds: int | str, num_columns: int = 4) -> None:
    """One legend below all panels, which names the band; seeds in words where panels differ in them."""
    found = {text: handle for ax in axes for handle, text in zip(*ax.get_legend_handles_labels(), strict=True)}
    title = f"lines: mean of {num_seeds} seeds; bands: ± 1 sd" if num_seeds not in (0, 1) else "lines: one seed"
    figure.legend(list(found.values()), list(found), loc="outside lower center", ncols=num_columns, title=title, title_fontsize=8.0)


def clip_axis(axes: Axes, rows: Sequence[Row], name: str) -> None:
    """Do not let a bad first rounds squeeze what matters: the axis begins no lower than -.05."""
    lowest = min(
        (value for row in results.done_rows(rows) for value in results.get_curve(row, name) or () if value is not None), default=0.0
    )
    if lowest < -0.05:
        axes.set_ylim(bottom=-0.05)


def num_finished_seeds(rows: Sequence[Row]) -> int:
    """Seeds that finished."""
    return len(results.distinct_seeds(results.done_rows(rows)))


def create_panels(figure: Figure, num_columns: int, num_rows: int = 1) -> list[Axes]:
    """A grid of panels, row by row."""
    return list(figure.subplots(num_rows, num_columns, squeeze=False).flat)
