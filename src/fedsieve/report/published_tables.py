"""Numbers that other people published, with their sources."""

from typing import NamedTuple

FLOWER = "Flower pull request 7076, EXTENDED_README.md (Tong et al. 2022, arXiv 2101.00052)"
FLAMBY = "FLamby edacf54d, flamby/results, pooled test, seeds 42-46 (Terrail et al. 2022, arXiv 2210.04620)"
FEDML = "FedML's benchmark of linear models (He et al. 2020, arXiv 2007.13518)"
FLOAT_BYTES = 4
POOLED_TRAINING = "pooled training"
"""A row without messages."""


class PublishedTable(NamedTuple):
    """A published table: what it measures, and the dense messages that its implementation sends."""

    measure: str
    """name of the measure in stored rows"""
    source: str
    num_weights: int
    clients_per_round: int
    rounds: tuple[int, ...]
    """rounds at which values are given"""
    values: dict[str, tuple[float | None, ...]]
    """values of each row at these rounds; None if the table says TBD"""
    lower_is_better: bool = False
    note: str = ""

    def bytes_until(self, round: int) -> int:
        """Return the bytes of all weights in float32, down and up, for every client of every round."""
        return 2 * FLOAT_BYTES * self.num_weights * self.clients_per_round * round


TABLES = {
    "Fed-HT, Simulation I": PublishedTable(
        "mse",
        FLOWER,
        1000,
        100,
        (1, 20, 40, 60, 80, 100),
        {
            "Distributed-IHT": (55.09, 14.28, 8.44, 6.73, 5.98, 5.71),
            "Fed-HT, K = 3": (31.65, 5.90, 5.60, 5.61, 5.60, 5.62),
            "FedIter-HT, K = 1": (46.80, 23.48, 17.43, 15.48, 13.18, 10.09),
            "FedIter-HT, K = 3": (None,) * 6,
        },
        lower_is_better=True,
        note="objective on 100 examples of the last ten clients, most of which these clients train on",
    ),
    "Fed-HT, Simulation II": PublishedTable(
        "ce",
        FLOWER,
        1000,
        100,
        (50, 100, 150, 200),
        dict.fromkeys(("Distributed-IHT", "Fed-HT, K = 5", "FedIter-HT, K = 5"), (None,) * 4),
        lower_is_better=True,
        note="objective on 1,000 examples of the last ten clients, most of which these clients train on",
    ),
    "Fed-HT, MNIST": PublishedTable(
        "ce",
        FLOWER,
        7840,
        100,
        (50, 100),
        dict.fromkeys(("Distributed-IHT", "Fed-HT, K = 5", "FedIter-HT, K = 5"), (None,) * 2),
        lower_is_better=True,
        note="cross-entropy on the 10,000 test digits; the two classes of each client are our own draw",
    ),
    "FLamby, heart disease": PublishedTable(
        "accuracy",
        FLAMBY,
        14,
        4,
        (15,),
        {
            POOLED_TRAINING: (0.7953,),
            "FedAvg": (0.7480,),
            "FedProx": (0.7480,),
            "Scaffold": (0.7480,),
            "FedAdam": (0.7787,),
            "FedAdagrad": (0.7787,),
            "FedYogi": (0.7787,),
        },
        note="accuracy on the 254 test patients; ours keep 6 of 13 weights",
    ),
    "FedML, MNIST": PublishedTable(
        "accuracy",
        FEDML,
        7850,
        10,
        (200,),
        {"FedAvg": (0.75,)},
        note="published as more than 75 % after 100 rounds or more; accuracy on a tenth of each client's digits; ours keep 5 %",
    ),
}
