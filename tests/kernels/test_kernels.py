"""Every kernel equals its reference: integers and roundings to the bit, gates to a few units in the last place."""

from importlib import import_module
from pkgutil import iter_modules

import numpy as np
import pytest
import torch
from scipy.sparse import csr_matrix

from fedsieve import kernels
from fedsieve.core import constraint, gates, quantization, random
from fedsieve.core.batches import IndexedRows, SparseBatch
from fedsieve.core.constraint import ConstraintScale
from fedsieve.core.feature_tables import FeatureTables
from fedsieve.core.gates import LOG_ALPHA_LIMIT, NOISE_MARGIN, GateAtTest, HardConcrete
from fedsieve.core.types import Batch
from fedsieve.objectives.linear import Linear, Loss

for folder in ("core", "objectives", "algorithms", "runtime"):
    for module in iter_modules(import_module(f"fedsieve.{folder}").__path__):
        import_module(f"fedsieve.{folder}.{module.name}")

SHAPE, SIZE = HardConcrete(), 1003


def vectors(k=3, std=4.0, seed=0, size=SIZE):
    return std * torch.randn(k, size, generator=torch.Generator().manual_seed(seed))


def random_keys():
    for coordinates in (np.arange(SIZE), np.arange(17), np.arange(5, 5 + 3 * SIZE, 3)):
        yield 7, random._client_counters((0, 3, 11)), coordinates.astype(np.uint64) * random.SPLITMIX_GAMMA


def levels_to_quantize():
    noise = torch.from_numpy(random.uniforms(1, [0, 1, 2], SIZE))
    values = vectors() * torch.tensor([1.0, 1e-3, 0.0])[:, None]
    for size in (SIZE, 17):
        for max_code in (7, 127):
            for offset, min_code in ((0.0, -max_code), (0.5, -max_code - 1)):
                some = (part[:, :size].contiguous() for part in (values, noise))
                yield *some, (1 + 1e-6) / (max_code + offset), offset, min_code, max_code


def quantized_fields():
    draw = random.client_sampler(1, 0, 0, 0, [0, 1, 2], torch.float32)
    for bits in (8, 4):
        for zero_free in (False, True):
            yield quantization.quantize(vectors(), bits, draw, "x", zero_free=zero_free), torch.tensor([0.5, 0.2, 0.3])
    yield quantization.quantize_signs(vectors()), torch.tensor([0.5, 0.2, 0.3])


def extreme_log_alpha():
    return torch.cat((vectors(), torch.tensor([-12.0, 12.0, 0.0])[:, None].expand(3, SIZE)))


def gates_and_noise():
    noise = torch.from_numpy(random.uniforms(1, range(6), SIZE))
    noise[0, 0], noise[1, 0] = 0.5**24, 1 - 0.5**24
    yield SHAPE, extreme_log_alpha(), noise, NOISE_MARGIN


def penalties():
    for multiplier in (torch.tensor([0.0, 0.5, 30.0]), torch.tensor(0.5)):
        for scale in ConstraintScale:
            yield SHAPE, vectors(), multiplier, scale, SIZE


def log_alpha_steps():
    for scale in ConstraintScale:
        for gradient in (vectors(std=50, seed=1), torch.full((3, SIZE), torch.nan)):
            yield SHAPE, vectors(), gradient, torch.tensor([0.0, 0.5, 30.0]), scale, SIZE, 0.1, LOG_ALPHA_LIMIT


def gated_steps():
    weights, log_alpha = vectors(seed=1), vectors(seed=3)
    step_size, multiplier = torch.tensor([[0.1], [0.0], [2.0]]), torch.tensor([0.0, 0.5, 30.0])
    for scale in ConstraintScale:
        for gradient in (vectors(seed=2), torch.full((3, SIZE), torch.nan)):
            gate = gates.median_gates(SHAPE, log_alpha)
            yield SHAPE, weights, log_alpha, gradient, gate, step_size, multiplier, scale, SIZE, 0.1, LOG_ALPHA_LIMIT


