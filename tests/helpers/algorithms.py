"""Small algorithms for tests."""

from fedsieve.algorithms import algorithm_class
from fedsieve.algorithms.defaults import batches_per_round


def make_algorithm(name, num_batches=5, **options):
    """The algorithm of a name with so many mini-batches per client and round."""
    cls = algorithm_class(name)
    return cls(**{"batch_size": 8} | batches_per_round(cls, num_batches) | options)
