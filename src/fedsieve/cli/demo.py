"""The command `fedsieve demo`: four algorithms on one task, one table, one page."""

import json as json_text
from pathlib import Path
from typing import Any

from rich.table import Table

from fedsieve.cli.compare import CompareOptions, compute_runs
from fedsieve.cli.options import Switch
from fedsieve.cli.train import hint_resume
from fedsieve.experiments import compare
from fedsieve.experiments.config import RunConfig
from fedsieve.experiments.resolve import resolve
from fedsieve.formatting import PlainConsole, format_bytes, format_number
from fedsieve.report.html.page import write_default_report
from fedsieve.storage import run_directory

ALGORITHMS = ("flops-pa", "fed-iter-ht", "fed-avg", "sieve")
ROUNDS = 50
"""Half of the default, so that the demo takes less than half a minute."""
NEXT_STEPS = {
    "fedsieve train --task digits --density 0.1": "one model, its report and its file",
    "fedsieve compare --task digits": "is the difference more than luck? three seeds, intervals",
    "fedsieve train --task file --data.path rows.csv --data.target price": "your own examples",
}


def demo(*, out: Path | None = None, json: Switch = False) -> int:
    """Train four algorithms on the generated task lr; print what each kept, reached and sent.

    Parameters
    ----------
    out
        directory of the runs (default: runs/compare-ID); an interrupted demo resumes there
    json
        print the rows of the table as one JSON object on the last line
    """
    runs = [resolve(RunConfig(task="lr", algorithm_name=name, rounds=ROUNDS)) for name in ALGORITHMS]
    folder = out or Path("runs") / compare.comparison_id([runs])
    if not compare.is_resumable(folder, [runs]):
        folder = run_directory.create_run_dir(folder, explicit=out is not None)
    with hint_resume("the same command"):
        compute_runs(runs, folder, CompareOptions(), runs[0].workers)
    results = [run_directory.read_result(folder / compare.run_name(run)) for run in runs]
    page = write_default_report(folder)
    if json:
        print(json_text.dumps({"run": str(folder), "report": page, "algorithms": results}))
    else:
        print_results(results, page)
    return 0


def print_results(results: list[dict[str, Any]], page: str | None) -> None:
    """Print the table, the place of the page and the next commands, in at most 80 columns."""
    console, first = PlainConsole(), results[0]
    title = f"{first['task']}: {first['size']} weights, of which {first['nonzero']} may be kept; seed {first['seed']}"
    table = Table(title=title, title_justify="left")
    for column in ("algorithm", "kept", "right", f"test {first['metric']}", "bytes sent", "expected density"):
        table.add_column(column, justify="left" if column == "algorithm" else "right")
    for row in results:
        expected = row["expected_density"]
        table.add_row(
            row["algorithm"],
            str(row["nonzero"]),
            f"{row['tdr']:.0%}",
            format_number(row["value"]),
            format_bytes(row["bytes_up"] + row["bytes_down"]),
            "no gates" if expected is None else f"{expected:.4f}",
        )
    console.print(table)
    console.print(f"data: {first['data']}", soft_wrap=True)
    console.print(f"The true weights reach {format_number(first['oracle_value'])}. `fed-avg` sends all weights and is cut at the end.")
    if page:
        console.print(f"Quality against bytes: {page}")
    console.print("\nWhat to type next:")
    for command, text in NEXT_STEPS.items():
        console.print(f"  {command}\n      {text}")
