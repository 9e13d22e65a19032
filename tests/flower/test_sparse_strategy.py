"""SparseStrategy and sparse_mod around a small app whose training is a formula, on a grid in this process."""

import logging
import random

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAdam,
    FedAvg,
    FedProx,
)

from fedsieve.core.types import Clock, Layout
from fedsieve.flower import SparseStrategy, sparse_mod
from fedsieve.flower.array_layout import ArrayLayout, to_numpy
from fedsieve.flower.black_box import OFFERED, _trained_client, build_algorithm
from fedsieve.flower.sparse_messages import SPARSE_KEY, bytes_record
from helpers.flower_app import ProcessGrid

NODES, ROUNDS = 3, 3
pytestmark = pytest.mark.usefixtures("task_identity")


def initial_arrays():
    rng = np.random.default_rng(0)
    return ArrayRecord(
        {
            "hidden.weight": Array(rng.normal(size=(20, 30)).astype(np.float32)),
            "hidden.bias": Array(np.zeros(20, np.float32)),
            "norm.running_mean": Array(np.zeros(20, np.float32)),
            "norm.num_batches_tracked": Array(np.array(0)),
            "last.weight": Array(rng.normal(size=(5, 20))),
        }
    )


def target(client):
    rng = np.random.default_rng(1 + client)
    return {"hidden.weight": np.sign(rng.normal(size=(20, 30))) * (rng.random((20, 30)) < 0.1), "last.weight": rng.normal(size=(5, 20))}


def make_app(mods, seen):
    """An app that moves each weight halfway to a target of its own, and counts its calls in an integer array."""
    app = ClientApp(mods=mods)

    @app.train()
    def train(message, context):
        client, arrays = context.node_config["partition-id"], to_numpy(message.content["arrays"])
        seen.append(("train", client, arrays, message))
        moved = dict(arrays)
        for name, goal in target(client).items():
            moved[name] = (arrays[name] + 0.5 * (goal - arrays[name])).astype(arrays[name].dtype)
        moved["hidden.bias"] = arrays["hidden.bias"] + np.float32(client + 1)
        moved["norm.running_mean"] = np.full(20, 1 / 3, np.float32)
        moved["norm.num_batches_tracked"] = arrays["norm.num_batches_tracked"] + 7
        metrics = MetricRecord({"loss": float(client), "num-examples": 10 * (client + 1)})
        record = ArrayRecord({name: Array(np.asarray(value)) for name, value in moved.items()})
        return Message(RecordDict({"arrays": record, "metrics": metrics}), reply_to=message)

    @app.evaluate()
    def evaluate(message, context):
        seen.append(("evaluate", context.node_config["partition-id"], to_numpy(message.content["arrays"]), message))
        return Message(RecordDict({"metrics": MetricRecord({"accuracy": 0.5, "num-examples": 10})}), reply_to=message)

    return app


class Run:
    """A finished run: result, grid, what the app has seen, and what the server evaluated."""

    def __init__(self, strategy, mods=(sparse_mod,), rounds=ROUNDS, change_reply=lambda node, reply: reply, arrays=None):
        random.seed(0)
        np.random.seed(0)
        self.seen, self.models = [], []
        self.grid = ProcessGrid(make_app(list(mods), self.seen), NODES, change_reply=change_reply)

        def evaluate(server_round, arrays):
            self.models.append(to_numpy(arrays))

        self.result = strategy.start(
            self.grid, arrays or initial_arrays(), rounds, train_config=ConfigRecord({"lr": 0.1}), evaluate_fn=evaluate
        )

    @property
    def model(self):
        return to_numpy(self.result.arrays)


def fed_avg(**options):
    return FedAvg(min_train_nodes=NODES, min_available_nodes=NODES, **options)


def gated(arrays):
    return np.concatenate([arrays[name].reshape(-1) for name in ("hidden.weight", "last.weight")])


def assert_equal_arrays(one, other):
    assert one.keys() == other.keys()
    for name in one:
        np.testing.assert_array_equal(one[name], other[name], err_msg=name)


