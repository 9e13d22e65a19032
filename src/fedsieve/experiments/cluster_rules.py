"""Which runs a cluster can take."""

from fedsieve.experiments.config import ByteCounting
from fedsieve.experiments.resolve import ResolvedRun
from fedsieve.runtime.rounds import cohort_size
from fedsieve.runtime.simulate import Engine


def require_cluster(run: ResolvedRun, num_ranks: int) -> None:
    """Raise ValueError if the settings of a run make no sense on a cluster."""
    unused = {
        "--engine loop": run.engine is Engine.LOOP,
        f"--workers {run.workers}": run.workers not in (1, "auto"),
        "--byte-counting sampled": run.byte_counting is ByteCounting.SAMPLED,
        "--centralized": run.centralized,
    }
    if named := [name for name, is_set in unused.items() if is_set]:
        raise ValueError(f"{named[0]} has no effect on a cluster, whose ranks train the clients and send every message; leave it out")
    clients, participation = run.federation.clients, run.federation.participation
    cohort = cohort_size(clients, participation)
    if num_ranks > cohort:
        who = f"nodes, and there are {cohort}" if run.topology.is_gossip else f"clients in a round, and there are {cohort}"
        raise ValueError(f"{num_ranks} ranks are more than the {who}, so that some would have nothing to do; use --nproc-per-node {cohort}")
