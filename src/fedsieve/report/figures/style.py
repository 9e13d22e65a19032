"""The style of all figures: colours that colour-blind readers can distinguish (Okabe and Ito), and sizes for print."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from textwrap import fill
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure, FigureBase

from fedsieve.storage.run_directory import atomic_write
from fedsieve.studies import results
from fedsieve.studies.results import CENTRAL, PUBLISHED, Row

ALGORITHM_COLOURS = {
    "flops": "#0072B2",
    "flops-pa": "#D55E00",
    "fed-iter-ht": "#009E73",
    "fed-avg": "#000000",
    "sieve": "#CC79A7",
    CENTRAL: "#E69F00",
    "fed-round-ht": "#56B4E9",
    "fed-ht": "#7A7A7A",
    "gradual": "#B8A800",
    "fed-l1": "#8C4B2F",
    "random-mask": "#7B5EA7",
    "sign-ht": "#F0A3C8",
    "ssfl": "#3E7C3A",
    "fed-dst": "#8FB339",
    "eden": "#3B3B98",
    "fed-ef": "#3B7D8C",
    "stc": "#A8324A",
}
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#7A7A7A", "#B8A800", "#8C4B2F")
CAPTION_CHARACTERS_PER_INCH, CAPTION_LINE_INCHES = 20, 0.13
REFERENCE_COLOUR = "#7A7A7A"
"""The colour of reference lines and of everything without a colour of its own."""
ALGORITHM_LABELS = {
    "flops": "FLoPS",
    "flops-pa": "FLoPS-PA",
    "fed-iter-ht": "FedIter-HT",
    "fed-avg": "FedAvg",
    "fed-sgd": "FedSGD",
    "sieve": "sieve (ours)",
    "fed-round-ht": "Fed-Round-HT",
    "fed-ht": "Fed-HT",
    "gradual": "gradual pruning",
    "fed-l1": "L1",
    "random-mask": "random mask",
    "sign-ht": "Sign-HT",
    "ssfl": "SSFL",
    "fed-dst": "FedDST",
    "eden": "EDEN",
    "fed-ef": "Fed-EF",
    "stc": "STC",
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
SEVERAL_SETTINGS = ("flops", "flops-pa", "fed-iter-ht")
"""Algorithms that are shown in several settings."""
METRIC_LABELS = {
    "r2": "test R²",
    "accuracy": "test accuracy",
    "micro_f1": "test micro-F1",
    "tdr": "TDR",
    "tdr_features": "TDR over feature rows",
}
STYLE: dict[Any, Any] = {
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


@dataclass(kw_only=True)
class FigureWriter:
    """Saves figures in a folder as PNG and PDF, each with the same caption. The same rows give the same bytes."""

    folder: Path
    caption: str = ""
    """text below every figure: the data"""
    watermark: str = ""
    """text across every figure"""
    paths: list[Path] = field(default_factory=list)
    """PNG files written so far"""

    @contextmanager
    def figure(self, name: str, width: float, height: float) -> Iterator[FigureBase]:
        """Yield an empty figure, then save it with watermark and caption."""
        caption = fill(self.caption, round(CAPTION_CHARACTERS_PER_INCH * width))
        below = CAPTION_LINE_INCHES * (1 + caption.count("\n"))
        with mpl.rc_context(STYLE):
            whole = Figure(figsize=(width, height + below), layout="constrained")
            drawn, bottom = whole.subfigures(2, 1, squeeze=False, height_ratios=(height, below)).flat
            yield drawn
            bottom.text(0.5, 0.5, caption, ha="center", va="center", fontsize=6.5, color="#555555")
            if self.watermark:
                style: dict[str, Any] = {"ha": "center", "va": "center", "rotation": 20, "zorder": 100}
                whole.text(0.5, 0.55, self.watermark, fontsize=7 * width, color="#B00020", alpha=0.22, **style)
            self.save(whole, name)

    def save(self, figure: Figure, name: str) -> None:
        """Write the two files of a figure."""
        for suffix, metadata in ((".png", {"Software": None}), (".pdf", {"CreationDate": None})):
            save_figure(figure, self.folder / f"{name}{suffix}", metadata=metadata)
        self.paths.append(self.folder / f"{name}.png")


def save_figure(figure: Figure, path: Path, **options: Any) -> None:
    """Write a figure atomically, in the format of the path's suffix (default: PNG)."""
    content = BytesIO()
    figure.savefig(content, format=path.suffix.removeprefix(".") or "png", **options)
    atomic_write(path, content.getvalue())


