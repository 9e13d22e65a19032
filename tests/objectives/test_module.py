"""Any module as an objective: gradients, layout, and modules that are rejected."""

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


def make_examples(shape, classes=3, count=60, integers=False, seed=0):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, classes, (count,), generator=g)
    x = torch.randn(count, *shape, generator=g) + y.view(-1, *([1] * len(shape)))
    if integers:
        x = (torch.randint(0, 3, (count, *shape), generator=g) + 3 * y[:, None]).clamp(0, 9)
    return x, y


def train_module(objective, x, y, rounds=6, algorithm_name="fed-round-ht", engine=BatchedEngine, **fields):
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
    cls = algorithm_class(algorithm_name)
    algorithm = cls(**{name: value for name, value in (settings | fields).items() if name in cls.option_names() | {"density"}})
    *_, last = run_training(algorithm, objective, x, y, [20, 25, 15], engine=engine, rounds=rounds)
    return algorithm.parameters(last.server)


def test_lenet_has_the_number_of_parameters_of_the_paper():
    objective = Module(module=lenet(), factory=lenet)
    assert objective.layout.size == objective.layout.num_gated == 44_426
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
    x, y = make_examples(shape, integers=integers)
    theta = train_module(objective, x, y, rounds=8, learning_rate=0.5)
    before = functional.cross_entropy(objective.predict(objective.flatten(objective.module), x), y)
    after = functional.cross_entropy(objective.predict(theta, x), y)
    assert after < before - 0.1
    num_gated = objective.layout.num_gated
    assert int((theta[:num_gated] != 0).sum()) == num_gated // 2 and bool((theta[num_gated:] != 0).all())


@pytest.mark.parametrize("kind", MODULES)
def test_outputs_at_other_parameters_equal_those_of_a_module_with_them(kind):
    build, shape, integers = MODULES[kind]
    objective, other = Module(module=build()), build().eval()
    own = objective.flatten(objective.module)
    x, _ = make_examples(shape, integers=integers)
    torch.testing.assert_close(objective.predict(objective.flatten(other), x), other(x).detach())
    assert torch.equal(objective.flatten(objective.module), own)


def test_a_failed_call_restores_the_parameters_of_the_module():
    module = nn.Sequential(nn.Linear(5, 3), nn.Linear(4, 2))
    own = list(module.parameters())
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        Module(module=module).predict(torch.zeros(28), torch.zeros(1, 5))
    assert all(part is before for part, before in zip(module.parameters(), own, strict=True))


@pytest.mark.parametrize("kind", ["dropout", "group norm"])
def test_both_engines_train_a_module_to_the_same_weights(kind):
    build, shape, _ = MODULES[kind]
    torch.manual_seed(0)
    objective = Module(module=build())
    x, y = make_examples(shape)
    one, again, loop = (train_module(objective, x, y, rounds=3, engine=engine) for engine in (BatchedEngine, BatchedEngine, LoopEngine))
    assert torch.equal(one, again)
    torch.testing.assert_close(one, loop, atol=1e-4, rtol=0)


def test_training_does_not_change_the_global_random_state():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    x, y = make_examples((5,))
    train_module(Module(module=nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5), nn.Linear(8, 3))), x, y, rounds=2)
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


def test_batch_norm_has_no_gates_and_carries_its_statistics_only_in_training_mode():
    module = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8))
    assert len(Module(module=module).buffer_slices) == 3
    module[1].eval()
    assert not Module(module=module).buffer_slices
    layout = Module(module=module).layout
    assert (layout.num_gated, layout.num_ungated) == (5 * 8 + 8, 16)


class ScaleNorm(nn.Module):
    """A norm of a user: a gain with the shape of an image, and a matrix that is no part of a normalization."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1, 4, 1, 1))
        self.mixing = nn.Parameter(torch.ones(4, 4))


NORMS = {
    "batch": (nn.BatchNorm2d(4).eval(), 8),
    "layer": (nn.LayerNorm([4, 3]), 24),
    "group": (nn.GroupNorm(2, 4), 8),
    "instance": (nn.InstanceNorm2d(4, affine=True), 8),
    "rms": (nn.RMSNorm(4), 4),
    "own": (ScaleNorm(), 4),
}


@pytest.mark.parametrize("kind", NORMS)
def test_parameters_of_normalization_layers_have_no_gate(kind):
    norm, size = NORMS[kind]
    module = nn.ModuleDict({"norm": norm, "linear": nn.Linear(2, 3)})
    total = sum(part.numel() for part in module.parameters())
    layout = Module(module=module).layout
    assert (layout.num_gated, layout.num_ungated) == (total - size, size)
    assert "norm.weight" not in layout.layers and "norm.gain" not in layout.layers and "linear.bias" in layout.layers
    assert Module(module=module, gate_norms=True).layout.num_gated == total


def test_a_parameter_shared_with_a_normalization_layer_has_no_gate():
    linear, norm = nn.Linear(3, 3), nn.LayerNorm(3)
    norm.weight = linear.bias
    assert list(Module(module=nn.Sequential(linear, norm)).layout.layers) == ["0.weight"]


def test_a_module_without_parameters_is_an_error():
    with pytest.raises(ValueError, match="no parameters with a gate"):
        Module(module=nn.ReLU())


def test_initial_weights_come_from_the_seed_or_from_the_module():
    fresh = Module(module=lenet(), factory=lenet)
    algorithm = algorithm_class("fed-avg")()
    one, again, other = (initial_server(algorithm, fresh, seed, torch.float32).theta for seed in (1, 1, 2))
    assert torch.equal(one, again) and not torch.equal(one, other)
    fixed = Module(module=lenet())
    assert torch.equal(initial_server(algorithm, fixed, 1, torch.float32).theta, fixed.flatten(fixed.module))


@pytest.mark.parametrize("algorithm_name", ["flops-pa", "fed-iter-ht", "gradual", "flops"])
def test_per_layer_budgets_empty_no_layer(algorithm_name):
    torch.manual_seed(0)
    objective = Module(module=nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 3)))
    x, y = make_examples((5,))
    theta = train_module(objective, x, y, rounds=4, algorithm_name=algorithm_name, density=0.1, sparsity_allocation=BudgetRule.ERK)
    assert all(int((theta[part] != 0).sum()) >= 1 for part, _ in objective.layout.layers.values())
    assert int((theta != 0).sum()) == 14
