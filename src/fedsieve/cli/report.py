"""The commands `fedsieve report` and `fedsieve watch`. They do not import torch."""

import webbrowser
from pathlib import Path

from fedsieve.cli.options import Switch
from fedsieve.report.html import page
from fedsieve.report.html.live_server import serve
from fedsieve.report.html.run_record import is_run_directory
from fedsieve.storage import run_directory

RUNS_DIR = Path("runs")


def report(*folders: Path, open: Switch = False, out: Path | None = None) -> int:
    """Write one self-contained HTML page about runs or studies.

    Parameters
    ----------
    folders
        runs, comparisons, studies, or folders that hold some (default: the newest in runs/)
    open
        show it in a browser
    out
        the file (default: report.html in the folder, or here for several folders)
    """
    chosen = list(folders) or [latest_run_directory()]
    place = out or (chosen[0] if len(chosen) == 1 else Path()) / run_directory.REPORT
    if place.is_dir():
        raise run_directory.RunDirectoryError(f"--out {place} is a folder; name a file")
    page.write_report(chosen, place)
    print(f"report in {place}")
    if open and not webbrowser.open(place.resolve().as_uri()):
        print("no browser was found; open the file yourself")
    return 0


def watch(folder: Path, *, port: int = 8765) -> int:
    """Serve a run's page on this machine while it trains; it follows every round.

    Parameters
    ----------
    folder
        a run or a comparison, under way or finished
    port
        of 127.0.0.1; 0 takes any that is free
    """
    serve(folder, port, lambda text: print(text, flush=True))
    return 0


def latest_run_directory() -> Path:
    """Return the directory in runs/ that was written last."""
    found = (
        [path for path in RUNS_DIR.glob("*") if is_run_directory(path) or any(is_run_directory(inner) for inner in path.glob("*"))]
        if RUNS_DIR.is_dir()
        else []
    )
    if not found:
        raise run_directory.RunDirectoryError("there is no run in runs/; name the folder of one")
    return max(found, key=lambda path: path.stat().st_mtime)