def line_label(label: Mapping[str, Any]) -> str:
    """Return the name of a line: the algorithm, and the setting if there are several."""
    algorithm: str = label["algorithm"]
    setting = label.get("setting")
    name = ALGORITHM_LABELS.get(algorithm, algorithm)
    if setting == CENTRAL:
        return f"Central {name}"
    return f"{name}, {setting}" if algorithm in SEVERAL_SETTINGS and setting else name


def line_style(label: Mapping[str, Any]) -> dict[str, Any]:
    """Return colour and dashes of a line. An algorithm has one colour in all figures; published settings are dashed."""
    setting = label.get("setting")
    colour = ALGORITHM_COLOURS.get(CENTRAL if setting == CENTRAL else label["algorithm"], REFERENCE_COLOUR)
    return {"color": colour, "linestyle": "--" if setting == PUBLISHED else "-"}


def plot_mean_sd(axes: Axes, rows: Sequence[Row], name: str, *, x: str = "round", **style: Any) -> None:
    """Plot the mean of a curve over seeds with a band of one standard deviation."""
    rows = [row for row in results.done_rows(rows) if results.get_curve(row, name) is not None]
    if not rows:
        return
    shortest = min(len(row["curves"][x]) for row in rows)
    values = np.array([row["curves"][name][:shortest] for row in rows], dtype=float)
    positions = np.array([row["curves"][x][:shortest] for row in rows], dtype=float).mean(0)
    mean = values.mean(0)
    axes.plot(positions, mean, **style)
    if len(rows) > 1:
        sd = values.std(0, ddof=1)
        axes.fill_between(positions, mean - sd, mean + sd, color=style.get("color"), alpha=0.18, linewidth=0)


def plot_curves(axes: Axes, rows: Sequence[Row], name: str | None = None, *, x: str = "round") -> None:
    """Plot one line per condition, of the metric or of another curve."""
    for group in results.group_by_label(rows):
        label = group[0]["label"]
        metric = name or next((row["metric"] for row in results.done_rows(group)), "")
        plot_mean_sd(axes, group, metric, x=x, label=line_label(label), **line_style(label))


def plot_quality_against_bytes(axes: Axes, rows: Sequence[Row], metric: str, task: str) -> None:
    """Plot the metric of each condition against the bytes of both directions."""
    plot_curves(axes, rows, metric, x="bytes")
    clip_axis(axes, rows, metric)
    axes.set(xscale="log", xlabel="bytes, up and down", ylabel=METRIC_LABELS[metric], title=TASK_LABELS.get(task, task))


def add_legend(figure: FigureBase, axes: Sequence[Axes], num_seeds: int | str, num_columns: int = 4, title: str | None = None) -> None:
    """Add one legend below all panels. The default title explains lines and bands."""
    if title is None:
        title = f"lines: mean of {num_seeds} seeds; bands: ± 1 sd" if num_seeds not in (0, 1) else "lines: one seed"
    handles = {text: handle for panel in axes for handle, text in zip(*panel.get_legend_handles_labels(), strict=True)}
    figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=num_columns, title=title, title_fontsize=8.0)


def clip_axis(axes: Axes, rows: Sequence[Row], name: str) -> None:
    """Start the axis no lower than -.05, so that bad first rounds do not compress the rest."""
    curves = (results.get_curve(row, name) or () for row in results.done_rows(rows))
    if min((value for curve in curves for value in curve if value is not None), default=0.0) < -0.05:
        axes.set_ylim(bottom=-0.05)


def num_finished_seeds(rows: Sequence[Row]) -> int:
    """Return the number of seeds with a finished run."""
    return len(results.distinct_seeds(results.done_rows(rows)))


def count_seeds(groups: Sequence[Sequence[Row]]) -> int | str:
    """Return the number of seeds of each line, or the smallest and the largest number."""
    low, *_, high = sorted(num_finished_seeds(group) for group in groups) * 2
    return low if low == high else f"{low} to {high}"


def set_symlog(axes: Axes, linear_below: float, decades: Sequence[int]) -> None:
    """Make the vertical axis logarithmic on both sides of a linear part, with ticks at 0 and at those of these decades that it shows."""
    axes.set_yscale("symlog", linthresh=linear_below)
    low, high = axes.get_ylim()
    powers = [sign * 10.0**decade for sign in (-1, 1) for decade in decades]
    axes.set_yticks([0.0, *(power for power in powers if low <= power <= high)])


def create_panels(figure: FigureBase, num_columns: int, num_rows: int = 1, *, num_used: int | None = None) -> list[Axes]:
    """Return a grid of panels, row by row, without the unused ones at the end."""
    panels = list(figure.subplots(num_rows, num_columns, squeeze=False).flat)
    for axes in panels[num_used:] if num_used is not None else ():
        axes.remove()
    return panels[:num_used]
