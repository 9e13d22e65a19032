"""The baseline FedHT as a Flower app, on a grid in this process."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict

from helpers.flower_app import ProcessGrid

sys.path.insert(0, str(Path(__file__).parents[2] / "baselines" / "fedht"))
from fedht import client_app, server_app
from fedht.dataset import load_client, load_test
from fedht.strategy import FedHT, hard_threshold

pytestmark = pytest.mark.usefixtures("task_identity")


def test_the_strategy_returns_the_thresholded_mean():
    replies = []
    for node, (count, weight) in enumerate([(1, [4.0, 1.0, 0.0, -2.0]), (3, [0.0, 1.0, 0.0, -6.0])]):
        record = ArrayRecord({"weight": Array(np.array(weight)), "bias": Array(np.array([0.1 * node]))})
        asked = Message(RecordDict(), node, "train")
        replies.append(Message(RecordDict({"arrays": record, "metrics": MetricRecord({"num-examples": count})}), reply_to=asked))
    arrays, _ = FedHT(2).aggregate_train(1, replies)
    np.testing.assert_allclose(arrays["weight"].numpy(), [1.0, 0.0, 0.0, -5.0])
    np.testing.assert_allclose(arrays["bias"].numpy(), [0.075])
    np.testing.assert_array_equal(hard_threshold(np.array([1.0, -1.0, 1.0]), 2), [1.0, -1.0, 0.0])


def test_a_round_of_one_client_is_a_thresholded_gradient_step(tmp_path):
    config = {"num-server-rounds": 1, "num-clients": 1, "num-kept": 200, "iterative": False, "local-steps": 1}
    config |= {"learning-rate": 1e-4, "batch-size": 90, "seed": 0, "result": str(tmp_path / "result.json")}
    context = Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config=config)
    server_app.app(ProcessGrid(client_app.app, 1, config), context)
    (x, y), (x_test, y_test) = load_client(0), load_test()
    weight = hard_threshold(2e-4 * (x.T @ y) / len(x), 200)
    expected = np.square(x_test @ weight + 2e-4 * y.mean() - y_test).mean()
    rows = json.loads((tmp_path / "result.json").read_text())
    assert rows["1"]["nonzero"] == 200 and rows["1"]["mse"] == pytest.approx(expected, rel=1e-4)
