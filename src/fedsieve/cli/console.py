"""The table at the end of a run."""

import json as json_text
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from fedsieve.core.selection import kept_count
from fedsieve.experiments.config import Counting, Run
from fedsieve.formatting import amount, number, size
from fedsieve.storage import run_directory

SAMPLED = {Counting.ENCODED: "", Counting.SAMPLED: " (estimated from one reply an exchange)"}


def show_result(run: Run, result: dict[str, Any], folder: Path, *, quiet: bool, json: bool) -> None:
    """The table a newcomer reads, or all of it as JSON."""
    page = folder / run_directory.REPORT
    result["report"] = str(page) if page.exists() else None
    if json:
        print(json_text.dumps(result))
    if json or quiet:
        return
    table = Table(title=f"{run.method} on {run.task}, {result['rounds']} rounds", show_header=False, title_justify="left")
    kept, total = result["nonzero"], result["size"]
    sent = result["bytes_up"] + result["bytes_down"]
    allowed = kept_count(run.density, total)
    table.add_row("weights kept", f"exactly {kept} of {total}" + (f", in whole groups ({allowed} allowed)" if kept < allowed else ""))
    if result["tdr"] is not None:
        found = round(result["tdr"] * kept)
        true = round(found / max(result["recall"], 1e-9))
        table.add_row("of these right", f"{'all ' if found == kept else ''}{found} (of {true} true ones)" if found else "none")
    best = "" if result["best_possible"] is None else f" (best possible {number(result['best_possible'])})"
    table.add_row(f"{run.judge} {result['metric']}", f"{number(result['value'])}{best}")
    if result["expected_density"] is not None:
        table.add_row("expected density", f"{number(result['expected_density'])} before the final cut")
    if result["replied"] < result["asked"]:
        table.add_row("replies", replies(result))
    if result["epsilon"] is not None:
        table.add_row("privacy", f"epsilon {number(result['epsilon'])} at delta {run.privacy.delta:.1g}, of a client replaced by another")
    if result["features"] is not None:
        named = ", ".join(result["features"][:8]) + (" ..." if len(result["features"]) > 8 else "")
        table.add_row("features used", f"{len(result['features'])}: {named}")
    table.add_row("bytes sent", f"{size(sent)} instead of {size(result['bytes_dense'])} dense")
    table.add_row("  up, down", f"{size(result['bytes_up'])}, {size(result['bytes_down'])}{SAMPLED[run.bytes]}")
    table.add_row("  by the paper's formula", f"{size(result['bytes_up_formula'])}, {size(result['bytes_down_formula'])}")
    table.add_row("time", f"{amount(result['seconds'])} s")
    if result["note"]:
        table.add_row("data", result["note"])
    table.add_row("run folder", str(folder))
    if result["report"]:
        table.add_row("report", result["report"])
    Console(highlight=False).print(table)


def replies(result: dict[str, Any]) -> str:
    """How many came, how many were rejected, and whether some rounds had none."""
    silent = f"; in {result['silent_rounds']} rounds nobody answered" if result["silent_rounds"] else ""
    return f"{result['replied']} of {result['asked']} counted, {result['rejected']} rejected{silent}"
