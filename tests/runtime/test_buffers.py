"""Buffers that training changes: sent, averaged, stored, and the same in both engines."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from fedsieve import wire
from fedsieve.algorithms import algorithm_class
from fedsieve.core.aggregation import Aggregator
from fedsieve.core.optimizers import StepRule
from fedsieve.core.packets import Packet
from fedsieve.core.private_mean import GaussianMechanism
from fedsieve.core.quantization import Coding, QuantizedField
from fedsieve.core.types import ExchangeResult, Reply, Traffic
from fedsieve.objectives.module import Module
from fedsieve.runtime.batched import BatchedEngine
from fedsieve.runtime.buffers import append_buffers, buffer_state, find_changes
from fedsieve.runtime.loop import LoopEngine
from fedsieve.runtime.rounds import Population, initial_server, train
from fedsieve.storage import checkpoint
from helpers.training import make_exchange

COUNTS = [20, 25, 15]


class Network(nn.Module):
    """BatchNorm, a buffer that every forward pass replaces, a large constant of integers and a constant of floats."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.register_buffer("scale", torch.ones(5))
        self.register_buffer("prime", torch.tensor([2**40 + 1]))
        self.register_buffer("table", torch.linspace(0, 1, 1000))

    def forward(self, x):
        if self.training:
            self.scale = 0.9 * self.scale + 0.1 * x.abs().mean(0).to(self.scale)
        return self.last(functional.relu(self.norm(self.first(x))))


def make_objective():
    torch.manual_seed(0)
    return Module(module=Network())


def make_examples(dtype=torch.float32):
    g = torch.Generator().manual_seed(0)
    y = torch.randint(0, 3, (sum(COUNTS),), generator=g)
    return torch.randn(len(y), 5, generator=g, dtype=dtype) + y[:, None], y


def make_algorithm(name="fed-avg", **options):
    cls = algorithm_class(name)
    fixed = {"density": 0.5, "local_steps": 4, "exchanges": 4, "batch_size": 10, "step_rule": StepRule.CONSTANT, "learning_rate": 0.1}
    fixed |= {"bits": 32, "max_gradient_norm": 1.0}
    accepted = cls.option_names() | {"density", "aggregator", "privacy"}
    return cls(**{key: value for key, value in (fixed | options).items() if key in accepted and key not in cls.unsupported_options})


def run(algorithm, objective, *, engine=BatchedEngine, rounds=3, dtype=torch.float32, participation=1.0, state=None, first_round=0, **rest):
    x, y = make_examples(dtype)
    exchange = make_exchange(algorithm, objective, x, y, COUNTS, engine=engine, dtype=dtype)
    server, buffers = state or (initial_server(algorithm, objective, 1, dtype), None)
    settings = {"dtype": dtype, "first_round": first_round, "buffers": buffer_state(objective, 1, buffers), **rest}
    return list(train(algorithm, server, Population(3, range(3)), participation, exchange, rounds, 1, **settings))


@pytest.mark.parametrize("name", ["fed-avg", "sieve", "fed-sgd", "flops-pa"])
def test_both_engines_give_equal_parameters_buffers_and_bytes(name):
    results = []
    for engine in (BatchedEngine, LoopEngine):
        objective = make_objective()
        objective.module.double()
        algorithm = make_algorithm(name, bits=8)
        last = run(algorithm, objective, engine=engine, dtype=torch.float64)[-1]
        results.append((algorithm.parameters(last.server), last.buffers, last.uplink.total, last.downlink.total))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])
    assert results[0][2:] == results[1][2:]


@pytest.mark.parametrize("name", ["stc", "fed-ef"])
def test_clients_that_miss_rounds_receive_the_buffers(name):
    pair = []
    for engine in (BatchedEngine, LoopEngine):
        objective = make_objective()
        objective.module.double()
        pair.append(run(make_algorithm(name), objective, engine=engine, rounds=5, participation=0.7, dtype=torch.float64))
    assert torch.equal(pair[0][-1].buffers, pair[1][-1].buffers)
    assert not torch.equal(pair[0][0].buffers, pair[0][-1].buffers)


def test_one_client_has_the_buffers_of_a_plain_training_loop():
    x, y = make_examples()
    objective, algorithm = make_objective(), make_algorithm(density=1.0, batch_size="all", local_steps=3)
    exchange = make_exchange(algorithm, objective, x, y, [len(y)])
    server = initial_server(algorithm, objective, 1, torch.float32)
    (last,) = train(algorithm, server, Population(1, [0]), 1.0, exchange, 1, 1, buffers=buffer_state(objective, 1))
    torch.manual_seed(0)
    module = Network()
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        functional.cross_entropy(module(x), y).backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
    buffers = objective.make_buffers(last.buffers)
    for name, value in module.named_buffers():
        torch.testing.assert_close(buffers[name], value, atol=1e-5, rtol=1e-5)
    assert int(buffers["norm.num_batches_tracked"]) == 3 and int(buffers["prime"]) == 2**40 + 1
    module.eval()
    parameters = append_buffers(algorithm.parameters(last.server), last.buffers)
    torch.testing.assert_close(objective.predict(parameters, x), module(x), atol=1e-5, rtol=1e-4)


def test_training_leaves_the_buffers_of_the_users_module_unchanged():
    objective = make_objective()
    before = {name: value.clone() for name, value in objective.module.named_buffers()}
    run(make_algorithm(), objective)
    assert all(torch.equal(before[name], value) for name, value in objective.module.named_buffers())


