"""`fedsieve.fit`: the module it returns, its callback, and the input it refuses."""

import subprocess
import sys
from copy import deepcopy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import prune
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import fedsieve
from fedsieve.algorithms.defaults import DENSITY_ANNEALING, network_options
from fedsieve.algorithms.sieve import Sieve
from fedsieve.core.optimizers import StepRule
from fedsieve.experiments.fit_arguments import build_algorithm, set_local_epochs

NETWORK_OPTIONS = network_options(Sieve)
SHORT = Sieve(**NETWORK_OPTIONS | {"local_steps": 10})


def make_clients(clients=3, count=40, seed=0):
    """Two classes that depend on the first two of six features."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(clients, count, 6)).astype(np.float32)
    return [(torch.from_numpy(part), torch.from_numpy((part[:, 0] + part[:, 1] > 0).astype(np.int64))) for part in x]


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))


def nonzero(module):
    return sum(int((part != 0).sum()) for part in module.parameters())


def accuracy(module, clients):
    return float(np.mean([(module(x).argmax(1) == y).float().mean() for x, y in clients]))


def test_the_module_is_a_plain_one_with_exact_zeros_and_better():
    clients, before = make_clients(), network()
    kept = deepcopy(before.state_dict())
    model, run = fedsieve.fit(before, functional.cross_entropy, clients, density=0.3, algorithm=SHORT, rounds=10)
    assert type(model) is nn.Sequential and model is not before
    assert nonzero(model) == run.nonzero == int(0.3 * 74)
    assert all(torch.equal(kept[name], value) for name, value in before.state_dict().items())
    assert accuracy(model, clients) > 0.85 > accuracy(before, clients)
    assert run.rounds == len(run.history) == 10 and run.bytes_up == sum(row["bytes_up"] for row in run.history) > 0
    assert run.history[-1]["loss"] < run.history[0]["loss"]


def test_the_module_loads_without_fedsieve(tmp_path):
    clients = make_clients()
    model, _ = fedsieve.fit(network(), nn.CrossEntropyLoss(), clients, density=0.3, algorithm=SHORT, rounds=2)
    torch.save(model, tmp_path / "whole.pt")
    torch.save(model.state_dict(), tmp_path / "state.pt")
    torch.save((clients[0][0], model(clients[0][0])), tmp_path / "answers.pt")
    code = f"""
import sys
sys.modules["fedsieve"] = None
import torch
from torch import nn
x, expected = torch.load(r"{tmp_path / "answers.pt"}")
whole = torch.load(r"{tmp_path / "whole.pt"}", weights_only=False)
again = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
again.load_state_dict(torch.load(r"{tmp_path / "state.pt"}"))
assert torch.equal(whole(x), expected) and torch.equal(again(x), expected)
assert not [name for name in sys.modules if name.startswith("fedsieve.")]
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_pairs_datasets_and_loaders_of_the_same_examples_give_equal_results():
    clients = make_clients()
    forms = [
        clients,
        [(x.numpy(), y.numpy()) for x, y in clients],
        [TensorDataset(x, y) for x, y in clients],
        [DataLoader(TensorDataset(x, y), batch_size=7) for x, y in clients],
    ]
    models = [fedsieve.fit(network(), functional.cross_entropy, form, density=0.3, algorithm=SHORT, rounds=1)[0] for form in forms]
    for model in models[1:]:
        assert all(torch.equal(a, b) for a, b in zip(models[0].parameters(), model.parameters(), strict=True))


def test_a_callback_is_called_every_round_and_can_stop():
    seen = []

    def stop_after_three(fit):
        seen.append((fit.rounds, nonzero(fit.module), fit.bytes_up))
        return fit.rounds == 3

    model, run = fedsieve.fit(
        network(), functional.cross_entropy, make_clients(), density=0.3, algorithm=SHORT, rounds=20, callback=stop_after_three
    )
    assert [number for number, _, _ in seen] == [1, 2, 3] and run.rounds == 3
    assert {count for _, count, _ in seen} == {22} and seen[-1][2] == run.bytes_up and nonzero(model) == 22
    _, run = fedsieve.fit(
        network(), functional.cross_entropy, make_clients(), density=0.3, algorithm=SHORT, rounds=2, callback=lambda fit: fit
    )
    assert run.rounds == 2, "only True stops"


