"""Schedules of density and log_alpha."""

import pytest
import torch

from fedsieve.core import schedules
from fedsieve.core.schedules import LogAlphaScaling


def test_each_scaling_follows_its_formula():
    log_alpha = torch.tensor([2.0, 2.0, -2.0, -2.0])
    chosen = torch.tensor([True, False, True, False])
    scaled = {kind: schedules.scale_log_alpha(log_alpha, chosen, 0.5, kind).tolist() for kind in LogAlphaScaling}
    assert scaled[LogAlphaScaling.LINEAR] == [7.0, -5.0, 5.0, -7.0]
    assert scaled[LogAlphaScaling.LITERAL] == [3.0, 1.0, -3.0, -1.0]
    assert scaled[LogAlphaScaling.OFF] == log_alpha.tolist()


@pytest.mark.parametrize("kind", LogAlphaScaling)
def test_one_mask_for_all_gates_is_the_same_as_equal_masks(kind):
    log_alpha = torch.tensor([2.0, -1.0, 0.5])
    for chosen in (True, False):
        found = schedules.scale_log_alpha(log_alpha, chosen, 0.5, kind)
        assert torch.equal(found, schedules.scale_log_alpha(log_alpha, torch.full((3,), chosen), 0.5, kind))


def test_the_literal_scaling_never_closes_an_open_gate():
    log_alpha = torch.tensor([3.0])
    for _ in range(200):
        log_alpha = schedules.scale_log_alpha(log_alpha, torch.tensor([False]), 0.5, LogAlphaScaling.LITERAL)
    assert float(log_alpha) >= 0


def test_scaling_stays_inside_the_limits():
    far = torch.tensor([11.9, -11.9])
    assert schedules.scale_log_alpha(far, torch.tensor([True, True]), 0.5, LogAlphaScaling.LITERAL).tolist() == [12.0, -12.0]


def test_linear_scaling_moves_by_equal_steps_and_ends_at_the_limits():
    path = [torch.tensor([2.0, 2.0])]
    for left in range(10, 0, -1):
        path.append(schedules.scale_log_alpha(path[-1], torch.tensor([True, False]), 1 / left, LogAlphaScaling.LINEAR))
    steps = torch.stack(path).diff(dim=0)
    torch.testing.assert_close(steps, torch.tensor([1.0, -1.4]).expand(10, 2))
    assert path[-1].tolist() == [12.0, -12.0]