def saliency_steps():
    step_size = torch.tensor([[0.1], [0.0], [2.0]])
    for weights in (vectors(seed=1), torch.zeros(3, SIZE)):
        yield weights, vectors(seed=3), vectors(seed=2), vectors(seed=4).sigmoid(), step_size, 0.3, 50, LOG_ALPHA_LIMIT, None


def skipped_steps():
    for scale in ConstraintScale:
        for log_alpha in (vectors(), vectors() * torch.nan):
            num_skipped, multiplier = vectors(seed=1).abs().floor(), torch.tensor([0.0, 0.5, 3e3])
            yield SHAPE, log_alpha, num_skipped, multiplier, scale, SIZE, 0.1, LOG_ALPHA_LIMIT


def adam_steps():
    params, gradient, first = vectors(3, std=1.0)
    for count in (1.0, 7.0):
        yield params, gradient, first, first.square(), torch.tensor(count), 0.1, 0.9, 0.999, 1e-8


def sparse_batches():
    rng = np.random.default_rng(3)
    dense = (rng.standard_normal((6, 400)) * (rng.random((6, 400)) < 0.05)).astype(np.float32)
    rows, columns = dense.nonzero()
    starts = (np.searchsorted(rows, np.arange(7)) + 11).astype(np.int32)  # offsets of a slice of a longer matrix
    for scipy_class in (None, csr_matrix):
        yield SparseBatch(starts, columns, dense[rows, columns], 400, scipy_class), dense


def feature_tables():
    return FeatureTables(*(vectors(1, seed=seed, size=1700).view(100, 17) for seed in (1, 2)))


FEATURES = torch.arange(3, 90, 2)


def feature_noise():
    noise = torch.rand(1, 17 * len(FEATURES), generator=torch.Generator().manual_seed(4))
    noise[0, :2] = torch.tensor([0.0, 1.0])
    return noise


def sparse_steps():
    tables = feature_tables()
    active = tables.active_gates(SHAPE, FEATURES)
    gradient = vectors(1, seed=3, size=17 * len(FEATURES))
    factors = (gradient, active.weighted_derivative)
    for scale in ConstraintScale:
        rest = (factors, torch.tensor([[0.3]]), torch.tensor([0.7]), scale, 5, 0.2, LOG_ALPHA_LIMIT)
        yield tables, SHAPE, FEATURES, gradient * active.value, *rest


def indexed_examples():
    rng = torch.Generator().manual_seed(6)
    for loss, outputs in ((Loss.SQUARED, 1), (Loss.LOGISTIC, 1), (Loss.SOFTMAX, 2), (Loss.SOFTMAX, 7)):
        for intercept in (False, True):
            for batch in (1, 7, 8):
                objective = Linear(loss=loss, num_features=SIZE, num_outputs=outputs, intercept=intercept)
                rows, indices = torch.randn(40, SIZE, generator=rng), torch.randint(0, 40, (3, batch), generator=rng)
                y = torch.randint(0, max(outputs, 2), (3, batch), generator=rng).float()
                yield objective, 0.1 * torch.randn(3, objective.layout.size, generator=rng), IndexedRows(rows, indices), y


def softmax_logits():
    rng = torch.Generator().manual_seed(5)
    objective = Linear(loss=Loss.SOFTMAX, num_features=200, num_outputs=7)
    yield objective, 40 * torch.randn(3, 7, 5, generator=rng), torch.randint(0, 7, (3, 5), generator=rng)


def multilabel_logits():
    rng = torch.Generator().manual_seed(5)
    objective = Linear(loss=Loss.MULTILABEL, num_features=400, num_outputs=3)
    yield objective, 9 * torch.randn(3, 6, 3, generator=rng), torch.randint(0, 2, (3, 6, 3), generator=rng).float()


def images():
    rng = torch.Generator().manual_seed(0)
    for shape, kernel in (((32, 1, 28, 28), (6, 1, 5, 5)), ((9, 6, 7, 8), (5, 6, 3, 2)), ((11, 2, 1, 3), (1, 2, 1, 3))):
        for bias in (torch.randn(kernel[0], generator=rng), None):
            yield torch.randn(shape, generator=rng), torch.randn(kernel, generator=rng), bias, 1, 0, 1, 1


