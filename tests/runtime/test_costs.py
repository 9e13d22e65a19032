"""What a round costs in counts, which a busy machine does not change: operations, bytes taken, bytes sent. Seconds are `make bench`'s."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import scaling
from benchmarks.contenders import fedsieve
from benchmarks.workloads import WORKLOADS

DRAW = scaling.GeneratedClientData._generate_batch


class Counting(TorchDispatchMode):
    """Operations torch was asked for, other ways to look at a tensor and places for one aside, and the bytes of new memory they took."""

    def __init__(self):
        super().__init__()
        self.operations, self.taken = Counter(), 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        held = {part.untyped_storage().data_ptr() for part in args if isinstance(part, torch.Tensor)}
        looks = isinstance(out, torch.Tensor) and not function._schema.is_mutable and out.untyped_storage().data_ptr() in held
        self.operations[str(function)] += not (looks or "empty" in str(function))
        if isinstance(out, torch.Tensor) and out.untyped_storage().data_ptr() not in held:
            self.taken += out.numel() * out.element_size()
        return out


def counted(name, **changes):
    """The least counts of three rounds, after a first: where scores tie, as those of one client alone often do, choosing takes more."""
    play = fedsieve.prepare(WORKLOADS[name]._replace(**changes))
    play()
    found = []
    for _ in range(3):
        with Counting() as count:
            play()
        found.append((sum(count.operations.values()), count.taken))
    return min(found)


@pytest.mark.parametrize(("name", "most"), [("W2", 2), ("W3", 75)])
def test_a_local_step_of_a_cohort_takes_few_operations(name, most):
    """As many for five clients as for two, where the model has a closed form: the cohort steps as one."""
    rounds = {k: [counted(name, num_clients=k, local_steps=steps)[0] for steps in (2, 6)] for k in (2, 5)}
    a_step = {k: (longer - shorter) / 4 for k, (shorter, longer) in rounds.items()}
    assert a_step[2] <= most
    if name == "W2":
        assert a_step[2] == a_step[5]


def test_an_exchange_of_gradients_takes_few_operations():
    assert counted("W1")[0] / WORKLOADS["W1"].local_steps <= 22


def test_a_local_step_takes_little_memory():
    """In vectors as long as the model, a client: what passes through the cache."""
    work = WORKLOADS["W2"]
    taken = (counted("W2", local_steps=6)[1] - counted("W2", local_steps=2)[1]) / 4
    rows = 4 * work.num_clients * work.batch_size * work.num_features
    assert (taken - rows) / (4 * work.num_clients * work.size) <= 4


def test_a_step_on_sparse_examples_changes_only_their_features():
    """A step of sparse rows takes memory for the features in its batch, not for the model."""
    changes = {
        "num_clients": 2,
        "num_features": 20_000,
        "num_outputs": 5,
        "nonzero_per_example": 20,
        "batch_size": 8,
        "examples_per_client": 60,
    }
    taken = (counted("W4", local_steps=6, **changes)[1] - counted("W4", local_steps=2, **changes)[1]) / 4
    a_client = taken / 2
    assert a_client / (4 * 8 * 20 * 5) <= 40
    assert a_client < 4 * 20_000 * 5


@pytest.mark.parametrize(("name", "share"), [("W2", 0.04), ("W4", 0.005)])
def test_a_sparse_message_is_this_much_of_a_dense_one(name, share):
    """Both ways and with headers, over four bytes for every weight and gate."""
    work = WORKLOADS[name]._replace(num_clients=2, local_steps=1)
    play = fedsieve.prepare(work)
    play()
    done = play()
    assert max(done.uplink.total / work.num_clients, done.downlink.total / work.num_clients) <= share * 8 * work.size


def test_of_a_million_clients_only_the_cohort_draws_examples(monkeypatch):
    drawn = []
    monkeypatch.setattr(
        scaling.GeneratedClientData, "_generate_batch", lambda self, client, hand: drawn.append(client) or DRAW(self, client, hand)
    )
    work = WORKLOADS["W2"]._replace(num_clients=3, num_features=20, num_outputs=4, batch_size=8, local_steps=2)
    next(scaling.training_rounds(work, 1_000_000))
    assert len(drawn) == work.client_steps
    assert len(set(drawn)) == 3
    assert max(drawn) > 1000