def test_training_starts_from_the_weights_of_the_module():
    clients, module = make_clients(), network()
    optimizer = torch.optim.Adam(module.parameters(), 0.05)
    for _ in range(60):
        optimizer.zero_grad()
        sum(functional.cross_entropy(module(x), y) for x, y in clients).backward()
        optimizer.step()
    short = {"density": 0.6, "algorithm": SHORT, "rounds": 2}
    model, run = fedsieve.fit(module, functional.cross_entropy, clients, **short)
    _, fresh = fedsieve.fit(network(), functional.cross_entropy, clients, **short)
    assert run.history[0]["loss"] < fresh.history[0]["loss"]
    assert accuracy(model, clients) > 0.9


def test_frozen_parameters_are_neither_trained_nor_sent_nor_counted():
    module = network()
    module[0].requires_grad_(False)
    model, run = fedsieve.fit(module, functional.cross_entropy, make_clients(), density=0.5, algorithm=SHORT, rounds=2)
    assert torch.equal(model[0].weight, module[0].weight) and run.nonzero == 9 == nonzero(model[2])
    assert not model[0].weight.requires_grad


def test_ungated_parameters_are_kept_and_not_counted():
    model, run = fedsieve.fit(
        network(), functional.cross_entropy, make_clients(), density=0.25, algorithm=SHORT, rounds=2, ungated="*.bias"
    )
    assert run.nonzero == 16 and run.density == 0.25
    assert bool((model[0].bias != 0).all() and (model[2].bias != 0).all())


def test_whole_neurons_are_kept_or_dropped():
    plain = Sieve(**NETWORK_OPTIONS | {name: getattr(Sieve, name) for name in DENSITY_ANNEALING} | {"local_steps": 5})
    model, _ = fedsieve.fit(
        network(), functional.cross_entropy, make_clients(), density=0.5, algorithm=plain, rounds=2, gate_granularity="neuron"
    )
    counts = (model[0].weight != 0).sum(1)
    assert set(counts.tolist()) <= {0, 6}


def test_tied_weights_stay_tied():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.one = nn.Linear(6, 6)
            self.two = nn.Linear(6, 6)
            self.two.weight = self.one.weight

        def forward(self, x):
            return self.two(torch.tanh(self.one(x)))

    torch.manual_seed(0)
    model, run = fedsieve.fit(Tied(), functional.cross_entropy, make_clients(), density=0.5, algorithm=SHORT, rounds=2)
    assert model.one.weight is model.two.weight and run.nonzero == 24


def test_a_seed_repeats_bit_for_bit_with_dropout_and_convolutions():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Dropout(0.2), nn.Flatten(), nn.Linear(48, 2))
    clients = [(torch.randn(12, 1, 6, 6), torch.arange(12) % 2) for _ in range(2)]
    pair = [fedsieve.fit(module, functional.cross_entropy, clients, density=0.2, algorithm=SHORT, rounds=2, seed=5)[0] for _ in "ab"]
    assert all(torch.equal(a, b) for a, b in zip(pair[0].parameters(), pair[1].parameters(), strict=True))


def test_regression_in_double_precision_with_an_algorithm_by_name():
    rng = np.random.default_rng(0)
    clients = [(x, x[:, :1] * 2) for x in rng.normal(size=(3, 50, 4))]
    model, run = fedsieve.fit(
        nn.Linear(4, 1).double(), functional.mse_loss, clients, density=0.25, algorithm="fed-avg", rounds=5, ungated="bias"
    )
    assert model.weight.dtype == torch.float64 and run.nonzero == 1
    assert model.weight[0, 0].item() == pytest.approx(2, abs=0.3)


def with_gap(client):
    """The examples of a client, one with a missing value."""
    x = client[0].clone()
    x[4, 0] = torch.nan
    return x, client[1]


