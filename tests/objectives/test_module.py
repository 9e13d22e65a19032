"""Any module: its gradients, its layout, and what it cannot be."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from fedsieve.algorithms import algorithm_class
from fedsieve.core.budgets import BudgetRule
from fedsieve.core.optimizers import StepRule
from fedsieve.core.types import Batch
from fedsieve.objectives.lenet import lenet
from fedsieve.objectives.linear import Linear, Loss
from fedsieve.objectives.module import Module
from fedsieve.runtime.batched import BatchedEngine
from fedsieve.runtime.loop import LoopEngine
from fedsieve.runtime.rounds import initial_server
from helpers.training import run_training


def rows_of(shape, classes=3, count=60, integers=False, seed=0):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, classes, (count,), generator=g)
    x = torch.randn(count, *shape, generator=g) + y.view(-1, *([1] * len(shape)))
    if integers:
        x = (torch.randint(0, 3, (count, *shape), generator=g) + 3 * y[:, None]).clamp(0, 9)
    return x, y


def trained(objective, x, y, rounds=6, method="fed-round-ht", engine=BatchedEngine, **fields):
    settings = {
        "density": 0.5,
        "local_steps": 8,
        "exchanges": 8,
        "batch_size": 10,
        "step_rule": StepRule.CONSTANT,
        "learning_rate": 0.1,
        "bits": 32,
        "max_gradient_norm": 1.0,
    }
    cls = algorithm_class(method)
    algorithm = cls(**{name: value for name, value in (settings | fields).items() if name in cls.option_names() | {"density"}})
    *_, last = run_training(algorithm, objective, x, y, [20, 25, 15], engine=engine, rounds=rounds)
    return algorithm.parameters(last.server)


def test_lenet_has_exactly_the_papers_parameters():
    objective = Module(module=lenet(), factory=lenet)
    assert objective.layout.size == 44_426
    assert sum(part.stop - part.start for part, _ in objective.layout.layers.values()) == 44_426


@pytest.mark.parametrize("k", [1, 3])
def test_a_linear_module_has_the_gradient_of_the_closed_form(k):
    module = nn.Linear(6, 4, bias=False)
    g = torch.Generator().manual_seed(0)
    batch = Batch(torch.randn(k, 9, 6, generator=g), torch.randint(0, 4, (k, 9), generator=g))
    theta = torch.randn(k, 24, generator=g)
    for ours, closed in zip(
        Module(module=module).gradient(theta, batch),
        Linear(loss=Loss.SOFTMAX, num_features=6, num_outputs=4).gradient(theta, batch),
        strict=True,
    ):
        torch.testing.assert_close(ours, closed)


def test_a_convolution_has_the_gradient_autograd_finds_for_each_client():
    objective = Module(module=lenet())
    g = torch.Generator().manual_seed(0)
    batch = Batch(torch.randn(2, 5, 1, 28, 28, generator=g), torch.randint(0, 10, (2, 5), generator=g))
    theta = objective.flatten(objective.module).expand(2, -1) + 0.01 * torch.randn(2, 44_426, generator=g)
    losses, gradients = objective.gradient(theta, batch)
    for k in range(2):
        module = lenet()
        nn.utils.vector_to_parameters(theta[k], module.parameters())
        loss = functional.cross_entropy(module(batch.x[k]), batch.y[k])
        loss.backward()
        torch.testing.assert_close(losses[k], loss.detach())
        torch.testing.assert_close(gradients[k], torch.cat([p.grad.reshape(-1) for p in module.parameters()]))


class Sequence(nn.Module):
    """The last output of an LSTM over embedded tokens, or the mean of a small transformer encoder's."""

    def __init__(self, kind):
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.kind = kind
        if kind == "lstm":
            self.body = nn.LSTM(8, 8, batch_first=True)
        else:
            self.body = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, tokens):
        hidden = self.body(self.embed(tokens))
        return self.head(hidden[0][:, -1] if self.kind == "lstm" else hidden.mean(1))


MODULES = {
    "dropout": (lambda: nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3)), (5,), False),
    "group norm": (lambda: nn.Sequential(nn.Linear(5, 16), nn.GroupNorm(4, 16), nn.ReLU(), nn.Linear(16, 3)), (5,), False),
    "embedding": (lambda: nn.Sequential(nn.Embedding(10, 6), nn.Flatten(), nn.Linear(24, 3)), (4,), True),
    "lstm": (lambda: Sequence("lstm"), (4,), True),
    "transformer": (lambda: Sequence("transformer"), (4,), True),
}


