"""The server of a deployment: gather the clients, train, say what happened, keep it on disk, go on after any end."""

import json
import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from fedsieve.deployment.flower import Network, QuorumError
from fedsieve.deployment.plan import Plan
from fedsieve.experiments.run_info import layout
from fedsieve.experiments.training import Progress, Standing, gate_histogram, traffic
from fedsieve.models.sparse_model import Card, Model, pack
from fedsieve.objectives.linear import Linear
from fedsieve.objectives.losses import Loss
from fedsieve.runtime.rounds import Population, Round, start, train
from fedsieve.storage import run_directory
from fedsieve.storage.run_log import Journal, Pace, past

LOSSES = {functional.cross_entropy: Loss.SOFTMAX, functional.binary_cross_entropy_with_logits: Loss.MULTILABEL}
"""What a module's outputs mean, by the loss it is trained with; of any other they are numbers."""
PATIENCE = frozenset({"quorum", "retries", "round-seconds", "start-seconds", "run-dir"})
"""Settings that decide no result: a run may go on with others."""


def lead(plan: Plan, network: Network) -> None:
    """Train over a network to the end of the plan, from where the run in its folder stands."""
    torch.set_num_threads(plan.threads)
    begun = Standing(start(plan.algorithm, plan.objective, plan.seed, plan.dtype, plan.device))
    if plan.run_dir is None:
        say("run-dir is not set: nothing is kept, and a run that is cut off begins again")
        for _ in steps(plan, network, Population(plan.clients, network.gather()), begun):
            pass
        return
    folder, config = plan.run_dir, sections({name: value for name, value in plan.settings.items() if name not in PATIENCE})
    folder.mkdir(parents=True, exist_ok=True)
    with run_directory.held(folder):
        done, damaged = past(folder, begun, config, plan.rounds)
        for text in damaged:
            say(f"passed over checkpoint {text}; an older one is used")
        if done.standing.rounds:
            say(f"{done.standing.rounds} of {plan.rounds} rounds are done, going on")
        if done.standing.rounds == plan.rounds and (folder / run_directory.RESULT).exists():
            say("nothing is left to do")
            return
        population = Population(plan.clients, network.gather())
        with run_directory.writing(folder):
            run_directory.replace(folder / run_directory.CONFIG, run_directory.toml(sections(plan.settings)).encode())
            about = {"layout": layout(plan.objective.layout), "clients": {"count": plan.clients}}
            run_directory.replace(folder / run_directory.ABOUT, json.dumps(about).encode())
            with Journal(folder, config, Pace(seconds=0.0), done) as journal:
                for step in steps(plan, network, population, done.standing):
                    journal.add(step)
            theta = plan.algorithm.theta(journal.server)
            run_directory.replace(folder / run_directory.MODEL, pack(model_of(plan, theta, network.directory.row)))
            run_directory.replace(folder / run_directory.RESULT, json.dumps(result(plan, journal.rows, theta), indent=1).encode())


def steps(plan: Plan, network: Network, population: Population, standing: Standing) -> Iterator[Progress]:
    """The rounds that are left, measured and told."""
    began, up, down = time.monotonic() - standing.seconds, network.envelope_up, network.envelope_down
    for done in train(
        plan.algorithm,
        standing.server,
        population,
        plan.participation,
        network,
        plan.rounds,
        plan.seed,
        dtype=plan.dtype,
        device=plan.device,
        first=standing.rounds,
        known_start=plan.known_start,
        screen=plan.screen,
    ):
        if len(done.replied) < (needed := plan.needed(len(done.cohort))):
            raise QuorumError(f"round {done.number + 1}: {len(done.replied)} replies passed the screen, {needed} are needed{refused(done)}")
        theta = plan.algorithm.theta(done.server)
        row: dict[str, Any] = {"round": done.number + 1, **measured(plan, theta)}
        row |= {name: float(value) for name, value in plan.algorithm.info(done.server).items()}
        row |= {**traffic(done.up, done.down), "envelope_up": network.envelope_up - up, "envelope_down": network.envelope_down - down}
        row |= {"cohort": done.cohort, "replied": done.replied, "rejected": done.rejected, "seconds": time.monotonic() - began}
        up, down = network.envelope_up, network.envelope_down
        tell(plan, done)
        yield Progress(done, theta, row, gate_histogram(plan.algorithm, done.server))


def measured(plan: Plan, theta: Tensor) -> dict[str, float]:
    """What the app's own measure says, as plain numbers."""
    return {} if plan.measure is None else {name: float(value) for name, value in plan.measure(theta).items()}


def tell(plan: Plan, done: Round) -> None:
    """One line a round."""
    say(f"round {done.number + 1} of {plan.rounds}: {len(done.replied)} of {len(done.cohort)} clients replied{refused(done)}")


def refused(done: Round) -> str:
    """Whose reply is missing or was refused, and why."""
    return "".join(f"; client {client}: {reason}" for client, reason in done.rejected)


def say(text: str) -> None:
    """To the server's log, at once."""
    print(f"fedsieve: {text}", flush=True)


def result(plan: Plan, rows: list[dict[str, Any]], theta: Tensor) -> dict[str, Any]:
    """The result by the names of `--json`."""
    gated = theta[: plan.objective.layout.gated]
    nonzero = int((gated != 0).sum())
    totals = {name: sum(row[name] for row in rows) for name in rows[-1] if name.startswith(("bytes_", "envelope_"))}
    clients = sorted(client for row in rows for client, _ in row["rejected"])
    return {
        "method": plan.settings.get("method", "sieve"),
        "seed": plan.seed,
        "rounds": len(rows),
        "size": gated.numel(),
        "nonzero": nonzero,
        "density": nonzero / gated.numel(),
        **measured(plan, theta),
        **totals,
        "rejected": {str(client): clients.count(client) for client in dict.fromkeys(clients)},
        "seconds": rows[-1]["seconds"],
    }


def model_of(plan: Plan, theta: Tensor, row: tuple[int, ...]) -> Model:
    """The model as every run leaves it: weights that are not zero, their places and their meaning."""
    objective, flat = plan.objective, theta.float().numpy(force=True)
    if isinstance(objective, Linear):
        loss, build = objective.loss, None
    else:
        maker = objective.build or type(objective.module)
        loss, build = LOSSES.get(objective.loss, Loss.SQUARED), f"{maker.__module__}:{maker.__qualname__}"
    outputs = objective.predict(theta, torch.zeros(1, *row, dtype=theta.dtype)).shape[-1]
    classes = None if loss is Loss.SQUARED else tuple(map(str, range(2 if loss is Loss.LOGISTIC else outputs)))
    return Model(
        index=np.flatnonzero(flat).astype(np.int32),
        value=flat[np.flatnonzero(flat)],
        tensors={name: tuple(shape) for name, (_, shape) in objective.places.items()},
        free=objective.layout.free,
        card=Card(task="file", method=plan.settings.get("method", "sieve"), loss=loss, row=row, classes=classes, build=build),
    )


def sections(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Flower's flat names as a settings file has them: what is before a dot is a section."""
    tree: dict[str, Any] = {}
    for name, value in settings.items():
        *section, last = name.rsplit(".", 1)
        (tree.setdefault(section[0], {}) if section else tree)[last] = value
    return tree
