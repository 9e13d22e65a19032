"""What `fedsieve` alone says: what to do next, given what is here. No torch."""

from pathlib import Path

from fedsieve import __version__
from fedsieve.storage import run_directory

RUNS_DIR = Path("runs")
FIRST_STEPS = {
    "fedsieve train": "train the default task: ten seconds, no option needed",
    "fedsieve compare --task digits": "four methods, three seeds, one table",
    "fedsieve data list": "which data sets are here",
    "fedsieve doctor": "versions, data and optional packages on this machine",
}
USER_DATA_HINT = ("fedsieve train --task file --data.path rows.csv --data.target price", "learn from your own rows")


def welcome_text() -> str:
    """Some lines of 80 columns."""
    lines = [f"fedsieve {__version__}: federated learning that keeps only the weights that matter", ""]
    run = latest_run()
    if run is None:
        steps = FIRST_STEPS
    elif not (run / run_directory.RESULT).exists():
        lines.append(f"{run} is under way, or broke off.")
        steps = {f"fedsieve watch {run}": "its page, as it trains", f"fedsieve train --resume {run}": "go on where it stands"}
    else:
        lines.append(f"The newest run is {run}.")
        steps = {
            "fedsieve report --open": "its page",
            f"fedsieve inspect {run}": "what the model kept",
            f"fedsieve export {run} --format onnx --verify": "for other programs",
            f"fedsieve predict {run} rows.csv": "new rows",
        }
    width = max(map(len, steps))
    lines += [
        f"  {command:<{width}}  {what}" if width + len(what) < 76 else f"  {command}\n      {what}" for command, what in steps.items()
    ]
    return "\n".join([*lines, f"  {USER_DATA_HINT[0]}", f"      {USER_DATA_HINT[1]}", "", "All commands: fedsieve --help", ""])


def latest_run() -> Path | None:
    """The run in runs/ that was written to last."""
    found = [path.parent for path in RUNS_DIR.glob(f"*/{run_directory.CONFIG}")]
    return max(found, key=lambda path: path.stat().st_mtime, default=None)
