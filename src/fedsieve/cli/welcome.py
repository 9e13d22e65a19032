"""The output of `fedsieve` without arguments: suggested next commands. Does not import torch."""

from pathlib import Path

from fedsieve import __version__
from fedsieve.storage import run_directory

RUNS_DIR = Path("runs")
FIRST_STEPS = {
    "fedsieve train": "train on the default task, about ten seconds",
    "fedsieve compare --task digits": "compare four algorithms over three seeds",
    "fedsieve data list": "list the data sets",
    "fedsieve doctor": "check versions, data and optional packages",
}
USER_DATA_HINT = ("fedsieve train --task file --data.path data.csv --data.target price", "train on your own data")


def welcome_text() -> str:
    """The text, at most 80 columns wide."""
    lines = [f"fedsieve {__version__}: federated learning of sparse models", ""]
    run = latest_run()
    if run is None:
        steps = FIRST_STEPS
    elif not (run / run_directory.RESULT).exists():
        lines.append(f"{run} is running or was interrupted.")
        steps = {f"fedsieve watch {run}": "watch its report during training", f"fedsieve train --resume {run}": "resume it"}
    else:
        lines.append(f"The latest run is {run}.")
        steps = {
            "fedsieve report --open": "open its report",
            f"fedsieve inspect {run}": "show the model",
            f"fedsieve export {run} --format onnx --verify": "export the model",
            f"fedsieve predict {run} data.csv": "predict new examples",
        }
    width = max(map(len, steps))
    lines += [
        f"  {command:<{width}}  {description}" if width + len(description) < 76 else f"  {command}\n      {description}"
        for command, description in steps.items()
    ]
    return "\n".join([*lines, f"  {USER_DATA_HINT[0]}", f"      {USER_DATA_HINT[1]}", "", "All commands: fedsieve --help", ""])


def latest_run() -> Path | None:
    """The run directory in runs/ that was changed last, or None."""
    runs = [path.parent for path in RUNS_DIR.glob(f"*/{run_directory.CONFIG}")]
    return max(runs, key=lambda path: path.stat().st_mtime, default=None)