def test_messages_with_all_weights_and_all_bits_give_the_model_of_the_wrapped_strategy():
    plain = Run(fed_avg(), mods=()).model
    sparse = Run(SparseStrategy(fed_avg(), density=1.0, algorithm="fed-avg", bits=32)).model
    for name, array in sparse.items():
        np.testing.assert_allclose(array, plain[name], rtol=1e-3, atol=1e-6, err_msg=name)


def test_the_app_receives_the_arrays_and_settings_it_would_receive_without_the_mod():
    plain, sparse = Run(fed_avg(), mods=()), Run(SparseStrategy(fed_avg(), density=0.1))
    for (kind, _, arrays, message), (kind2, _, arrays2, message2) in zip(plain.seen, sparse.seen, strict=True):
        assert kind == kind2 and list(message.content) == list(message2.content)
        assert dict(message.content["config"]) == dict(message2.content["config"])
        assert {name: (a.shape, a.dtype) for name, a in arrays2.items()} == {
            name: (a.shape, initial_arrays()[name].numpy().dtype) for name, a in arrays.items()
        }


@pytest.mark.parametrize("algorithm", OFFERED)
def test_the_returned_model_keeps_at_most_the_density_of_its_gated_weights(algorithm):
    run = Run(SparseStrategy(fed_avg(), density=0.1, algorithm=algorithm))
    assert 0 < (gated(run.model) != 0).sum() <= 70
    assert (run.model["hidden.bias"] != 0).all()
    metrics = run.result.train_metrics_clientapp[ROUNDS]
    assert metrics["density"] == pytest.approx((gated(run.model) != 0).mean())


