from itertools import combinations

import numpy as np
import pytest
import torch
from scipy import optimize, stats

from fedsieve.core.aggregation import (
    Aggregator,
    ClientWeighting,
    client_weights,
    limit_largest,
    mean,
    quantized_mean,
    riemannian_mean,
    sparse_mean,
)
from fedsieve.core.packets import SparseVector
from fedsieve.core.quantization import quantize
from fedsieve.core.robust_aggregation import geometric_median, krum_selection, median, robust_aggregate, similarity_mean, trimmed_mean

EXAMPLES = (1.0, 4.0, 15.0)


def vectors(k=3, n=20):
    return torch.randn(k, n, generator=torch.Generator().manual_seed(4), dtype=torch.float64)


@pytest.mark.parametrize("kind", ClientWeighting)
def test_weights_of_a_cohort_add_up_to_one(kind):
    assert float(client_weights(EXAMPLES, kind, torch.float64).sum()) == pytest.approx(1)


def test_client_weights_follow_their_definitions():
    assert client_weights(EXAMPLES, ClientWeighting.EXAMPLES, torch.float64).tolist() == pytest.approx([0.05, 0.2, 0.75])
    assert client_weights(EXAMPLES, ClientWeighting.UNIFORM, torch.float64).tolist() == pytest.approx([1 / 3] * 3)
    roots = torch.tensor(EXAMPLES, dtype=torch.float64).sqrt()
    assert torch.allclose(client_weights(EXAMPLES, ClientWeighting.SQRT, torch.float64), roots / roots.sum())


def test_the_mean_is_the_weighted_sum():
    weights = client_weights(EXAMPLES, ClientWeighting.EXAMPLES, torch.float64)
    torch.testing.assert_close(mean(vectors(), weights), weights @ vectors())


@pytest.mark.parametrize("default", [None, torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)])
def test_the_mean_of_sparse_vectors_is_that_of_the_full_ones(default):
    weights = client_weights(EXAMPLES, ClientWeighting.EXAMPLES, torch.float64)
    stack = SparseVector(vectors(3, 4), torch.tensor([[0, 3, 5, 9], [1, 3, 5, 6], [0, 1, 2, 3]]), default)
    torch.testing.assert_close(sparse_mean([stack], weights, 10), weights @ stack.densify(None, 10))
    each = [SparseVector(*(None if part is None else part[k : k + 1] for part in stack)) for k in range(3)]
    torch.testing.assert_close(sparse_mean(each, weights, 10), weights @ stack.densify(None, 10))
    each[1] = SparseVector(each[1].densify(None, 10))  # a reply that holds all coordinates
    torch.testing.assert_close(sparse_mean(each, weights, 10), weights @ stack.densify(None, 10))
    whole = SparseVector(vectors())
    torch.testing.assert_close(sparse_mean([whole], weights, 20), weights @ vectors())


def test_the_mean_of_quantized_vectors_is_that_of_the_decoded_ones():
    weights = client_weights(EXAMPLES, ClientWeighting.EXAMPLES, torch.float64)
    field = quantize(vectors(), 8, lambda purpose, size: torch.full((3, size), 0.5, dtype=torch.float64), "x", zero_free=True)
    torch.testing.assert_close(quantized_mean(field, weights), weights @ field.decode(torch.float64))


@pytest.mark.parametrize("k", [20, 39, 40])
def test_of_twenty_sizes_none_exceeds_the_largest_of_the_honest_ones(k):
    sizes, num_malicious = torch.rand(k, generator=torch.Generator().manual_seed(k)), k // 20
    for chosen in (range(num_malicious), range(k - num_malicious, k)):
        attacked = sizes.index_fill(0, torch.tensor(chosen), 1e30)
        honest = sizes[[i for i in range(k) if i not in chosen]]
        limited = limit_largest(attacked)
        assert float(limited.max()) == float(honest.max())
        assert limited[[i for i in range(k) if i not in chosen]].tolist() == honest.tolist()


def test_below_twenty_replies_there_is_no_limit():
    sizes = torch.rand(19, generator=torch.Generator().manual_seed(0))
    assert limit_largest(sizes).tolist() == sizes.tolist()


def test_the_riemannian_mean_converges_within_its_default_iterations():
    weights = client_weights(EXAMPLES, ClientWeighting.EXAMPLES, torch.float64)
    torch.testing.assert_close(riemannian_mean(vectors(), weights), riemannian_mean(vectors(), weights, 60), rtol=1e-3, atol=1e-3)


def test_the_riemannian_mean_of_equal_vectors_is_that_vector():
    v = vectors(1)[0]
    torch.testing.assert_close(riemannian_mean(v.expand(3, -1), client_weights(EXAMPLES, ClientWeighting.RIEMANNIAN, torch.float64)), v)


