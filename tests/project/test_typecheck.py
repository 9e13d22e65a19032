"""The suite checks types and shapes in annotations of the functions that it calls."""

import pytest
import torch
from jaxtyping import TypeCheckError

from fedsieve.core.budgets import broadcast_within_groups
from helpers import typecheck

GROUPS = torch.tensor([0, 1])


@pytest.mark.parametrize("number", range(3))
def test_every_test_checks_the_first_call_of_a_function_again(number):
    with pytest.raises(TypeCheckError, match="values"):
        broadcast_within_groups(torch.tensor([1, 2]), GROUPS)  # integers where numbers of floating point are declared


def test_a_function_is_checked_at_its_first_calls_and_then_at_some(monkeypatch):
    monkeypatch.setattr(typecheck, "checks_all_calls", False)
    found = []
    for _ in range(2 * typecheck.THEN_ONE_OF):
        try:
            broadcast_within_groups(torch.tensor([1, 2]), GROUPS)
        except TypeCheckError:
            found.append(True)
    assert len(found) == typecheck.FIRST_CALLS + 2