def test_a_sparse_run_approaches_the_clients_mean_target():
    run = Run(SparseStrategy(fed_avg(), density=0.25), rounds=16)
    goal = sum((client + 1) * gated(target(client)) for client in range(NODES)) / 6
    errors = [np.linalg.norm(gated(model) - goal) for model in run.models]
    assert errors[-1] < 0.15 * errors[0] and errors[-1] < errors[len(errors) // 2]


def test_arrays_without_gates_are_averaged_exactly_and_keep_their_types():
    model = Run(SparseStrategy(fed_avg(), density=0.1)).model
    np.testing.assert_allclose(model["hidden.bias"], ROUNDS * np.full(20, (1 * 1 + 2 * 2 + 3 * 3) / 6), rtol=1e-6)
    np.testing.assert_allclose(model["norm.running_mean"], 1 / 3, rtol=1e-6)
    assert model["norm.num_batches_tracked"] == 7 * ROUNDS
    assert model["norm.num_batches_tracked"].dtype == np.int64 and model["last.weight"].dtype == np.float64


def test_clients_evaluate_exactly_the_returned_model():
    run = Run(SparseStrategy(fed_avg(), density=0.1))
    evaluated = [arrays for kind, _, arrays, _ in run.seen if kind == "evaluate"]
    for i, arrays in enumerate(evaluated):
        assert_equal_arrays(arrays, run.models[1 + i // NODES])
    assert run.result.evaluate_metrics_clientapp[1]["accuracy"] == 0.5


def test_bytes_of_a_round_are_those_of_its_messages():
    sizes = []

    def record(node, reply):
        sizes.append(sum(len(array.data) for key in reply.content.array_records.values() for array in key.values()))
        return reply

    run = Run(SparseStrategy(fed_avg(fraction_evaluate=0.0), density=0.1), change_reply=record)
    for server_round, metrics in run.result.train_metrics_clientapp.items():
        assert metrics["bytes-up"] == sum(sizes[NODES * (server_round - 1) : NODES * server_round])
    sent = [message.content for message in run.grid.sent]
    down = [
        sum(len(array.data) for array in content["arrays"].values()) + sum(len(value) for value in content[SPARSE_KEY].values())
        for content in sent
    ]
    assert run.result.train_metrics_clientapp[1]["bytes-down"] == sum(down[:NODES])
    last = run.result.train_metrics_clientapp[ROUNDS]
    assert last["bytes-up"] < NODES * sum(array.numpy().nbytes for array in initial_arrays().values()) / 4
    assert last["loss"] == pytest.approx((0 * 1 + 1 * 2 + 2 * 3) / 6), "the metrics of the app stay"


def test_a_run_repeats_bit_for_bit():
    one, again, other = (Run(SparseStrategy(fed_avg(fraction_evaluate=0.0), density=0.1, seed=seed), rounds=2) for seed in (3, 3, 4))
    assert_equal_arrays(one.model, again.model)
    assert not np.array_equal(gated(one.model), gated(other.model))


# Malformed replies


def replace_packet(reply, **parts):
    reply.content["arrays"] = bytes_record(**{name: array.data for name, array in reply.content["arrays"].items()} | parts)


def replace_metrics(reply, **metrics):
    reply.content["metrics"] = MetricRecord(dict(reply.content["metrics"]) | metrics)


def drop_records(reply):
    reply.content = RecordDict()


def add_array_record(reply):
    reply.content["more"] = ArrayRecord([np.ones(3)])


def add_metric_record(reply):
    reply.content["more"] = MetricRecord({"num-examples": 3})


def drop_weight(reply):
    reply.content["metrics"] = MetricRecord({"loss": 1.0})


def send_plain_arrays(reply):
    reply.content["arrays"] = initial_arrays()


FAULTS = {
    "plain arrays": send_plain_arrays,
    "no records": drop_records,
    "two array records": add_array_record,
    "two metric records": add_metric_record,
    "no packet": lambda reply: replace_packet(reply, packet=b""),
    "truncated": lambda reply: replace_packet(reply, packet=reply.content["arrays"]["packet"].data[:-9]),
    "oversized": lambda reply: replace_packet(reply, packet=bytes(10**5)),
    "short dense": lambda reply: replace_packet(reply, dense=b"1234"),
    "NaN dense": lambda reply: replace_packet(reply, dense=b"\xff" * len(reply.content["arrays"]["dense"].data)),
    "other metrics": lambda reply: replace_metrics(reply, more=1.0),
    "a list for a number": lambda reply: replace_metrics(reply, loss=[1.0, 2.0]),
    "NaN examples": lambda reply: replace_metrics(reply, **{"num-examples": float("nan")}),
    "no examples": lambda reply: replace_metrics(reply, **{"num-examples": 0}),
    "a list of examples": lambda reply: replace_metrics(reply, **{"num-examples": [3]}),
    "no weight": drop_weight,
}


def test_every_malformed_reply_is_named_and_left_out_and_the_run_goes_on(caplog):
    """Node 101 commits one fault a round; the model is that of a run in which it never replies, bit for bit."""
    faults = iter(FAULTS.values())

    def corrupt(node, reply):
        if node == 101 and reply.metadata.message_type == "train":
            next(faults)(reply)
        return reply

    def lose(node, reply):
        return None if node == 101 and reply.metadata.message_type == "train" else reply

    logging.getLogger("flwr").propagate = True
    with caplog.at_level(logging.WARNING, "flwr"):
        run = Run(SparseStrategy(fed_avg(fraction_evaluate=0.0), density=0.1), rounds=len(FAULTS), change_reply=corrupt)
    assert caplog.text.count("the reply of node 101 is not aggregated") == len(FAULTS)
    lost = Run(SparseStrategy(fed_avg(fraction_evaluate=0.0), density=0.1), rounds=len(FAULTS), change_reply=lose)
    assert_equal_arrays(run.model, lost.model)


def test_a_malformed_evaluation_does_not_stop_the_run():
    def corrupt(node, reply):
        if node == 101 and reply.metadata.message_type == "evaluate":
            reply.content = RecordDict()
        return reply

    assert Run(SparseStrategy(fed_avg(), density=0.1), change_reply=corrupt).result.evaluate_metrics_clientapp[1]["accuracy"] == 0.5


def test_a_round_without_valid_replies_changes_nothing():
    def corrupt(node, reply):
        if reply.metadata.message_type == "train":
            drop_records(reply)
        return reply

    zeros = ArrayRecord({name: Array(np.zeros_like(array.numpy())) for name, array in initial_arrays().items()})
    run = Run(SparseStrategy(fed_avg(), density=0.1), change_reply=corrupt, arrays=zeros)
    assert not run.result.arrays
    assert all(np.abs(array).max() < 1e-30 for _, _, arrays, _ in run.seen for array in arrays.values())
    assert run.result.train_metrics_clientapp[1]["bytes-down"] > 0


def test_a_client_without_the_mod_is_told_to_add_it(caplog):
    logging.getLogger("flwr").propagate = True
    with caplog.at_level(logging.INFO, "flwr"):
        Run(SparseStrategy(fed_avg(), density=0.1), mods=(), rounds=1)
    assert "ClientApp(mods=[sparse_mod])" in caplog.text


def test_the_mod_leaves_messages_of_other_strategies_unchanged():
    assert_equal_arrays(Run(fed_avg(), mods=(sparse_mod,)).model, Run(fed_avg(), mods=()).model)


# Other strategies


def test_fed_prox_gives_clients_its_proximal_weight():
    run = Run(SparseStrategy(FedProx(min_train_nodes=NODES, proximal_mu=0.3), density=0.1))
    assert {message.content["config"]["proximal-mu"] for kind, *_, message in run.seen if kind == "train"} == {0.3}


def test_fed_adam_moves_every_round_and_stays_within_the_density():
    run = Run(SparseStrategy(FedAdam(min_train_nodes=NODES), density=0.1))
    assert (gated(run.model) != 0).sum() <= 70
    assert all(not np.array_equal(gated(one), gated(other)) for one, other in zip(run.models[1:], run.models[2:], strict=False))


def float_arrays():
    return ArrayRecord({name: array for name, array in initial_arrays().items() if name.endswith("weight")})


def test_server_side_clipping_bounds_what_one_client_changes():
    """Without noise, the broadcast weights move by at most the clipping norm a round."""
    clipping, moves = 0.01, []

    class Observed(FedAvg):
        def configure_train(self, server_round, arrays, *rest):
            self.given = to_numpy(arrays)
            return super().configure_train(server_round, arrays, *rest)

        def aggregate_train(self, server_round, replies):
            replies = list(replies)
            moves.extend(
                np.sqrt(sum(((array - self.given[name]) ** 2).sum() for name, array in to_numpy(reply.content["arrays"]).items()))
                for reply in replies
            )
            return super().aggregate_train(server_round, replies)

    inner = DifferentialPrivacyServerSideFixedClipping(Observed(min_train_nodes=NODES), 0.0, clipping, NODES)
    app = ClientApp(mods=[sparse_mod])

    @app.train()
    def train(message, context):
        moved = [array.numpy() + 1 for array in message.content["arrays"].values()]
        record = ArrayRecord(dict(zip(message.content["arrays"], map(Array, moved), strict=True)))
        return Message(RecordDict({"arrays": record, "metrics": MetricRecord({"num-examples": 1})}), reply_to=message)

    SparseStrategy(inner, density=0.2).start(ProcessGrid(app, NODES), float_arrays(), 2)
    assert len(moves) == 2 * NODES and max(moves) <= clipping * (1 + 1e-3)


def test_client_side_clipping_is_refused_because_messages_may_be_longer_than_the_clip():
    with pytest.raises(ValueError, match="use its server-side variant"):
        SparseStrategy(DifferentialPrivacyClientSideFixedClipping(fed_avg(), 1.0, 1.0, NODES))


def test_a_wrapper_outside_is_refused():
    with pytest.raises(ValueError, match="must be the outermost strategy"):
        Run(DifferentialPrivacyServerSideFixedClipping(SparseStrategy(fed_avg()), 1.0, 1.0, NODES))


# Options


@pytest.mark.parametrize("name", ["flops", "flops-pa", "gradual", "nonsense"])
def test_an_algorithm_that_needs_more_than_the_update_is_refused_with_those_offered(name):
    with pytest.raises(ValueError, match=f"{name!r} is none of SparseStrategy.*it offers sieve, sign-ht"):
        SparseStrategy(fed_avg(), algorithm=name)


def test_options_of_training_and_of_the_server_step_are_refused():
    for option, owner in (("learning_rate", "the train function"), ("server_learning_rate", "the wrapped strategy")):
        with pytest.raises(ValueError, match=f"option {option} .* {owner} decides it"):
            SparseStrategy(fed_avg(), **{option: 1.0})
    with pytest.raises(ValueError, match="search-fractoin is unknown; did you mean"):
        SparseStrategy(fed_avg(), search_fractoin=0.5)
    with pytest.raises(ValueError, match=r"algorithm\.anneal-end 0\.3 has no effect without --algorithm\.density-schedule cubic"):
        SparseStrategy(fed_avg(), algorithm="fed-round-ht", density_schedule="constant", anneal_end=0.3)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"strategy": FedAvg}, r"wraps a strategy of Flower, such as FedAvg\(\); got <class"),
        ({"density": "dense"}, "density takes a number; got dense"),
        ({"density": 0}, "density must be above 0"),
        ({"seed": "a"}, "seed takes a whole number; got a"),
    ],
)
def test_wrong_arguments_are_refused_when_the_strategy_is_made(wrong, message):
    with pytest.raises(ValueError, match=message):
        SparseStrategy(**{"strategy": fed_avg()} | wrong)


