"""The methods, by the name a user types. Modules load when asked for."""

from importlib import import_module

ALGORITHMS = {
    "sieve": ("sieve", "Sieve"),
    "flops": ("flops", "Flops"),
    "flops-pa": ("flops_pa", "FlopsPA"),
    "fed-iter-ht": ("fed_iter_ht", "FedIterHT"),
    "fed-ht": ("fed_ht", "FedHT"),
    "fed-round-ht": ("fed_round_ht", "FedRoundHT"),
    "fed-avg": ("fed_avg", "FedAvg"),
    "gradual": ("gradual", "Gradual"),
    "fed-l1": ("fed_l1", "FedL1"),
    "fed-sgd": ("fed_sgd", "FedSGD"),
    "random-mask": ("random_mask", "RandomMask"),
}


def algorithm_class(name: str) -> type:
    """The dataclass of a method."""
    module, cls = ALGORITHMS[name]
    return getattr(import_module(f"fedsieve.algorithms.{module}"), cls)