@pytest.mark.parametrize("kind", MODULES)
def test_modules_of_every_kind_learn(kind):
    build, shape, integers = MODULES[kind]
    torch.manual_seed(0)
    objective = Module(module=build())
    x, y = rows_of(shape, integers=integers)
    theta = trained(objective, x, y, rounds=8, rate=0.5)
    before = functional.cross_entropy(objective.predict(objective.flatten(objective.module), x), y)
    after = functional.cross_entropy(objective.predict(theta, x), y)
    assert after < before - 0.1
    assert int((theta != 0).sum()) == objective.layout.size // 2


@pytest.mark.parametrize("kind", MODULES)
def test_outputs_at_other_parameters_are_those_of_a_module_that_has_them(kind):
    build, shape, integers = MODULES[kind]
    objective, other = Module(module=build()), build().eval()
    own = objective.flatten(objective.module)
    x, _ = rows_of(shape, integers=integers)
    torch.testing.assert_close(objective.predict(objective.flatten(other), x), other(x).detach())
    assert torch.equal(objective.flatten(objective.module), own)


def test_a_module_has_its_own_parameters_again_after_a_call_that_failed():
    module = nn.Sequential(nn.Linear(5, 3), nn.Linear(4, 2))
    own = list(module.parameters())
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        Module(module=module).predict(torch.zeros(28), torch.zeros(1, 5))
    assert all(part is before for part, before in zip(module.parameters(), own, strict=True))


@pytest.mark.parametrize("kind", ["dropout", "group norm"])
def test_both_engines_train_modules_alike_and_dropout_repeats(kind):
    build, shape, _ = MODULES[kind]
    torch.manual_seed(0)
    objective = Module(module=build())
    x, y = rows_of(shape)
    one, again, loop = (trained(objective, x, y, rounds=3, engine=engine) for engine in (BatchedEngine, BatchedEngine, LoopEngine))
    assert torch.equal(one, again)
    torch.testing.assert_close(one, loop, atol=1e-4, rtol=0)


def test_global_random_state_is_left_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    x, y = rows_of((5,))
    trained(Module(module=nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5), nn.Linear(8, 3))), x, y, rounds=2)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(3), expected)


def test_tied_weights_share_one_gate():
    module = nn.Sequential(nn.Linear(6, 6, bias=False), nn.ReLU(), nn.Linear(6, 6, bias=False))
    module[2].weight = module[0].weight
    objective = Module(module=module, loss=functional.mse_loss)
    assert objective.layout.size == 36
    g = torch.Generator().manual_seed(0)
    x = torch.randn(1, 4, 6, generator=g)
    _, gradient = objective.gradient(objective.flatten(module)[None], Batch(x, x))
    value = functional.mse_loss(module(x[0]), x[0])
    value.backward()
    torch.testing.assert_close(gradient[0], module[0].weight.grad.reshape(-1))


def test_batch_norm_in_training_mode_is_refused_with_the_way_out():
    module = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8))
    with pytest.raises(ValueError, match=r"BatchNorm1d in training mode.*GroupNorm.*\.eval\(\)"):
        Module(module=module)
    module[1].eval()
    assert Module(module=module).layout.size == 5 * 8 + 8 + 16


def test_a_module_without_parameters_is_refused():
    with pytest.raises(ValueError, match="no parameters with a gate"):
        Module(module=nn.ReLU())


def test_a_fresh_start_follows_from_the_seed_and_a_given_one_is_kept():
    fresh = Module(module=lenet(), factory=lenet)
    algorithm = algorithm_class("fed-avg")()
    one, again, other = (initial_server(algorithm, fresh, seed, torch.float32).theta for seed in (1, 1, 2))
    assert torch.equal(one, again) and not torch.equal(one, other)
    given = Module(module=lenet())
    assert torch.equal(initial_server(algorithm, given, 1, torch.float32).theta, given.flatten(given.module))


@pytest.mark.parametrize("method", ["flops-pa", "fed-iter-ht", "gradual", "flops"])
def test_per_layer_budgets_empty_no_layer(method):
    torch.manual_seed(0)
    objective = Module(module=nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 3)))
    x, y = rows_of((5,))
    theta = trained(objective, x, y, rounds=4, method=method, density=0.1, budget=BudgetRule.ERK)
    assert all(int((theta[part] != 0).sum()) >= 1 for part, _ in objective.layout.layers.values())
    assert int((theta != 0).sum()) == 14