def test_a_model_without_gated_arrays_and_one_with_nan_are_refused_with_a_remedy():
    app = make_app([sparse_mod], [])
    with pytest.raises(ValueError, match="no array with gates"):
        SparseStrategy(fed_avg()).start(ProcessGrid(app, NODES), ArrayRecord([np.zeros(3)]), 1)
    with pytest.raises(ValueError, match="ungated="):
        SparseStrategy(fed_avg()).start(ProcessGrid(app, NODES), ArrayRecord([np.full((3, 3), np.nan)]), 1)
    with pytest.raises(ValueError, match=r"matches no array; there are hidden\.weight"):
        SparseStrategy(fed_avg(), ungated="head.*").start(ProcessGrid(app, NODES), initial_arrays(), 1)


def test_arrays_named_by_the_user_are_sent_whole():
    model = Run(SparseStrategy(fed_avg(), density=0.1, ungated="last.*")).model
    assert (model["last.weight"] != 0).all() and (model["hidden.weight"] != 0).sum() <= 60


def test_arrays_without_gates_are_vectors_and_integers():
    layout = ArrayLayout.of(to_numpy(initial_arrays()), ())
    assert [spec.name for spec in layout.gated] == ["hidden.weight", "last.weight"]
    assert ArrayLayout.from_bytes(layout.to_bytes()) == layout


