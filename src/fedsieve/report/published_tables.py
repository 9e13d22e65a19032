"""Numbers that other people published, with their sources."""

from collections.abc import Mapping
from typing import NamedTuple

FLOWER = "Flower pull request 7076, EXTENDED_README.md (Tong et al. 2022, arXiv 2101.00052)"
FLAMBY = "FLamby edacf54d, flamby/results, pooled test, seeds 42-46 (Terrail et al. 2022, arXiv 2210.04620)"
FEDML = "FedML's benchmark of linear models (He et al. 2020, arXiv 2007.13518)"
HETEROFL = "Flower's baseline of HeteroFL, README.md (Diao et al. 2021, arXiv 2010.01264)"
SPARSIFICATION = "Natasha-R/Federated-Learning-Sparsification d3d20c00, results/*.csv"
FLOAT_BYTES = POSITION_BYTES = 4
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
    message_entries: Mapping[str, tuple[int, int]] = {}
    """entries down and up of rows that do not send all weights; fewer up than down have a position each"""
    recoded_bytes: Mapping[str, int] = {}
    """bytes of one client's messages in a round of these rows in our wire format: 32-bit values at random positions, down and up"""
    their_rounds: int | None = None
    """rounds after which the values were published, if ours are a scaled copy with fewer"""
    is_scaled: bool = False
    """whether ours have fewer rounds, clients or weights; `note` says which"""

    def bytes_until(self, row: str, round: int) -> int:
        """Return the bytes of a row's messages in float32, with positions of four bytes, for every client of every round."""
        down, up = self.message_entries.get(row, (self.num_weights, self.num_weights))
        positions = POSITION_BYTES * up if up < down else 0
        return (FLOAT_BYTES * (down + up) + positions) * self.num_messages(round)

    def recoded_bytes_until(self, row: str, round: int) -> dict[str, float | None] | None:
        """Return the bytes of a row's messages in our wire format, as mean and standard deviation; None if they are not known."""
        return {"mean": self.recoded_bytes[row] * self.num_messages(round), "sd": None} if row in self.recoded_bytes else None

    def num_messages(self, round: int) -> int:
        """Return how often a client took part until this round of ours, or until the round whose values are published."""
        return self.clients_per_round * (self.their_rounds or round)


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
    "HeteroFL, MNIST": PublishedTable(
        "accuracy",
        HETEROFL,
        44_426,
        100,
        (100,),
        {"HeteroFL a": (0.9887,), "HeteroFL c": (0.9714,), "HeteroFL d": (0.9758,), "HeteroFL e": (0.9650,)},
        note="two classes per client; theirs: 1,556,874, 98,922, 25,274 and 6,594 weights, 100 clients in each of 400 rounds, 5 epochs; "
        "ours, scaled: LeNet, 10 clients in each of 100 rounds, 1 epoch; the two classes of each client are our own draw",
        message_entries={
            "HeteroFL a": (1_556_874, 1_556_874),
            "HeteroFL c": (98_922, 98_922),
            "HeteroFL d": (25_274, 25_274),
            "HeteroFL e": (6594, 6594),
        },
        recoded_bytes={"HeteroFL a": 12_455_030, "HeteroFL c": 791_414, "HeteroFL d": 202_230, "HeteroFL e": 52_788},
        their_rounds=400,
        is_scaled=True,
    ),
    "Natasha-R, CIFAR-10": PublishedTable(
        "accuracy",
        SPARSIFICATION,
        471_338,
        15,
        (20, 40),
        {"FedAvg": (None, None), "Top-k 10 %": (0.25, 0.40), "Top-k 1 %": (0.20, 0.35)},
        note="published as rounds to steps of .05, shown as at least the last step; FedAvg only as .55 after 165 rounds; theirs top-k "
        "without error feedback, on test images of 15 clients; ours, scaled: the first 40 of 180 rounds, 31 steps for one epoch",
        message_entries={"Top-k 10 %": (471_338, 47_133), "Top-k 1 %": (471_338, 4713)},
        recoded_bytes={"Top-k 10 %": 2_101_943, "Top-k 1 %": 1_909_021},
        is_scaled=True,
    ),
}
