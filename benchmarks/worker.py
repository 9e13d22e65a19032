"""`python -m benchmarks.worker CONTENDER WORKLOAD`: one contender in its own process; every line on standard input is a number of rounds.

Only the standard library and NumPy are imported here: rivals bring environments of their own.
"""

import json
import os
import resource
import sys
import time
from importlib import import_module

from benchmarks.workloads import WORKLOADS


def run_worker(contender: str, workload_name: str) -> None:
    """Prepare, train one round to warm up, then time what is asked for; answers are lines of JSON."""
    module, out = import_module(f"benchmarks.contenders.{contender}"), sys.stdout
    sys.stdout = sys.stderr  # what a rival prints is not an answer
    play = module.prepare(WORKLOADS[workload_name])
    cpu_seconds = getattr(module, "cpu_seconds", time.process_time)
    play()
    print(json.dumps({"ready": True}), file=out, flush=True)
    for line in sys.stdin:
        rounds = int(line)
        cpu, wall = cpu_seconds(), time.perf_counter()
        given = [play() for _ in range(rounds)]
        cpu, wall = cpu_seconds() - cpu, time.perf_counter() - wall
        if isinstance(given[0], float):  # a floor is computed, not run
            cpu = wall = sum(given)
        peak = getattr(module, "peak_mb", process_peak_mb)()
        print(json.dumps({"cpu": cpu / rounds, "wall": wall / rounds, "peak_mb": peak}), file=out, flush=True)
    os._exit(0)  # a simulator's own threads would wait for more rounds


def process_peak_mb() -> float:
    """The most memory this process ever held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    run_worker(*sys.argv[1:3])
