"""Print the result of a run."""

import json as json_text
from pathlib import Path
from typing import Any

from rich.table import Table

from fedsieve.core.budgets import num_kept
from fedsieve.experiments.config import ByteCounting
from fedsieve.experiments.resolve import ResolvedRun
from fedsieve.formatting import PlainConsole, format_bytes, format_number, format_seconds
from fedsieve.storage import run_directory

BYTE_COUNTING_NOTES = {ByteCounting.EXACT: "", ByteCounting.SAMPLED: " (estimated from one reply an exchange)"}


def show_result(run: ResolvedRun, result: dict[str, Any], folder: Path, *, quiet: bool, json: bool) -> None:
    """Print the result as a table, or as JSON."""
    page = folder / run_directory.REPORT
    result["report"] = str(page) if page.exists() else None
    if json:
        print(json_text.dumps(result))
    if json or quiet:
        return
    table = Table(title=f"{run.algorithm_name} on {run.task}, {result['rounds']} rounds", show_header=False, title_justify="left")
    kept, total = result["nonzero"], result["size"]
    sent = result["bytes_up"] + result["bytes_down"]
    allowed = num_kept(run.density, total)
    table.add_row("weights kept", f"exactly {kept} of {total}" + (f", in whole groups ({allowed} allowed)" if kept < allowed else ""))
    if result["tdr"] is not None:
        found = round(result["tdr"] * kept)
        true = round(found / max(result["recall"], 1e-9))
        table.add_row("true weights", f"{found} of {true} kept")
    best = "" if result["oracle_value"] is None else f" (best possible {format_number(result['oracle_value'])})"
    table.add_row(f"{run.evaluate_on} {result['metric']}", f"{format_number(result['value'])}{best}")
    if "worst_node" in result:
        table.add_row("  single nodes", f"worst {format_number(result['worst_node'])}, mean {format_number(result['mean_node'])}")
        table.add_row("  supports", f"overlap {format_number(result['support_agreement'])} between nodes")
    if result["expected_density"] is not None:
        table.add_row("  before projection", format_number(result["value_before_projection"]))
        densities = (format_number(result[name]) for name in ("expected_density", "test_density"))
        table.add_row("  expected density", "{}, at test time {}".format(*densities))
    if result["replied"] < result["asked"]:
        table.add_row("replies", format_replies(result))
    if result["epsilon"] is not None:
        table.add_row(
            "privacy", f"epsilon {format_number(result['epsilon'])} at delta {run.privacy.delta:.1g}, of a client replaced by another"
        )
    if result["features"] is not None:
        named = ", ".join(result["features"][:8]) + (" ..." if len(result["features"]) > 8 else "")
        table.add_row("features used", f"{len(result['features'])}: {named}")
    table.add_row("bytes sent", f"{format_bytes(sent)} instead of {format_bytes(result['bytes_dense'])} dense")
    table.add_row(
        "  up, down", f"{format_bytes(result['bytes_up'])}, {format_bytes(result['bytes_down'])}{BYTE_COUNTING_NOTES[run.byte_counting]}"
    )
    if sent > (examples := result.get("bytes_examples", sent)):  # results of earlier versions have no such entry
        table.add_row("  training examples", f"{format_bytes(examples)} in all: fewer bytes than the messages")
    table.add_row(
        "  by the paper's formula", f"{format_bytes(result['bytes_up_paper_formula'])}, {format_bytes(result['bytes_down_paper_formula'])}"
    )
    table.add_row("time", f"{format_seconds(result['seconds'])} s")
    table.add_row("data", result["data"])
    if result["note"]:
        table.add_row("note", result["note"])
    table.add_row("run folder", str(folder))
    if result["report"]:
        table.add_row("report", result["report"])
    PlainConsole().print(table)


def format_replies(result: dict[str, Any]) -> str:
    """Return the numbers of replies, rejections and rounds without replies."""
    without_replies = f"; in {result['rounds_without_replies']} rounds no client replied" if result["rounds_without_replies"] else ""
    return f"{result['replied']} of {result['asked']} counted, {result['rejected']} rejected{without_replies}"
