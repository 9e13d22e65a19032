"""The algorithms by name. Their modules are imported on first use."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedsieve.algorithms.base import BaseAlgorithm

ALGORITHMS = {
    "sieve": ("sieve", "Sieve"),
    "flops": ("flops", "Flops"),
    "flops-pa": ("flops_pa", "FlopsPA"),
    "fed-iter-ht": ("hard_thresholding", "FedIterHT"),
    "fed-ht": ("hard_thresholding", "FedHT"),
    "fed-round-ht": ("hard_thresholding", "FedRoundHT"),
    "fed-avg": ("fed_avg", "FedAvg"),
    "gradual": ("masked", "Gradual"),
    "fed-l1": ("fed_l1", "FedL1"),
    "fed-sgd": ("fed_sgd", "FedSGD"),
    "random-mask": ("masked", "RandomMask"),
    "sign-ht": ("sign_ht", "SignHT"),
    "ssfl": ("ssfl", "SSFL"),
    "fed-dst": ("fed_dst", "FedDST"),
    "eden": ("eden", "Eden"),
    "fed-ef": ("fed_ef", "FedEF"),
    "stc": ("stc", "STC"),
}
"""Name -> (module, class)."""


def algorithm_class(name: str) -> "type[BaseAlgorithm]":
    """Return the dataclass of an algorithm."""
    module, cls = ALGORITHMS[name]
    return getattr(import_module(f"fedsieve.algorithms.{module}"), cls)