def test_the_riemannian_mean_of_two_vectors_is_at_the_weighted_angle():
    a, b = torch.tensor([2.0, 0.0], dtype=torch.float64), torch.tensor([0.0, 4.0], dtype=torch.float64)
    found = riemannian_mean(torch.stack([a, b]), torch.tensor([0.75, 0.25], dtype=torch.float64))
    angle = torch.tensor(0.25 * torch.pi / 2, dtype=torch.float64)
    torch.testing.assert_close(found, 2.5 * torch.stack([angle.cos(), angle.sin()]))


def test_the_riemannian_mean_cancels_all_pulls_on_the_sphere():
    weights = client_weights(EXAMPLES, ClientWeighting.EXAMPLES, torch.float64)
    point = riemannian_mean(vectors(), weights, num_iterations=60)
    point = point / point.norm()
    unit = vectors() / vectors().norm(dim=-1, keepdim=True)
    cosine = unit @ point
    tangent = unit - cosine[:, None] * point
    pull = weights @ (torch.acos(cosine)[:, None] * tangent / tangent.norm(dim=-1, keepdim=True))
    assert pull.norm() < 1e-9


def test_a_zero_vector_does_not_influence_the_riemannian_direction():
    v = vectors(1)[0]
    found = riemannian_mean(torch.stack([v, torch.zeros_like(v)]), torch.tensor([0.5, 0.5], dtype=torch.float64))
    torch.testing.assert_close(found, v / 2)


# Robust means

ROBUST = [kind for kind in Aggregator if kind is not Aggregator.WEIGHTED]


def uniform(k):
    return torch.full((k,), 1 / k, dtype=torch.float64)


@pytest.mark.parametrize("k", [1, 2, 3, 6, 7])
def test_the_median_of_equal_weights_is_numpys(k):
    np.testing.assert_allclose(median(vectors(k), uniform(k)), np.median(vectors(k).numpy(), axis=0))


@pytest.mark.parametrize(("k", "trim"), [(10, 0.1), (10, 0.3), (5, 0.2), (7, 0.0), (20, 0.45)])
def test_the_trimmed_mean_of_equal_weights_is_scipys(k, trim):
    np.testing.assert_allclose(trimmed_mean(vectors(k), uniform(k), trim), stats.trim_mean(vectors(k).numpy(), trim, axis=0))


@pytest.mark.parametrize("counts", [[1, 2, 3, 4], [5, 1, 1, 1], [2, 2, 3, 3]])
def test_a_weight_counts_like_that_many_clients(counts):
    """Weighted by n_k, or each client n_k times: the same."""
    each = vectors(4)
    many = each.repeat_interleave(torch.tensor(counts), dim=0)
    weights = torch.tensor(counts, dtype=torch.float64) / sum(counts)
    torch.testing.assert_close(median(each, weights), median(many, uniform(sum(counts))))
    torch.testing.assert_close(trimmed_mean(each, weights, 0.2), trimmed_mean(many, uniform(sum(counts)), 0.2))
    torch.testing.assert_close(geometric_median(each, weights), geometric_median(many, uniform(sum(counts))), rtol=1e-4, atol=1e-4)


def test_the_geometric_median_has_the_least_sum_of_distances():
    each, weights = vectors(6, 4), torch.tensor([1, 2, 3, 1, 1, 2.0], dtype=torch.float64) / 10

    def cost(x):
        return float(weights.numpy() @ np.linalg.norm(each.numpy() - x, axis=1))

    found = geometric_median(each, weights).numpy()
    assert cost(found) <= optimize.minimize(cost, each.mean(0).numpy(), method="Nelder-Mead", options={"xatol": 1e-9}).fun + 1e-6


def test_the_geometric_median_of_collinear_points_is_their_median():
    line = torch.tensor([[0.0, 0.0], [1.0, 2.0], [5.0, 10.0]], dtype=torch.float64)
    torch.testing.assert_close(geometric_median(line, uniform(3)), line[1], rtol=1e-4, atol=1e-4)


def test_krum_keeps_those_with_the_nearest_neighbours():
    """Brute force over all choices of neighbours."""
    each, hostile = vectors(8, 5), 2
    distance = torch.cdist(each, each).square()
    score = [
        min(sum(float(distance[i, j]) for j in chosen) for chosen in combinations([j for j in range(8) if j != i], 8 - hostile - 2))
        for i in range(8)
    ]
    assert krum_selection(each, hostile).nonzero()[:, 0].tolist() == sorted(np.argsort(score)[: 8 - hostile].tolist())


