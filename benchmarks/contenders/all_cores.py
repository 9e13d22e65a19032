"""fedsieve with one worker process per core. Its wall time counts; the CPU time of the workers is not included."""

from collections.abc import Callable

from benchmarks.contenders import fedsieve
from benchmarks.workloads import Workload
from fedsieve.runtime.cores import count_cohort_processes


def prepare(workload: Workload) -> Callable[[], None]:
    """Return a function that trains one round of all clients. The workers start after the second exchange."""
    run_round = fedsieve.prepare(workload, num_workers=count_cohort_processes("auto"))
    run_round()
    run_round()
    return run_round