def test_constant_buffers_are_never_sent():
    objective = make_objective()
    state = buffer_state(objective, 1)
    last = run(make_algorithm(), objective)[-1]
    changed = find_changes(objective, last.buffers, state.initial)
    assert {list(objective.buffer_slices)[number] for number in changed} == {
        "scale",
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
    }
    assert last.uplink.scalars < 3 * 4 * 60  # three replies; the constants alone have 4000 bytes


def test_layers_in_evaluation_mode_and_constants_outside_the_state_dict_are_not_sent():
    module = Network()
    module.norm.eval()
    module.register_buffer("cache", torch.zeros(3), persistent=False)
    module.register_buffer("rotation", torch.ones(2, dtype=torch.complex64))
    assert list(Module(module=module).buffer_slices) == ["scale", "prime", "table"]


def test_averaged_running_statistics_are_those_of_all_examples():
    objective = Module(module=nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    g = torch.Generator().manual_seed(0)
    parts = [torch.randn(n, 4, generator=g, dtype=torch.float64) * (1 + n) + n for n in (10, 30, 60)]
    rows = torch.stack([torch.cat((part.mean(0), part.var(0, unbiased=False), torch.tensor([7.0]))) for part in parts])
    mean = objective.average_buffers(rows.float(), torch.tensor([0.1, 0.3, 0.6]))
    pooled = torch.cat(parts)
    torch.testing.assert_close(mean[:4], pooled.mean(0).float())
    torch.testing.assert_close(mean[4:8], pooled.var(0, unbiased=False).float())
    assert mean[8] == 7  # exactly, since it is equal at all clients


def test_a_resumed_run_has_the_same_buffers(tmp_path):
    algorithm, objective = make_algorithm("sieve"), make_objective()
    whole = run(algorithm, objective, rounds=4)
    checkpoint.save(tmp_path, 2, whole[1].server, {}, whole[1].memories, whole[1].buffers)
    stored = checkpoint.latest(tmp_path)
    assert stored is not None
    server = stored.restore(initial_server(algorithm, objective, 1, torch.float32))
    rest = run(algorithm, objective, rounds=4, state=(server, stored.buffers), first_round=2)
    assert torch.equal(rest[-1].buffers, whole[-1].buffers)
    assert torch.equal(algorithm.parameters(rest[-1].server), algorithm.parameters(whole[-1].server))


def make_packet(buffers):
    field = QuantizedField(torch.tensor([1.0, 2.0]), None, Coding.FLOAT32)
    return Packet(5, torch.tensor([1, 3]), {"theta": field}, {}, buffers=buffers)


def test_buffers_survive_the_wire_and_damage_is_found():
    message_id = wire.MessageId(1, 2, 0)
    packet = make_packet({0: torch.tensor([1.5, -2.0]), 3: torch.tensor([0.25])})
    encoded = wire.encode(packet, message_id)
    data = encoded.to_bytes()
    decoded = wire.decode(data, message_id, 5)
    assert {number: values.tolist() for number, values in decoded.buffers.items()} == {0: [1.5, -2.0], 3: [0.25]}
    assert encoded.length == len(data) == wire.measure_traffic([encoded]).total
    plain = wire.encode(make_packet({}), message_id).to_bytes()
    assert len(data) - len(plain) == 3 * 4 + 1 + 2 * 2 and not wire.decode(plain, message_id, 5).buffers
    for wrong in ({1: torch.tensor([torch.nan])}, {3: torch.ones(1), 1: torch.ones(1)}):
        with pytest.raises(wire.PacketError, match="buffer"):
            wire.decode(wire.encode(make_packet(wrong), message_id).to_bytes(), message_id, 5)


@pytest.mark.parametrize(
    ("number", "values", "reason"),
    [(9, [1.0], "does not fit"), (3, [1.0] * 7, "does not fit"), (4, [-1.0] * 8, "negative variance"), (3, [1e30] * 8, "above")],
)
def test_replies_with_invalid_buffers_are_rejected(number, values, reason):
    state = buffer_state(make_objective(), 1)
    good, bad = make_packet({}), make_packet({number: torch.tensor(values)})
    result = state.validate(ExchangeResult([Reply(0, good, 5), Reply(1, bad, 5)], [], Traffic(), Traffic()))
    assert [reply.client for reply in result.replies] == [0]
    assert result.rejected[0][0] == 1 and reason in result.rejected[0][1]


def test_a_robust_aggregator_also_protects_buffers():
    objective = make_objective()
    state, number = buffer_state(objective, 1), list(objective.buffer_slices).index("norm.running_mean")
    replies = [Reply(i, make_packet({number: torch.full((8,), value)}), 5) for i, value in enumerate((1.0, 1.1, 1e6))]
    after = objective.make_buffers(state.aggregate(make_algorithm(aggregator=Aggregator.MEDIAN), replies).values)
    assert np.allclose(after["norm.running_mean"], 1.1)


def test_private_training_refuses_buffers_that_would_be_sent_without_noise():
    algorithm = make_algorithm(privacy=GaussianMechanism(1.0, 1.0, 1.0, 3))
    with pytest.raises(ValueError, match="does not protect buffers"):
        run(algorithm, make_objective(), secret=b"0" * 32)
