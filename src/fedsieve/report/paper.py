"""The numbers of the paper's tables, each with the line of its LaTeX source."""

from itertools import product
from typing import NamedTuple

from fedsieve.studies.results import IID, NON_IID

ROUNDING_TOLERANCE = 0.005
"""The paper prints two decimals."""


class PublishedCell(NamedTuple):
    """One cell of one of the paper's tables."""

    table: str
    task: str
    algorithm: str
    target_density: float
    true_density: float
    skew: str
    measure: str
    """quality: R2 or accuracy; loss: MSE or cross-entropy; tdr: over entries, for many classes over feature rows (decision F2)"""
    value: float
    source_line: int


def _table_1_row(task: str, source_line: int, *values: float) -> list[PublishedCell]:
    """Return a row of Table 1: three TDR, then quality and loss of FLoPS(0.05), FLoPS(0.95) and FedIter-HT, on 5 % truth, non-IID."""
    models = (("flops", 0.05), ("flops", 0.95), ("fed-iter-ht", 0.05))
    columns = [("tdr", *model) for model in models] + [(measure, *model) for model in models for measure in ("quality", "loss")]
    return [
        PublishedCell("table-1", task, algorithm, target, 0.05, NON_IID, measure, value, source_line)
        for (measure, algorithm, target), value in zip(columns, values, strict=True)
    ]


def _table_2_row(task: str, density: float, source_line: int, *values: float) -> list[PublishedCell]:
    """Return a row of Table 2: quality and TDR of FLoPS and FedIter-HT, IID, then non-IID; true and target density are equal."""
    columns = product((IID, NON_IID), ("flops", "fed-iter-ht"), ("quality", "tdr"))
    return [
        PublishedCell("table-2", task, algorithm, density, density, skew, measure, value, source_line)
        for (skew, algorithm, measure), value in zip(columns, values, strict=True)
    ]


CELLS: tuple[PublishedCell, ...] = (
    *_table_1_row("lr", 230, 1.00, 0.05, 0.18, 0.91, 4.62, 0.85, 7.65, 0.16, 42.57),
    *_table_1_row("lg", 232, 0.94, 0.11, 0.11, 0.90, 0.32, 0.83, 0.56, 0.63, 0.88),
    *_table_1_row("mc", 234, 0.99, 0.38, 0.51, 0.68, 0.82, 0.52, 2.25, 0.24, 2.24),
    *_table_2_row("lr", 0.95, 261, 0.83, 0.98, 0.86, 0.97, 0.69, 0.96, 0.74, 0.96),
    *_table_2_row("lr", 0.05, 262, 0.90, 1.00, 0.37, 0.37, 0.91, 1.00, 0.27, 0.18),
    *_table_2_row("lg", 0.95, 265, 0.87, 0.96, 0.87, 0.96, 0.85, 0.95, 0.81, 0.96),
    *_table_2_row("lg", 0.05, 266, 0.89, 0.96, 0.70, 0.22, 0.90, 0.94, 0.65, 0.11),
    *_table_2_row("mc", 0.95, 269, 0.52, 1.00, 0.53, 1.00, 0.50, 1.00, 0.50, 1.00),
    *_table_2_row("mc", 0.05, 270, 0.71, 0.99, 0.28, 0.51, 0.68, 0.99, 0.24, 0.50),
)

PRECISION_BOUND = 50 / 950
"""The highest TDR of a model that keeps 950 of 1000 weights if 50 are true. The paper has .11 (L232) and, over rows, .38 (L234)."""


def table_cells(table: str) -> list[PublishedCell]:
    """Return the cells of one table."""
    return [cell for cell in CELLS if cell.table == table]
