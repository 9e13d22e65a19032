"""fedht: local steps of the linear model, thresholded after each step in FedIter-HT."""

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedht.dataset import load_client
from fedht.strategy import hard_threshold

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """theta <- theta - eta g, with the gradient of the mean squared error over a mini-batch; then H_m in FedIter-HT."""
    config, client = context.run_config, context.node_config["partition-id"]
    weight, bias = (message.content["arrays"][name].numpy() for name in ("weight", "bias"))
    x, y = load_client(client)
    order = np.random.default_rng((config["seed"], message.content["config"]["server-round"], client))
    rate = np.float32(config["learning-rate"])
    for _ in range(config["local-steps"]):
        rows = order.choice(len(x), min(config["batch-size"], len(x)), replace=False)
        residual = x[rows] @ weight + bias - y[rows]
        weight = weight - rate * 2 * (x[rows].T @ residual / len(rows))
        bias = bias - rate * 2 * residual.mean(keepdims=True)
        if config["iterative"]:
            weight = hard_threshold(weight, config["num-kept"])
    metrics = MetricRecord({"num-examples": len(x), "loss": float(np.square(x @ weight + bias - y).mean())})
    return Message(
        RecordDict({"arrays": ArrayRecord({"weight": Array(weight), "bias": Array(bias)}), "metrics": metrics}), reply_to=message
    )