def pruned(module):
    """A module with the hooks of torch.nn.utils.prune."""
    prune.l1_unstructured(module[0], "weight", 0.5)
    return module


def test_missing_values_that_the_module_fills_in_are_accepted():
    class Imputer(nn.Module):
        def forward(self, x):
            return x.nan_to_num()

    module = nn.Sequential(Imputer(), *network())
    _, run = fedsieve.fit(module, functional.cross_entropy, [with_gap(make_clients(1)[0])], density=0.3, algorithm=SHORT, rounds=1)
    assert run.history[-1]["replied"] == [0]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"clients": []}, "clients is empty"),
        ({"clients": make_clients()[0][0]}, "got a Tensor"),
        ({"clients": [1, 2]}, "client 0 must be a pair"),
        ({"clients": [(torch.zeros(3, 6), torch.zeros(2))]}, "3 examples in x but 2 targets"),
        (
            {"clients": [(torch.zeros(3, 6), torch.zeros(3).long()), (torch.zeros(3, 5), torch.zeros(3).long())]},
            "one shape and type at all clients",
        ),
        ({"clients": [(torch.zeros(3, 5), torch.zeros(3).long())]}, "do not accept these examples"),
        ({"clients": [(torch.zeros(0, 6), torch.zeros(0).long())]}, "no client has an example"),
        ({"loss": nn.CrossEntropyLoss(reduction="none")}, "one number"),
        ({"density": 0}, "density must be above 0"),
        ({"density": 0.001}, "keeps none"),
        ({"algorithm": "flop"}, "unknown algorithm 'flop'"),
        ({"module": nn.Linear}, "must be a torch.nn.Module"),
        ({"ungated": "*.bais"}, "matches no parameter; there are 0.weight"),
        ({"rounds": 0}, "rounds must be at least 1"),
        ({"participation": 0}, "participation is the fraction"),
        ({"gate_granularity": "layer"}, "unknown gate_granularity 'layer'"),
        ({"gate_granularity": "filter"}, "gate granularity filter needs a convolution"),
        ({"gate_granularity": "neuron", "ungated": "*.weight"}, "needs a fully connected layer"),
        ({"module": network().half()}, "parameters in float16; train it in one full precision"),
        ({"module": network().requires_grad_(False)}, "nothing to train"),
        ({"clients": [{"a": torch.zeros(3, 6)}]}, "dicts without a target: they have a; name it labels"),
        ({"clients": [(torch.zeros(3, 6), torch.zeros(3, 6), torch.zeros(3))]}, r"put several inputs into one tuple: \(\(x1, x2\), y\)"),
        ({"clients": [(["a", "b"], torch.zeros(2))]}, "examples that are no tensor"),
        ({"module": nn.Sequential(nn.LSTM(6, 2))}, "returns a tuple; fit needs a tensor"),
        ({"patience": 2}, "give examples as validation"),
        ({"patience": 0, "validation": make_clients()[0]}, "at least 1"),
        ({"patience": 2, "validation": make_clients()[0], "run_dir": "x"}, "leave out patience or run_dir"),
        ({"validation": (torch.zeros(3, 5), torch.zeros(3).long())}, "inputs of another form"),
        ({"local_epochs": 2, "local_steps": 3, "algorithm": "sieve"}, "leave one of them out"),
        ({"local_epochs": 0, "algorithm": "sieve"}, "local_epochs must be above 0"),
        ({"density": "dense"}, "density takes a number; got dense"),
        ({"rounds": 2.5}, "rounds takes a whole number; got 2.5"),
        ({"seed": None}, "seed takes a whole number; got none"),
        ({"batch_size": 2.5, "algorithm": "sieve"}, "batch_size takes a whole number or all; got 2.5"),
        ({"device": "meta"}, "device meta is not available"),
        ({"loss": nn.CrossEntropyLoss}, r"got the class CrossEntropyLoss; write CrossEntropyLoss\(\)"),
        ({"callback": 3}, "callback must be a function; got 3"),
        ({"metrics": [len]}, "metrics must be a dict of functions"),
        ({"metrics": {"hits": lambda outputs, y: outputs}}, "metric 'hits' must return one number"),
        ({"metrics": {"bytes_up": lambda outputs, y: 1.0}}, "metric 'bytes_up' has the name of another column"),
        (
            {"clients": [*make_clients(1), with_gap(make_clients(1)[0])]},
            "1 examples have missing .*example 4 of client 1",
        ),
        ({"module": pruned(network())}, "make pruning permanent first"),
    ],
)
def test_invalid_input_is_refused_before_the_first_round(wrong, message):
    settings = {"module": network(), "loss": functional.cross_entropy, "clients": make_clients(), "density": 0.3, "rounds": 1, **wrong}
    with pytest.raises(ValueError, match=message):
        fedsieve.fit(settings.pop("module"), settings.pop("loss"), settings.pop("clients"), **settings)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": "adam"}, "set learning_rate, step_rule or server_optimizer"),
        ({"epochs": 3}, "local_epochs for passes"),
        ({"learning_rat": 3}, "did you mean learning_rate.* its options are .*batch_size"),
    ],
)
def test_unknown_options_are_refused_with_those_there_are(options, message):
    with pytest.raises(TypeError, match=message):
        fedsieve.fit(network(), functional.cross_entropy, make_clients(), density=0.3, rounds=1, **options)


