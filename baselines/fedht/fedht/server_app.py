"""fedht: the server of Fed-HT and FedIter-HT."""

import json
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp

from fedht.dataset import load_test
from fedht.strategy import FedHT

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train from zero weights, and measure the squared error on the test examples after every round."""
    config, (x, _) = context.run_config, load_test()
    strategy = FedHT(
        config["num-kept"], fraction_evaluate=0.0, min_train_nodes=config["num-clients"], min_available_nodes=config["num-clients"]
    )
    start = ArrayRecord({"weight": Array(np.zeros(x.shape[1], np.float32)), "bias": Array(np.zeros(1, np.float32))})
    result = strategy.start(grid, start, config["num-server-rounds"], evaluate_fn=evaluate)
    if config["result"]:
        rows = {number: dict(metrics) for number, metrics in result.evaluate_metrics_serverapp.items()}
        Path(config["result"]).write_text(json.dumps(rows))


def evaluate(_: int, arrays: ArrayRecord) -> MetricRecord:
    """Return the mean squared error on the test examples, and the number of weights that are not zero."""
    (x, y), weight = load_test(), arrays["weight"].numpy()
    return MetricRecord({"mse": float(np.square(x @ weight + arrays["bias"].numpy() - y).mean()), "nonzero": int((weight != 0).sum())})
