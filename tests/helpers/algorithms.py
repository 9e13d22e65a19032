"""Small algorithms for tests."""

import pytest

from fedsieve.algorithms import ALGORITHMS, algorithm_class
from fedsieve.algorithms.defaults import batches_per_round


def make_algorithm(name, num_batches=5, **options):
    """The algorithm of a name with so many mini-batches per client and round."""
    cls = algorithm_class(name)
    return cls(**{"batch_size": 8} | batches_per_round(cls, num_batches) | options)


OFTEN_USED = ("sieve", "flops", "flops-pa", "fed-avg", "fed-round-ht", "sign-ht", "stc")
SOME_ALGORITHMS = [pytest.param(name, marks=[pytest.mark.long] * (name not in OFTEN_USED)) for name in ALGORITHMS]
"""All algorithms; those that are not used often only in the long form."""
