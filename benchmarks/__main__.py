"""`python -m benchmarks`: fedsieve against those who do the same work, interleaved; ratios, not seconds, are what to read."""

import argparse
import json
import sys
from statistics import median

from benchmarks import command
from benchmarks.race import race, times_faster
from benchmarks.workloads import WORKLOADS, Workload

RIVALS = {"W1": ("lean",), "W2": ("lean", "flower", "pfl", "fedjax"), "W3": ("lean",), "W4": ("lean",), "RCV1": ("lean",)}
NAMES = ("lean", "flower", "pfl", "fedjax")
OWN = ("generic", "floor", "peak_mb", "torch", "two_threads")
"""Besides rivals: a module over lean, times the floor, memory, over lean without compiled passes, wall time of one thread over two."""
GENERIC = ("W1", "W2")
"""Workloads whose model is also run as a module; LeNet is one already, and modules take no sparse rows."""


def main() -> None:
    """Run what was asked for, print a table, and with --json one line that holds the ratios."""
    options = parsed()
    results = {}
    for name in options.workload:
        if name == "W5":
            results[name] = command.measured(options.repeats)
        else:
            results[name] = compared(WORKLOADS[name], options.rivals, options.repeats, options.threads)
    if options.json:
        print(json.dumps(results))


def parsed() -> argparse.Namespace:
    """What the user typed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    names = [*WORKLOADS, "W5"]
    parser.add_argument("--workload", nargs="+", choices=names, default=names, metavar="W", help="W1 to W5 and RCV1 (default: all)")
    parser.add_argument("--rivals", nargs="*", choices=NAMES, default=NAMES, metavar="NAME", help=f"of {', '.join(NAMES)} (default: all)")
    parser.add_argument("--repeats", type=int, default=7, help="interleaved repeats (default: 7)")
    parser.add_argument("--threads", type=int, default=1, help="threads of each contender (default: 1)")
    parser.add_argument("--json", action="store_true", help="the last line is one object: how many times faster than each rival")
    options = parser.parse_args()
    for name in ("repeats", "threads"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1; got {getattr(options, name)}")
    return options


def compared(work: Workload, rivals: list[str], repeats: int, threads: int) -> dict[str, float | None]:
    """One workload, all contenders."""
    asked = [rival for rival in RIVALS[work.name] if rival in rivals]
    generic = ["generic"] if work.name in GENERIC else []
    timings, missing = race(work, ["ours", "torch_only", "two_threads", "floor", *generic, *asked], repeats, threads)
    if "ours" not in timings:
        if work.name == "RCV1":
            print(f"\n{work.name}  left out: {missing['ours']}")
            return dict.fromkeys((*NAMES, *OWN))
        sys.exit(f"{work.name}: our own run {missing['ours']}")
    ours = timings["ours"]
    print(f"\n{work.name}  {work.about}, batch {work.batch}, {work.steps} steps")
    print(f"{'':12}{'CPU us a client-step':>24}{'wall us':>12}{'peak MB':>10}{'we are faster':>16}")
    print(f"{'':12}{'median':>14}{'least':>10}{'median':>12}")
    for contender, timing in timings.items():
        scale = 1e6 / work.client_steps
        ratio = "" if contender == "ours" else f"{times_faster(ours, timing):15.2f}x"
        print(
            f"{contender:12}{scale * median(timing.cpu):>14.0f}{scale * min(timing.cpu):>10.0f}"
            f"{scale * median(timing.wall):>12.0f}{timing.peak_mb:>10.0f}{ratio}"
        )
    for contender, why in missing.items():
        print(f"{contender:12}missing: {why}")
    sys.stdout.flush()
    row: dict[str, float | None] = {name: round(times_faster(ours, timings[name]), 2) if name in timings else None for name in NAMES}
    row["generic"] = round(times_faster(timings["generic"], timings["lean"]), 2) if {"generic", "lean"} <= timings.keys() else None
    row["floor"] = round(1 / times_faster(ours, timings["floor"]), 2) if "floor" in timings else None
    row["peak_mb"] = round(ours.peak_mb)
    slow, two = timings.get("torch_only"), timings.get("two_threads")
    row["torch"] = round(times_faster(slow, timings["lean"]), 2) if slow and "lean" in timings else None
    row["two_threads"] = round(median(one / both for one, both in zip(ours.wall, two.wall, strict=True)), 2) if two else None
    return row


if __name__ == "__main__":
    main()
