"""`python -m benchmarks`: CPU time of fedsieve and of other implementations of the same work, interleaved. Compare the ratios."""

import argparse
import json
import sys
from statistics import median

from benchmarks import cli_startup
from benchmarks.runner import speedup, time_interleaved
from benchmarks.workloads import WORKLOADS, Workload

RIVALS = {
    "W1": ("naive_loop",),
    "W2": ("naive_loop", "flower", "pfl", "fedjax"),
    "W3": ("naive_loop",),
    "W4": ("naive_loop",),
    "RCV1": ("naive_loop",),
}
RIVAL_NAMES = ("naive_loop", "flower", "pfl", "fedjax")
OTHER_COLUMNS = ("as_module", "roofline", "peak_mb", "torch", "two_threads")
"""Other figures: a module over the naive loop, over the roofline, memory, without kernels over the naive loop, one thread over two."""
MODULE_WORKLOADS = ("W1", "W2")
"""Workloads whose model is also run as a module; LeNet is one already, and modules take no sparse examples."""


def main() -> None:
    """Run the workloads and print a table; with --json also one line with the ratios."""
    options = parse_arguments()
    results = {}
    for name in options.workload:
        if name == "W5":
            results[name] = cli_startup.measure_cli(options.repeats)
        else:
            results[name] = compare_contenders(WORKLOADS[name], options.rivals, options.repeats, options.threads)
    if options.json:
        print(json.dumps(results))


def parse_arguments() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    names = [*WORKLOADS, "W5"]
    parser.add_argument("--workload", nargs="+", choices=names, default=names, metavar="W", help="W1 to W5 and RCV1 (default: all)")
    parser.add_argument(
        "--rivals", nargs="*", choices=RIVAL_NAMES, default=RIVAL_NAMES, metavar="NAME", help=f"of {', '.join(RIVAL_NAMES)} (default: all)"
    )
    parser.add_argument("--repeats", type=int, default=7, help="interleaved repeats (default: 7)")
    parser.add_argument("--threads", type=int, default=1, help="threads of each contender (default: 1)")
    parser.add_argument("--json", action="store_true", help="print the speedups over each rival as one JSON object on the last line")
    options = parser.parse_args()
    for name in ("repeats", "threads"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1; got {getattr(options, name)}")
    return options


def compare_contenders(workload: Workload, rivals: list[str], repeats: int, threads: int) -> dict[str, float | None]:
    """Return the ratios of all contenders on one workload, and print their times."""
    compared = [rival for rival in RIVALS[workload.name] if rival in rivals]
    generic = ["as_module"] if workload.name in MODULE_WORKLOADS else []
    timings, missing = time_interleaved(
        workload, ["fedsieve", "torch_only", "two_threads", "roofline", *generic, *compared], repeats, threads
    )
    if "fedsieve" not in timings:
        if workload.name == "RCV1":
            print(f"\n{workload.name}  left out: {missing['fedsieve']}")
            return dict.fromkeys((*RIVAL_NAMES, *OTHER_COLUMNS))
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
    slow, two = timings.get("torch_only"), timings.get("two_threads")
    row["torch"] = round(speedup(slow, timings["naive_loop"]), 2) if slow and "naive_loop" in timings else None
    row["two_threads"] = round(median(one / both for one, both in zip(ours.wall, two.wall, strict=True)), 2) if two else None
    return row


if __name__ == "__main__":
    main()
