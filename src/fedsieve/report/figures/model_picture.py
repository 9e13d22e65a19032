"""Draw a model: masks if features are pixels, the strongest features of a linear model, the layers of a module."""

import warnings
from math import ceil
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from fedsieve.formatting import escape_controls
from fedsieve.models.sparse_model import SparseModel
from fedsieve.report.figures.style import STYLE, save_figure
from fedsieve.report.html.supports import IMAGE_SHAPES, strongest_features

POSITIVE_COLOUR, NEGATIVE_COLOUR, BAR_COLOUR = "#0072B2", "#D55E00", "#56B4E9"
MAX_BARS, MAX_MASKS, NUM_COLUMNS, NUM_COLUMNS_IF_FEW = 20, 64, 8, 5


def draw_model(model: SparseModel, path: Path) -> None:
    """Draw the model to a file."""
    metadata = model.metadata
    with mpl.rc_context(STYLE):
        if metadata.factory is not None:
            figure = draw_layers(model)
        elif metadata.task in IMAGE_SHAPES:
            figure = draw_masks(model, IMAGE_SHAPES[metadata.task])
        else:
            figure = draw_features(model)
        num_weights = model.size - model.num_ungated
        title = figure_text(f"{metadata.algorithm} on {metadata.task}: {model.num_nonzero} of {num_weights} weights")
        figure.suptitle(title, fontsize=10)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph")  # a name in a script that the font does not have
            save_figure(figure, path)


def figure_text(name: str) -> str:
    """A name from a file as text of a figure: not as a formula, and without control characters."""
    return escape_controls(name).replace("$", r"\$")


def draw_masks(model: SparseModel, image_shape: tuple[int, int]) -> Figure:
    """Draw the weights of each class as pixels: positive blue, negative orange, zero white."""
    matrix = model.coef.toarray()[:MAX_MASKS]
    columns = NUM_COLUMNS_IF_FEW if len(matrix) <= 2 * NUM_COLUMNS_IF_FEW else NUM_COLUMNS
    rows = ceil(len(matrix) / columns)
    figure = Figure(figsize=(1.15 * columns, 1.3 * rows + 0.7), layout="constrained")
    colours = LinearSegmentedColormap.from_list("signed", [NEGATIVE_COLOUR, "#FFFFFF", POSITIVE_COLOUR])
    for i, axes in enumerate(figure.subplots(rows, columns, squeeze=False).flat):
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set(visible=i < len(matrix), color="#B0B0B0", linewidth=0.6)
        if i < len(matrix):
            largest = np.abs(matrix[i]).max() or 1
            axes.imshow(matrix[i].reshape(image_shape), cmap=colours, vmin=-largest, vmax=largest, interpolation="nearest")
            assert model.metadata.classes is not None, "tasks with images have classes"
            axes.set_title(figure_text(model.metadata.classes[i]), fontsize=8, pad=2)
    figure.supxlabel("blue: positive weights; orange: negative weights; white: zero", fontsize=8)
    return figure


def draw_features(model: SparseModel) -> Figure:
    """Draw the strongest features, with signs if there is one output."""
    data = strongest_features(model, MAX_BARS)
    names = [figure_text(str(row[0])) for row in data.rows][::-1]
    weights: list[Any] = [row[1] for row in data.rows][::-1]
    figure = Figure(figsize=(6.5, 0.22 * max(len(names), 4) + 1), layout="constrained")
    axes = figure.subplots()
    axes.barh(names, weights, color=[POSITIVE_COLOUR if weight > 0 else NEGATIVE_COLOUR for weight in weights])
    axes.set(xlabel=data.columns[1], title=data.caption)
    axes.tick_params(labelsize=7.5)
    axes.grid(visible=False, axis="y")
    return figure


def draw_layers(model: SparseModel) -> Figure:
    """Draw the density of each tensor with its number of weights."""
    parts = [
        (name, model.indices[(model.indices >= part["start"]) & (model.indices < part["stop"])].size, part)
        for name, part in model.layers.items()
    ]
    figure = Figure(figsize=(6.5, 0.28 * len(parts) + 1), layout="constrained")
    axes = figure.subplots()
    sizes = [part["stop"] - part["start"] for _, _, part in parts]
    densities = [kept / size for (_, kept, _), size in zip(parts, sizes, strict=True)]
    bars = axes.barh([figure_text(name) for name, _, _ in parts], densities, color=BAR_COLOUR)
    axes.bar_label(bars, [f" {kept} of {size}" for (_, kept, _), size in zip(parts, sizes, strict=True)], fontsize=7.5)
    axes.set(xlabel="density", xlim=(0, max(densities) * 1.25 or 1))
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    return figure