def pooled_images():
    ties = torch.randn(9, 2, 8, 6, generator=torch.Generator().manual_seed(0)).round(decimals=1)
    ties[0, 0, :2, :2], ties[1, 1, 0, 3] = 0.0, torch.nan
    yield ties, 2, None, 0, 1, False, False


CASES = {
    "uniforms": (random_keys, 0.0, 0.0),
    "quantize_levels": (levels_to_quantize, 0.0, 0.0),
    "mean_of_levels": (quantized_fields, 1e-6, 1e-6),
    "sample_gates": (gates_and_noise, 5e-7, 0.0),
    "median_gates": (lambda: [(SHAPE, extreme_log_alpha())], 5e-7, 0.0),
    "chain_rule": (lambda: [(vectors(seed=2), vectors(seed=1), gates.median_gates(SHAPE, vectors(seed=3)))], 0.0, 0.0),
    "gated_magnitude": (lambda: [(SHAPE, vectors(seed=1), vectors(seed=3), GateAtTest.MEDIAN, 1e-6)], 1e-6, 1e-5),
    "penalty_gradient": (penalties, 5e-6, 0.0),
    "step_log_alpha": (log_alpha_steps, 2e-6, 1e-6),
    "gated_sgd_step": (gated_steps, 2e-6, 2e-6),
    "saliency_step": (saliency_steps, 2e-6, 2e-6),
    "apply_penalty": (skipped_steps, 2e-6, 1e-6),
    "ascend": (lambda: [(SHAPE, vectors(1)[0], torch.tensor(0.3), density, 0.5) for density in (0.05, 0.9)], 1e-6, 0.0),
    "adam": (adam_steps, 1e-6, 1e-5),
    "softmax_loss": (softmax_logits, 2e-5, 2e-6),
    "binary_loss": (multilabel_logits, 1e-6, 1e-5),
    "indexed_rows_gradient": (indexed_examples, 1e-5, 1e-5),
    "csr_matmul": (lambda: [(x, vectors(1, size=1200).view(1, 3, 400)) for x, _ in sparse_batches()], 1e-5, 1e-5),
    "csr_matmul_transposed": (lambda: [(x, vectors(1, size=18).view(1, 3, 6)) for x, _ in sparse_batches()], 1e-5, 1e-5),
    "active_gates": (lambda: [(feature_tables(), SHAPE, FEATURES, noise, NOISE_MARGIN) for noise in (None, feature_noise())], 2e-6, 1e-6),
    "gated_step": (sparse_steps, 2e-6, 1e-6),
    "convolution": (images, 2e-5, 1e-5),
    "max_pooling": (pooled_images, 0.0, 0.0),
}
"""Arguments of each kernel, and the absolute and relative tolerance; their names are those of `kernels.KERNELS`."""


def results(function, args):
    """The tensors that a function returns, or those of the tables that it changes in place."""
    tables = FeatureTables(*(part.clone() for part in args[0])) if isinstance(args[0], FeatureTables) else args[0]
    result = function(tables, *args[1:])
    return tables if result is None else result if isinstance(result, tuple) else (result,)


@pytest.mark.parametrize("name", sorted(kernels.KERNELS.keys() | CASES.keys()))
def test_a_kernel_equals_its_reference(monkeypatch, name):
    kernel, (cases, absolute, relative) = kernels.KERNELS[name], CASES[name]
    assert kernels.load(kernel.module) is not None, "pip install fedsieve[fast]"
    for args in cases():
        compiled = results(kernel.run, args)
        with monkeypatch.context() as without:
            without.setattr(kernels, "load", lambda _: None)
            reference = results(kernel.reference, args)
        assert type(compiled) is type(reference)
        for one, other in zip(compiled, reference, strict=True):
            torch.testing.assert_close(torch.as_tensor(one), torch.as_tensor(other), atol=absolute, rtol=relative, equal_nan=True)


