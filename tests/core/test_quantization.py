"""Codes of a message: the choice between signs and numbers is the best within the bytes."""

from itertools import combinations
from math import comb, log2

import pytest
import torch

from fedsieve.core.quantization import CODE_BITS, choose_code, max_entries, position_bits, quantize, quantize_signs


def unexplained_energy(vector, bits, num_entries):
    """The expected squared error of a message with the largest entries, computed from the message itself."""
    values = vector.sort(descending=True).values
    top, rest = values[:num_entries], values[num_entries:]
    if bits == 1:
        error = (quantize_signs(top).decode(torch.float64) - top).square()
    else:  # unbiased rounding to one of the two nearest levels
        low, high = (
            quantize(top, bits, lambda _, n, u=u: torch.full((n,), u, dtype=torch.float64), "", zero_free=True) for u in (0, 0.999999)
        )
        error = (high.decode(torch.float64) - top) * (top - low.decode(torch.float64))
    return float(error.sum() + rest.square().sum())


def fits(size, bits, num_entries, max_bytes):
    positions = 0 if num_entries == size else log2(comb(size, num_entries))
    return num_entries * bits + positions <= 8 * max_bytes


@pytest.mark.parametrize("exponent", [0.05, 1.0, 4.0])
@pytest.mark.parametrize("max_bytes", [2, 4, 7])
def test_the_code_leaves_the_least_energy_of_all_codes_that_fit(exponent, max_bytes):
    generator = torch.Generator().manual_seed(int(10 * exponent) + max_bytes)
    vector = torch.rand(14, generator=generator, dtype=torch.float64) ** exponent
    code = choose_code(vector, torch.ones_like(vector), max_bytes)
    tried = {
        (bits, k): unexplained_energy(vector, bits, k)
        for bits in CODE_BITS
        for k in range(1, 15)
        if fits(14, bits, k, max_bytes) and (k <= 7 or k == 14)
    }
    assert tried[code] == pytest.approx(min(tried.values()), rel=1e-3, abs=1e-6)


def test_importance_decides_which_entries_count():
    vector = torch.tensor([1.0, 1.0, 100.0, 1.0, 1.0, 1.0, 1.0, 1.0])
    importance = (vector < 10).to(vector)
    assert choose_code(vector, importance, 1.5).bits == 1
    assert choose_code(vector, torch.ones_like(vector), 1.5).num_entries == 1


@pytest.mark.parametrize("bits", CODE_BITS)
@pytest.mark.parametrize("max_bits", [10, 40, 100, 160])
def test_max_entries_is_the_largest_count_that_fits(bits, max_bits):
    size = 20
    brute_force = [k for k in range(1, size // 2 + 1) if k * bits + log2(comb(size, k)) <= max_bits]
    assert max_entries(size, bits, max_bits) == max(brute_force, default=1)


def test_position_bits_count_the_subsets():
    assert 2 ** position_bits(3, 7) == pytest.approx(len(list(combinations(range(7), 3))))
