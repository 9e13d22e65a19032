"""`python -m benchmarks.worker CONTENDER WORKLOAD`: run one contender; every line of standard input is a number of rounds.

Only the standard library and NumPy are imported here, because rivals run in environments of their own.
"""

import json
import os
import resource
import sys
import time
from importlib import import_module

from benchmarks.workloads import WORKLOADS


def run_worker(contender: str, workload_name: str) -> None:
    """Prepare the contender, train one round to warm up, then time the requested rounds; answers are lines of JSON."""
    module, out = import_module(f"benchmarks.contenders.{contender}"), sys.stdout
    sys.stdout = sys.stderr  # rivals may print
    run_round = module.prepare(WORKLOADS[workload_name])
    cpu_seconds = getattr(module, "cpu_seconds", time.process_time)
    run_round()
    print(json.dumps({"ready": True}), file=out, flush=True)
    for line in sys.stdin:
        rounds = int(line)
        cpu, wall = cpu_seconds(), time.perf_counter()
        times = [run_round() for _ in range(rounds)]
        cpu, wall = cpu_seconds() - cpu, time.perf_counter() - wall
        if isinstance(times[0], float):  # the roofline computes its time
            cpu = wall = sum(times)
        peak = getattr(module, "peak_mb", process_peak_mb)()
        print(json.dumps({"cpu": cpu / rounds, "wall": wall / rounds, "peak_mb": peak}), file=out, flush=True)
    os._exit(0)  # threads of a simulator may still wait for more rounds


def process_peak_mb() -> float:
    """Return the peak memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    run_worker(*sys.argv[1:3])