def test_options_have_the_names_of_the_command_line():
    common = {"density": 0.3, "rounds": 2}
    options = {"local_steps": 10, "learning_rate": 0.3, "batch_size": 16, "step_rule": "constant"}
    named, _ = fedsieve.fit(network(), functional.cross_entropy, make_clients(), **common, **options)
    given = Sieve(**NETWORK_OPTIONS | options | {"step_rule": StepRule.CONSTANT})
    same, _ = fedsieve.fit(network(), functional.cross_entropy, make_clients(), **common, algorithm=given)
    assert all(torch.equal(a, b) for a, b in zip(named.parameters(), same.parameters(), strict=True))


def test_local_epochs_are_steps_of_an_average_client():
    counts = np.array([40, 0, 80])
    for name, batch_size, epochs, option, steps in (
        ("sieve", 16, 2, "local_steps", 8),  # 2 x 60 / 16, rounded up
        ("fed-sgd", 16, 1, "exchanges", 4),
        ("sieve", "all", 3, "local_steps", 3),
    ):
        algorithm = build_algorithm(name, 0.1, None, {"batch_size": batch_size})
        assert getattr(set_local_epochs(algorithm, epochs, {}, counts), option) == steps


def test_validation_and_metrics_are_columns_of_the_learning_curve():
    clients = make_clients()
    hit = {"accuracy": lambda outputs, y: (outputs.argmax(1) == y).float().mean()}
    model, run = fedsieve.fit(
        network(), functional.cross_entropy, clients[:2], density=0.3, algorithm=SHORT, rounds=3, validation=clients[2], metrics=hit
    )
    assert run.history[-1]["val_accuracy"] == pytest.approx(accuracy(model, clients[2:]))
    assert run.history[-1]["accuracy"] == pytest.approx(accuracy(model, clients[:2]))
    assert run.history[-1]["val_loss"] == pytest.approx(functional.cross_entropy(model(clients[2][0]), clients[2][1]).item(), rel=1e-5)


def test_training_stops_without_patience_and_returns_the_best_round():
    clients = make_clients()
    labels = (clients[0][0], 1 - clients[0][1])  # training makes the loss on wrong labels rise
    model, run = fedsieve.fit(
        network(), functional.cross_entropy, clients, density=0.5, algorithm=SHORT, rounds=20, validation=labels, patience=2
    )
    losses = [row["val_loss"] for row in run.history]
    assert run.best_round == int(np.argmin(losses)) + 1 and run.rounds == run.best_round + 2 < 20
    assert functional.cross_entropy(model(labels[0]), labels[1]).item() == pytest.approx(min(losses), rel=1e-5)