# What clients keep


def test_a_client_keeps_its_residual_only_if_its_reply_is_aggregated():
    def corrupt(node, reply):
        if node == 101 and reply.metadata.message_type == "train" and len(run_rounds) < 1:
            run_rounds.append(1)
            drop_records(reply)
        return reply

    run_rounds = []
    run = Run(SparseStrategy(fed_avg(), density=0.1, algorithm="fed-ef"), rounds=3, change_reply=corrupt)
    kept = {node: sorted({key.split(".")[0] for key in context.state["fedsieve.memory"]}) for node, context in run.grid.contexts.items()}
    assert kept == {100: ["1", "2"], 101: ["1", "2"], 102: ["1", "2"]}
    assert not any("residual" in key for context in Run(SparseStrategy(fed_avg())).grid.contexts.values() for key in context.state)


def test_a_weight_that_grew_has_a_more_open_gate_than_one_that_shrank():
    algorithm, layout = build_algorithm("sieve", 0.5, {"learn_gates": True}), Layout(8, {"w": (slice(0, 8), (2, 4))})
    weights = torch.tensor([1.0, -1.0, 1.0, -1.0, 0.1, 0.1, 0.1, 0.1])
    clock = Clock(0, 10)
    draw = lambda purpose, size: torch.full((size,), 0.5)  # noqa: E731
    packet = algorithm.broadcast(algorithm.init(layout, weights, draw), clock, draw)
    sent = packet.field_dense("weights", torch.float32)
    client = _trained_client(algorithm, packet, layout, sent + torch.tensor([0.5, -0.5, -0.5, 0.5, 0.0, 0.0, 0.0, 0.0]), clock)
    (log_alpha,) = client.log_alpha
    assert log_alpha[:2].min() > log_alpha[2:4].max()
    unchanged = _trained_client(algorithm, packet, layout, sent, clock)
    assert (log_alpha[4:] == unchanged.log_alpha[0, 4:]).all()


def test_gates_are_learned_only_if_the_user_says_so_as_in_fit():
    assert not build_algorithm("sieve", 0.5, {}).learn_gates
    assert build_algorithm("sieve", 0.5, {"learn_gates": True}).learn_gates
