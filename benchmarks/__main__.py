"""`python -m benchmarks`: fedsieve and other implementations of the same work, interleaved. Compare the ratios.

With --out the ratios are stored, and the table of docs/performance.md is rewritten from the stored ones.
"""

import argparse
import json
import sys
from pathlib import Path
from statistics import median

from benchmarks import cli_startup
from benchmarks.environments import ROOT
from benchmarks.runner import speedup, time_interleaved, wall_speedup
from benchmarks.workloads import WORKLOADS, Workload

RIVALS = {"W2": ("naive_loop", "flower", "pfl", "fedjax"), "C100": ("naive_loop", "flower")}
"""Rivals of workloads; all others have the naive loop only."""
RIVAL_NAMES = ("naive_loop", "flower", "pfl", "fedjax")
MODULE_WORKLOADS = ("W1", "W2")
"""Workloads whose model is also run as a module; networks are one already, and modules take no sparse examples."""
COLUMNS = {
    "naive_loop": "naive loop",
    "torch": "without numba",
    "as_module": "as a module",
    "flower": "Flower",
    "pfl": "pfl",
    "fedjax": "FedJAX",
    "roofline": "times the floor",
    "all_cores": "all cores over one",
    "flower_wall": "Flower, all cores",
    "pfl_wall": "pfl, all cores",
    "fedjax_wall": "FedJAX, all cores",
    "peak_mb": "peak MB",
}
"""The ratios of a workload and their headings in the table."""
RATIOS, PAGE = ROOT / "docs" / "performance.json", ROOT / "docs" / "performance.md"
TABLE_BEGIN, TABLE_END = "<!-- table of performance.json -->\n", "<!-- end of the table -->\n"


def main() -> None:
    """Run the workloads and print their times; with --out also store the ratios."""
    options = parse_arguments()
    results = {}
    for name in options.workload:
        results[name] = (
            cli_startup.measure_cli(options.repeats)
            if name == "W5"
            else compare_contenders(WORKLOADS[name], options.rivals, options.repeats, with_wall=not options.cpu_only)
        )
    if options.out is not None:
        stored = json.loads(options.out.read_text()) if options.out.exists() else {}
        options.out.write_text(json.dumps(stored | results, indent=1) + "\n")
    if options.out is not None and options.out.resolve() == RATIOS:
        before, _, rest = PAGE.read_text().partition(TABLE_BEGIN)
        PAGE.write_text(before + TABLE_BEGIN + render_table(stored | results) + TABLE_END + rest.partition(TABLE_END)[2])


def parse_arguments() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    names = [*WORKLOADS, "W5"]
    parser.add_argument("--workload", nargs="+", choices=names, default=names, metavar="W", help=f"of {', '.join(names)} (default: all)")
    parser.add_argument(
        "--rivals", nargs="*", choices=RIVAL_NAMES, default=RIVAL_NAMES, metavar="NAME", help=f"of {', '.join(RIVAL_NAMES)} (default: all)"
    )
    parser.add_argument("--repeats", type=int, default=7, help="interleaved repeats (default: 7)")
    parser.add_argument("--cpu-only", action="store_true", help="leave out the ratios of wall time, which need idle cores")
    parser.add_argument("--out", type=Path, help="JSON file for the ratios; those of other workloads in it are kept")
    options = parser.parse_args()
    if options.repeats < 1:
        parser.error(f"--repeats must be at least 1; got {options.repeats}")
    return options


def render_table(results: dict[str, dict[str, float | None]]) -> str:
    """Return the stored ratios as a table in Markdown, with the workloads as columns, without ratios that none has."""
    shown = {name: row for name, row in results.items() if name in WORKLOADS}
    lines = [["", *shown], ["---"] * (len(shown) + 1)]
    for key, heading in COLUMNS.items():
        cells = [row.get(key) for row in shown.values()]
        if any(cell is not None for cell in cells):
            lines.append([heading, *("" if cell is None else f"{cell:.0f}" if cell >= 100 else f"{cell:.1f}" for cell in cells)])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def compare_contenders(workload: Workload, rivals: list[str], repeats: int, *, with_wall: bool) -> dict[str, float | None]:
    """Return the ratios of all contenders on one workload, and print their times."""
    compared = [rival for rival in RIVALS.get(workload.name, ("naive_loop",)) if rival in rivals]
    generic = ["as_module"] if workload.name in MODULE_WORKLOADS else []
    parallel = ["all_cores"] if with_wall else []
    timings, missing = time_interleaved(workload, ["fedsieve", "torch_only", *parallel, "roofline", *generic, *compared], repeats)
    if "fedsieve" not in timings:
        if workload.name == "RCV1":
            print(f"\n{workload.name}  left out: {missing['fedsieve']}")
            return dict.fromkeys(COLUMNS)
        sys.exit(f"{workload.name}: fedsieve itself {missing['fedsieve']}")
    ours = timings["fedsieve"]
    print(f"\n{workload.name}  {workload.description}, batch {workload.batch_size}, {workload.local_steps} steps")
    print(f"{'':12}{'CPU us per client step':>24}{'wall us':>12}{'peak MB':>10}{'speedup':>16}")
    print(f"{'':12}{'median':>14}{'minimum':>10}{'median':>12}")
    for contender, timing in timings.items():
        scale = 1e6 / workload.client_steps
        ratio = "" if contender == "fedsieve" else f"{speedup(ours, timing):15.2f}x"
        print(
            f"{contender:12}{scale * median(timing.cpu):>14.0f}{scale * min(timing.cpu):>10.0f}"
            f"{scale * median(timing.wall):>12.0f}{timing.peak_mb:>10.0f}{ratio}"
        )
    for contender, reason in missing.items():
        print(f"{contender:12}missing: {reason}")
    sys.stdout.flush()
    row: dict[str, float | None] = {name: round(speedup(ours, timings[name]), 2) if name in timings else None for name in RIVAL_NAMES}
    row["as_module"] = (
        round(speedup(timings["as_module"], timings["naive_loop"]), 2) if {"as_module", "naive_loop"} <= timings.keys() else None
    )
    row["roofline"] = round(1 / speedup(ours, timings["roofline"]), 2) if "roofline" in timings else None
    row["peak_mb"] = round(ours.peak_mb)
    slow, all_cores = timings.get("torch_only"), timings.get("all_cores")
    row["torch"] = round(speedup(slow, timings["naive_loop"]), 2) if slow and "naive_loop" in timings else None
    row["all_cores"] = round(wall_speedup(all_cores, ours), 2) if all_cores else None
    for name in RIVAL_NAMES[1:]:
        row[f"{name}_wall"] = round(wall_speedup(all_cores, timings[name]), 2) if all_cores and name in timings else None
    return row


if __name__ == "__main__":
    main()