@pytest.mark.parametrize("kind", ROBUST)
@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_clients_that_agree_are_believed_however_few(kind, k):
    v = vectors(1)
    found = robust_aggregate({"theta": v.expand(k, -1)}, uniform(k), kind, 0.3)
    torch.testing.assert_close(found["theta"], v[0])


@pytest.mark.parametrize("kind", ROBUST)
@pytest.mark.parametrize("size", [10.0, 1e3, 1e30])
def test_three_malicious_clients_of_ten_cannot_move_a_robust_mean_far(kind, size):
    """Breakdown: however far they go, the mean stays among the honest replies; the weighted mean goes with them."""
    honest = 1 + 0.1 * vectors(7)
    hostile = torch.full((3, 20), -size, dtype=torch.float64)
    found = robust_aggregate({"theta": torch.cat((honest, hostile))}, uniform(10), kind, 0.3)["theta"]
    assert ((found > honest.amin(0) - 0.15) & (found < honest.amax(0) + 0.15)).all()
    assert mean(torch.cat((honest, hostile)), uniform(10)).max() < -1


@pytest.mark.parametrize("kind", [Aggregator.MEDIAN, Aggregator.GEOMETRIC_MEDIAN])
def test_no_aggregator_is_robust_to_a_malicious_majority(kind):
    each = torch.cat((vectors(4), torch.full((5, 20), 1e6, dtype=torch.float64)))
    assert robust_aggregate({"theta": each}, uniform(9), kind, 0.3)["theta"].min() > 1e5


def test_beyond_what_it_tolerates_the_trimmed_mean_does_not_hold():
    each = torch.cat((vectors(8), torch.full((2, 20), 1e6, dtype=torch.float64)))
    assert robust_aggregate({"theta": each}, uniform(10), Aggregator.TRIMMED, 0.2)["theta"].max() < 10
    assert robust_aggregate({"theta": each}, uniform(10), Aggregator.TRIMMED, 0.1)["theta"].min() > 1e4


@pytest.mark.parametrize("kind", ROBUST)
def test_coordinates_absent_from_all_replies_do_not_move(kind):
    narrow = vectors(5, 6)
    wide = torch.zeros(5, 20, dtype=torch.float64)
    wide[:, 3:9] = narrow
    found = robust_aggregate({"theta": wide}, uniform(5), kind, 0.2)["theta"]
    assert not found[:3].any() and not found[9:].any()
    torch.testing.assert_close(found[3:9], robust_aggregate({"theta": narrow}, uniform(5), kind, 0.2)["theta"])


@pytest.mark.parametrize("kind", [Aggregator.KRUM, Aggregator.GEOMETRIC_MEDIAN])
def test_a_client_is_judged_by_all_it_sent_and_no_part_drowns_the_other(kind):
    """Gates a thousand times as large as weights do not hide a client that lies in its weights."""
    gates, weights = 1e3 * vectors(7), torch.ones(7, 20, dtype=torch.float64) + 0.1 * vectors(7)
    weights[6] = -50.0
    found = robust_aggregate({"theta": weights, "gate": gates}, uniform(7), kind, 0.2)
    assert ((found["theta"] > 0.5) & (found["theta"] < 1.5)).all()


@pytest.mark.parametrize("kind", ROBUST)
def test_a_field_that_no_client_changed_stays_at_zero(kind):
    deltas = {"theta": vectors(5), "gate": torch.zeros(5, 20, dtype=torch.float64)}
    found = robust_aggregate(deltas, uniform(5), kind, 0.2)
    assert not found["gate"].any()
    torch.testing.assert_close(found["theta"], robust_aggregate({"theta": vectors(5)}, uniform(5), kind, 0.2)["theta"])


def test_krum_is_the_weighted_mean_of_the_selected_clients():
    each, weights = vectors(6), torch.tensor([1, 2, 3, 4, 5, 6.0], dtype=torch.float64) / 21
    selected = weights * krum_selection(each, 2)
    found = robust_aggregate({"theta": each}, weights, Aggregator.KRUM, 0.34)["theta"]
    torch.testing.assert_close(found, selected @ each / selected.sum())


def test_the_geometric_median_is_over_all_fields_in_units_of_their_median_norms():
    each, gates = vectors(5, 8), 100 * vectors(5, 6)
    found = robust_aggregate({"theta": each, "gate": gates}, uniform(5), Aggregator.GEOMETRIC_MEDIAN, 0.2)
    units = each.norm(dim=1).median(), gates.norm(dim=1).median()
    expected = geometric_median(torch.cat((each / units[0], gates / units[1]), 1), uniform(5))
    torch.testing.assert_close(torch.cat((found["theta"] / units[0], found["gate"] / units[1])), expected)


