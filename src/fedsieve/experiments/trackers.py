"""Experiment trackers. They are imported on first use and store locally unless their own settings say otherwise."""

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from enum import StrEnum
from pathlib import Path
from typing import Any

from fedsieve import optional
from fedsieve.core.settings import flatten

PROJECT = "fedsieve"
LogFunction = Callable[[Mapping[str, Any]], None]
"""Logs the metrics of a round."""


class Tracker(StrEnum):
    """Where the metrics of rounds are logged, in addition to metrics.jsonl."""

    TENSORBOARD = "tensorboard"
    """event files in the folder tensorboard of the run"""
    TRACKIO = "trackio"
    """trackio's own local data base; project fedsieve"""
    WANDB = "wandb"
    """off-line, in the folder wandb of the run, until you sync it or set WANDB_MODE"""
    MLFLOW = "mlflow"
    """mlflow.db here (older versions: mlruns), or where MLFLOW_TRACKING_URI says; experiment fedsieve"""


@contextmanager
def open_tracker(tracker: Tracker | None, folder: Path, config: Mapping[str, Any]) -> Iterator[LogFunction]:
    """Open a tracker; its output goes to standard error, so that --json remains the only line of output."""
    ways = {Tracker.TENSORBOARD: open_tensorboard, Tracker.TRACKIO: open_trackio, Tracker.WANDB: open_wandb, Tracker.MLFLOW: open_mlflow}
    if tracker is None:
        yield lambda _: None
        return
    flags = {name.replace("_", "-"): value for name, value in flatten(config).items()}
    with redirect_stdout(sys.stderr), ways[tracker](folder, flags) as log:
        yield log


def check_installed(tracker: Tracker | None) -> None:
    """Raise an error before training if the package is missing."""
    if tracker is not None:
        brought = tracker in (Tracker.TENSORBOARD, Tracker.TRACKIO)
        optional.require_package(tracker.value, "'fedsieve[track]'" if brought else tracker.value, f"--tracker {tracker}")


def numeric_values(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the numeric values of a round."""
    return {name: float(value) for name, value in row.items() if isinstance(value, int | float) and name != "round"}


@contextmanager
def open_tensorboard(folder: Path, config: dict[str, Any]) -> Iterator[LogFunction]:
    """Log scalars by round, and the settings as text."""
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder / "tensorboard")) as writer:
        writer.add_text("settings", "\n".join(f"    {name} = {value}" for name, value in config.items()))

        def log(row: Mapping[str, Any]) -> None:
            for name, value in numeric_values(row).items():
                writer.add_scalar(name, value, row["round"])

        yield log


@contextmanager
def open_trackio(folder: Path, config: dict[str, Any]) -> Iterator[LogFunction]:
    """Log one run of the project, named after its directory."""
    import trackio as package

    run = package.init(
        project=PROJECT, name=folder.name, config=config, resume="allow", embed=False, auto_log_gpu=False, auto_log_cpu=False
    )
    try:
        yield lambda row: run.log(numeric_values(row), step=row["round"])
    finally:
        package.finish()  # the run's own leaves it to be ended, and spoken of, once more at exit


@contextmanager
def open_wandb(folder: Path, config: dict[str, Any]) -> Iterator[LogFunction]:
    """Log offline, unless WANDB_MODE says otherwise."""
    import wandb as package  # pyright: ignore[reportMissingImports]  # optional

    mode = os.environ.get("WANDB_MODE", "offline")
    with package.init(project=PROJECT, name=folder.name, config=config, dir=str(folder), mode=mode) as run:
        yield lambda row: run.log(numeric_values(row), step=row["round"])


@contextmanager
def open_mlflow(folder: Path, config: dict[str, Any]) -> Iterator[LogFunction]:
    """Log locally, unless MLFLOW_TRACKING_URI says otherwise."""
    import mlflow as package  # pyright: ignore[reportMissingImports]  # optional

    package.set_experiment(PROJECT)
    with package.start_run(run_name=folder.name):
        package.log_params(config)
        yield lambda row: package.log_metrics(numeric_values(row), step=row["round"])