def test_an_interrupted_fit_continues_to_the_same_bits(tmp_path):
    def interrupt(fit):
        if fit.rounds == 2:
            raise KeyboardInterrupt

    settings = {"density": 0.3, "algorithm": SHORT, "rounds": 4}
    straight, whole = fedsieve.fit(network(), functional.cross_entropy, make_clients(), **settings)
    with pytest.raises(KeyboardInterrupt):
        fedsieve.fit(network(), functional.cross_entropy, make_clients(), **settings, run_dir=tmp_path, callback=interrupt)
    seen = []
    for _ in range(2):  # the second time nothing is left to do
        model, run = fedsieve.fit(
            network(), functional.cross_entropy, make_clients(), **settings, run_dir=tmp_path, callback=lambda fit: seen.append(fit.rounds)
        )
        assert all(torch.equal(a, b) for a, b in zip(straight.parameters(), model.parameters(), strict=True))
        assert run.rounds == 4 and run.bytes_up == whole.bytes_up
    assert seen == [3, 4]
    with pytest.raises(ValueError, match="weights and examples was"):
        fedsieve.fit(network(), functional.cross_entropy, make_clients(seed=1), **settings, run_dir=tmp_path)


def test_the_device_is_where_the_module_is_trained_not_where_it_ends():
    model, _ = fedsieve.fit(network(), functional.cross_entropy, make_clients(), density=0.3, algorithm=SHORT, rounds=1, device="cpu")
    assert next(model.parameters()).device.type == "cpu"
    with pytest.raises(ValueError, match="device cuda:99 is not available"):
        fedsieve.fit(network(), functional.cross_entropy, make_clients(), density=0.3, rounds=1, device="cuda:99")


class TwoInputs(nn.Module):
    """Embeds a whole number, and returns an object with logits, as modules of Hugging Face do."""

    def __init__(self, wrap):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.layer, self.wrap = nn.Embedding(5, 3), nn.Linear(9, 2), wrap

    def forward(self, numbers, values):
        assert numbers.dtype == torch.int64
        return self.wrap(self.layer(torch.cat((self.table(numbers), values), dim=1)))


def two_inputs(count=30):
    rng = np.random.default_rng(0)
    numbers, values = torch.from_numpy(rng.integers(0, 5, count)), torch.from_numpy(rng.normal(size=(count, 6)).astype(np.float32))
    return numbers, values, (numbers > 2).long()


class Stream(IterableDataset):
    """Examples one after another, as dicts."""

    def __iter__(self):
        yield from ({"numbers": a, "values": b, "labels": y} for a, b, y in zip(*two_inputs(), strict=True))


def test_several_inputs_dicts_streams_and_outputs_with_logits_are_equal():
    numbers, values, y = two_inputs()
    mapping = {"numbers": numbers, "values": values, "labels": y}
    loader = DataLoader(Stream(), batch_size=7)
    forms = [((numbers, values), y), mapping, Stream(), loader, ({"values": values, "numbers": numbers}, y)]
    wraps = [lambda z: z, lambda z: SimpleNamespace(logits=z), lambda z: {"logits": z}]
    runs = [fedsieve.fit(TwoInputs(wraps[0]), functional.cross_entropy, [form], density=0.5, algorithm=SHORT, rounds=1) for form in forms]
    runs += [fedsieve.fit(TwoInputs(wrap), functional.cross_entropy, [mapping], density=0.5, algorithm=SHORT, rounds=1) for wrap in wraps]
    first = torch.cat([part.flatten() for part in runs[0][0].parameters()])
    assert all(torch.equal(first, torch.cat([part.flatten() for part in model.parameters()])) for model, _ in runs)


def test_a_client_without_examples_does_not_participate():
    clients = [*make_clients(2), (torch.zeros(0, 6), torch.zeros(0).long())]
    _, run = fedsieve.fit(network(), functional.cross_entropy, clients, density=0.3, algorithm=SHORT, rounds=1)
    assert run.history[0]["cohort"] == [0, 1]
