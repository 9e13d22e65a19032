"""The diff in docs/flower.md, applied to Flower's PyTorch quickstart on the digits of scikit-learn."""

import json
import re

import pytest

from helpers.flower import COMPLETED, local_cluster, wait_for_run
from helpers.flower_quickstart import PAGE, PARTITIONS, convert, run_in_process


def assert_converted(result, rounds):
    """The messages of the converted app are sparse, its metrics are there, its BatchNorm counts batches."""
    last = result["train"][str(rounds)]
    assert {"train_loss", "bytes-up", "bytes-down", "density"} <= last.keys()
    assert {"eval_acc", "bytes-down"} <= result["evaluate"][str(rounds)].keys()
    gated = {name: count for name, count in result["nonzero"].items() if name.endswith("weight") and "norm" not in name}
    nonzero, size = (sum(count[i] for count in gated.values()) for i in (0, 1))
    assert 0 < nonzero <= 0.1 * size and last["density"] == pytest.approx(nonzero / size)
    assert result["nonzero"]["norm1.num_batches_tracked"] == [1, 1] and result["nonzero"]["norm1.weight"] == [16, 16]
    assert last["bytes-up"] < PARTITIONS * 4 * size / 10


def test_the_conversion_is_a_diff_of_at_most_six_lines():
    lines = [line for diff in re.findall(r"```diff\n(.*?)```", PAGE.read_text(), flags=re.DOTALL) for line in diff.splitlines()]
    assert 0 < sum(line[:1] in "+-" and not line.startswith(("+++", "---")) for line in lines if line) <= 6


@pytest.mark.usefixtures("task_identity")
def test_the_converted_quickstart_trains_and_reports_its_bytes(tmp_path):
    rounds = 4
    result = run_in_process(convert(tmp_path / "app"), **{"num-server-rounds": rounds})
    assert_converted(result, rounds)
    assert result["server"][str(rounds)]["accuracy"] > 0.2 > result["server"]["0"]["accuracy"]


@pytest.mark.long
def test_flwr_run_executes_the_converted_quickstart_in_a_simulation(tmp_path):
    rounds, path = 4, tmp_path / "result.json"
    app = convert(tmp_path / "app")
    with local_cluster(tmp_path / "logs") as cluster:
        cluster.start_superlink(("--insecure", "--simulation"))
        run = cluster.submit(app, {"num-server-rounds": rounds, "local-epochs": 1, "result": str(path)}, PARTITIONS)
        assert wait_for_run(cluster, run)[0] == COMPLETED, cluster.log_tail(f"server-{run}")
    assert_converted(json.loads(path.read_text()), rounds)
    assert "sparse messages:" in (tmp_path / "logs" / f"server-{run}.log").read_text()