def test_the_geometric_median_is_a_client_that_has_half_of_the_weight():
    half, more = torch.tensor([[0.5, 0.2, 0.3], [0.6, 0.2, 0.2]], dtype=torch.float64)
    torch.testing.assert_close(geometric_median(vectors(), half), vectors()[0], rtol=1e-3, atol=1e-3)
    assert torch.equal(geometric_median(vectors(), more), vectors()[0])


def test_a_weight_counts_in_part_between_the_quantiles():
    values, weights = torch.tensor([[0.0], [1.0], [10.0]], dtype=torch.float64), torch.tensor([0.3, 0.4, 0.3], dtype=torch.float64)
    assert float(trimmed_mean(values, weights, 0.2)) == pytest.approx((0.1 * 0 + 0.4 * 1 + 0.1 * 10) / 0.6)


@pytest.mark.parametrize("kind", ROBUST)
def test_a_field_that_few_clients_changed_has_no_unit_and_does_no_harm(kind):
    """The median norm of the gates is zero, and nothing is divided by it."""
    gates = torch.zeros(5, 20, dtype=torch.float64)
    gates[0, 3] = 1.0
    found = robust_aggregate({"theta": vectors(5), "gate": gates}, uniform(5), kind, 0.2)
    assert all(field.isfinite().all() for field in found.values()) and found["theta"].any()


@pytest.mark.parametrize("kind", ROBUST)
def test_a_robust_mean_keeps_the_precision_of_the_replies(kind):
    found = robust_aggregate({"theta": vectors(5).float(), "gate": vectors(5).float()}, uniform(5).float(), kind, 0.2)
    assert {field.dtype for field in found.values()} == {torch.float32}


# Weights by similarity


def test_equal_vectors_among_orthogonal_ones_count_as_one():
    """By hand: e1 three times, then e2, e3, e4, e5, all of length 1. The median cosine is 0, so e1 counts 1 / (1 + 2) each time."""
    each = torch.eye(5, dtype=torch.float64)[[0, 0, 0, 1, 2, 3, 4]]
    torch.testing.assert_close(similarity_mean(each, uniform(7)), torch.full((5,), 1 / 5, dtype=torch.float64))


def test_similarity_of_orthogonal_vectors_takes_nothing_off_their_mean():
    torch.testing.assert_close(similarity_mean(torch.eye(7, dtype=torch.float64), uniform(7)), torch.full((7,), 1 / 7, dtype=torch.float64))


@pytest.mark.parametrize("scale", [0.0, 0.1, 1.0, 1e12])
def test_a_minority_that_opposes_identical_replies_counts_little(scale):
    """By hand: eight of twenty send the opposite, so they exceed their median cosine -1 by 2 and count 1 / (1 + 7 * 4) each."""
    honest = vectors(1).expand(12, -1)
    found = similarity_mean(torch.cat((-scale * honest[:8], honest)), uniform(20))
    share = 8 / 29 / (12 + 8 / 29) if scale else 0.0
    expected = (1 - share - share * min(scale, 1.0)) if scale else 12 / 20
    torch.testing.assert_close(found, expected * honest[0])


@pytest.mark.parametrize("size", [0.0, 1.0, 10.0, 1e12])
def test_colluding_replies_move_the_result_by_less_than_a_fifth_of_a_length(size):
    """Eight of twenty send the same among honest replies that differ; without them the result is that of the honest replies."""
    honest = vectors(12, 100)
    alone = similarity_mean(honest, uniform(12))
    for direction in (-honest.mean(0), torch.ones(100, dtype=torch.float64), honest.std(0)):
        hostile = (size * direction / direction.norm()).expand(8, -1)
        found = similarity_mean(torch.cat((hostile, honest)), uniform(20))
        if size:
            assert (found - alone).norm() <= 0.2 * honest.norm(dim=-1).max()
        assert found.norm() <= honest.norm(dim=-1).max()


def test_lies_about_gates_do_not_change_the_mean_of_weights():
    deltas = {"update": vectors(8, 6), "kept_gate": vectors(8, 1).flip(0)}
    lied = deltas | {"kept_gate": torch.cat((torch.full((3, 1), 1e6, dtype=torch.float64), deltas["kept_gate"][3:]))}
    honest, attacked = (robust_aggregate(each, uniform(8), Aggregator.SIMILARITY, 0.3) for each in (deltas, lied))
    assert torch.equal(honest["update"], attacked["update"])
    assert float(attacked["kept_gate"].abs()) <= float(deltas["kept_gate"].abs().max())
