"""FedJAX: its federated averaging of the gated model, compiled step by step, dense, no packets encoded."""

import jax
import jax.numpy as jnp

jax.tree_map = jax.tree_util.tree_map  # FedJAX's last release is older than the JAX that removed this name
import fedjax  # noqa: E402

from benchmarks.workloads import Workload, draw_examples  # noqa: E402

TEMPERATURE, LOW, HIGH = 0.66, -0.1, 1.1


def prepare(workload: Workload):
    """Return a function that trains one round of all clients."""
    x, y = draw_examples(workload)

    def loss(params, batch, rng):
        noise = jnp.clip(jax.random.uniform(rng, params["log_alpha"].shape), 1e-6, 1 - 1e-6)
        logit = jnp.log(noise / (1 - noise))
        gates = jnp.clip(jax.nn.sigmoid((params["log_alpha"] + logit) / TEMPERATURE) * (HIGH - LOW) + LOW, 0, 1)
        logs = jax.nn.log_softmax(batch["x"] @ (params["weights"] * gates).T)
        return -jnp.take_along_axis(logs, batch["y"][:, None], axis=1).mean()

    algorithm = fedjax.algorithms.fed_avg.federated_averaging(
        jax.grad(loss),
        fedjax.optimizers.sgd(workload.learning_rate),
        fedjax.optimizers.sgd(1.0),
        fedjax.ShuffleRepeatBatchHParams(batch_size=workload.batch_size, num_epochs=None, num_steps=workload.local_steps, seed=1),
    )
    shape = (workload.num_outputs, workload.num_features)
    start = {"weights": 0.01 * jax.random.normal(jax.random.PRNGKey(0), shape), "log_alpha": jnp.full(shape, 2.2)}
    state = {"server": algorithm.init(start), "round": 0}
    parts = [slice(k * workload.examples_per_client, (k + 1) * workload.examples_per_client) for k in range(workload.num_clients)]
    rows = [fedjax.ClientDataset({"x": x[part], "y": y[part]}) for part in parts]

    def run_round() -> None:
        state["round"] += 1
        keys = jax.random.split(jax.random.PRNGKey(state["round"]), workload.num_clients)
        clients = [(str(k).encode(), rows[k], keys[k]) for k in range(workload.num_clients)]
        state["server"], _ = algorithm.apply(state["server"], clients)
        jax.block_until_ready(state["server"].params)

    return run_round