def test_quantizing_values_that_are_not_finite_gives_a_scale_that_is_not():
    """Validation of replies looks at the scale only."""
    values = vectors(2)
    values[0, 5], values[1, 6] = torch.nan, torch.inf
    kernel, rest = kernels.KERNELS["quantize_levels"], (torch.full_like(values, 0.5), 1 / 127, 0.0, -127, 127)
    for form in (kernel.run, kernel.reference):
        assert not form(values, *rest)[1].isfinite().any()


def test_a_step_keeps_log_alpha_inside_its_limits():
    for args in (args for args in log_alpha_steps() if args[2].isfinite().all()):
        assert float(kernels.KERNELS["step_log_alpha"].run(*args).abs().max()) == LOG_ALPHA_LIMIT


def test_a_step_with_a_gradient_that_is_not_a_number_shows_it():
    for name, cases in (("step_log_alpha", log_alpha_steps), ("gated_sgd_step", gated_steps)):
        broken = [args for args in cases() if any(isinstance(part, torch.Tensor) and part.isnan().all() for part in args)]
        assert broken
        for args in broken:
            assert all(part.isnan().all() for part in results(kernels.KERNELS[name].run, args))


def test_skipped_steps_without_a_multiplier_change_nothing():
    log_alpha = next(skipped_steps())[1]
    new = constraint.apply_penalty(SHAPE, log_alpha, torch.ones_like(log_alpha), torch.zeros(3), ConstraintScale.SUM, SIZE, 0.1)
    assert torch.equal(new, log_alpha.clamp(-LOG_ALPHA_LIMIT, LOG_ALPHA_LIMIT))


def test_a_sparse_step_equals_the_step_on_a_copy_of_the_active_features():
    tables, *_ = step = next(sparse_steps())
    weights, log_alpha = (part[FEATURES].view(1, -1) for part in tables)
    gradient, step_size, multiplier = step[4][0], step[5], step[6]
    weight_gradient, gate_gradient = gates.chain_rule(gradient, weights, gates.median_gates(SHAPE, log_alpha))
    turned = constraint.step_log_alpha(SHAPE, log_alpha, gate_gradient, multiplier, ConstraintScale.SUM, 5, 0.2)
    for new, expected in zip(
        results(kernels.KERNELS["gated_step"].run, step), (weights - step_size * weight_gradient, turned), strict=True
    ):
        torch.testing.assert_close(new[FEATURES].view(1, -1), expected, atol=2e-6, rtol=1e-6)


def test_a_sparse_step_leaves_the_other_features_unchanged():
    step = next(sparse_steps())
    others = torch.ones(100, dtype=torch.bool).index_fill(0, FEATURES, False)
    for new, old in zip(results(kernels.KERNELS["gated_step"].run, step), feature_tables(), strict=True):
        assert torch.equal(new[others], old[others])


def test_a_sparse_batch_has_the_entries_of_its_dense_form():
    for x, dense in sparse_batches():
        assert np.array_equal(x.dense[0].numpy(), dense)


@pytest.mark.parametrize("intercept", [False, True])
def test_the_gradient_over_sparse_examples_equals_the_dense_one(intercept):
    objective = Linear(loss=Loss.MULTILABEL, num_features=400, num_outputs=3, intercept=intercept, feature_major=True)
    y, theta = torch.ones(1, 6, 3), vectors(1, std=1.0, size=objective.layout.size)
    for x, dense in sparse_batches():
        # The dense product orders weights by output, the sparse one by feature.
        by_output = Linear(loss=Loss.MULTILABEL, num_features=400, num_outputs=3, intercept=intercept)
        weights, rest = theta[:, :1200].view(1, 400, 3).transpose(1, 2).flatten(1), theta[:, 1200:]
        loss, gradient = by_output.gradient(torch.cat((weights, rest), dim=-1), Batch(torch.from_numpy(dense)[None], y))
        expected = torch.cat((gradient[:, :1200].view(1, 3, 400).transpose(1, 2).flatten(1), gradient[:, 1200:]), dim=-1)
        for one, other in zip(objective.gradient(theta, Batch(x, y)), (loss, expected), strict=True):
            torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)
