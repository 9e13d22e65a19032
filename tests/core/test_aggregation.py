import pytest
import torch

from fedsieve.core.aggregation import Weighting, cohort_weights, combine, mean, riemannian_mean

EXAMPLES = torch.tensor([1.0, 4.0, 15.0], dtype=torch.float64)


def vectors(k=3, n=20):
    return torch.randn(k, n, generator=torch.Generator().manual_seed(4), dtype=torch.float64)


@pytest.mark.parametrize("kind", Weighting)
def test_weights_of_a_cohort_add_up_to_one(kind):
    assert float(cohort_weights(EXAMPLES, kind).sum()) == pytest.approx(1)


def test_the_weightings_are_what_they_are_called():
    assert cohort_weights(EXAMPLES, Weighting.EXAMPLES).tolist() == pytest.approx([0.05, 0.2, 0.75])
    assert cohort_weights(EXAMPLES, Weighting.UNIFORM).tolist() == pytest.approx([1 / 3] * 3)
    roots = EXAMPLES.sqrt()
    assert torch.allclose(cohort_weights(EXAMPLES, Weighting.SQRT), roots / roots.sum())


def test_the_mean_is_the_weighted_sum():
    weights = cohort_weights(EXAMPLES, Weighting.EXAMPLES)
    torch.testing.assert_close(mean(vectors(), weights), weights @ vectors())


def test_the_riemannian_mean_of_equal_vectors_is_that_vector():
    v = vectors(1)[0]
    torch.testing.assert_close(combine(v.expand(3, -1), EXAMPLES, Weighting.RIEMANNIAN), v)


def test_the_riemannian_mean_of_two_vectors_lies_on_their_great_circle_at_the_weighted_angle():
    a, b = torch.tensor([2.0, 0.0], dtype=torch.float64), torch.tensor([0.0, 4.0], dtype=torch.float64)
    found = riemannian_mean(torch.stack([a, b]), torch.tensor([0.75, 0.25], dtype=torch.float64))
    angle = torch.tensor(0.25 * torch.pi / 2, dtype=torch.float64)
    torch.testing.assert_close(found, 2.5 * torch.stack([angle.cos(), angle.sin()]))


def test_the_riemannian_mean_cancels_all_pulls_on_the_sphere():
    weights = cohort_weights(EXAMPLES, Weighting.EXAMPLES)
    point = riemannian_mean(vectors(), weights, iterations=60)
    point = point / point.norm()
    unit = vectors() / vectors().norm(dim=-1, keepdim=True)
    cosine = unit @ point
    tangent = unit - cosine[:, None] * point
    pull = weights @ (torch.acos(cosine)[:, None] * tangent / tangent.norm(dim=-1, keepdim=True))
    assert pull.norm() < 1e-9


def test_a_client_that_sends_zeros_has_no_direction_and_no_say_in_it():
    v = vectors(1)[0]
    found = riemannian_mean(torch.stack([v, torch.zeros_like(v)]), torch.tensor([0.5, 0.5], dtype=torch.float64))
    torch.testing.assert_close(found, v / 2)
