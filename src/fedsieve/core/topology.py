"""Topologies: which node receives from which, with which weights, and how fast averages spread. To add one, write one function.

A graph is a set of directed links (sender, receiver). `make_topology` turns it into mixing steps: in each step a node adds
sum_j w_ij (message_j - message_i) over the nodes j that it receives from in this step.
"""

from collections.abc import Callable, Iterable, Sequence
from math import ceil, log
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int64

from fedsieve.core.random import generator

Links = set[tuple[int, int]]
"""(sender, receiver)"""


class MixingStep(NamedTuple):
    """From whom each node receives in one step; rows are padded with the node itself and weight 0."""

    senders: Int64[np.ndarray, "n d"]
    weights: Float[np.ndarray, "n d"]

    @property
    def matrix(self) -> Float[np.ndarray, "n n"]:
        """The mixing matrix W; its rows sum to one."""
        num_nodes = len(self.senders)
        matrix = np.zeros((num_nodes, num_nodes))
        np.add.at(matrix, (np.arange(num_nodes)[:, None], self.senders), self.weights)
        return matrix + np.diag(1 - self.weights.sum(1))


class Topology(NamedTuple):
    """The mixing steps of a graph, used in turn: one for all links, or several with at most one sender per node (one-peer)."""

    name: str
    steps: tuple[MixingStep, ...]

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return len(self.steps[0].senders)

    @property
    def num_links(self) -> int:
        """Number of directed links that are used in one cycle of all steps."""
        return int(sum((step.weights > 0).sum() for step in self.steps))

    def step(self, number: int) -> MixingStep:
        """Return the step with this number, counted from the start of the run."""
        return self.steps[number % len(self.steps)]

    @property
    def spectral_gap(self) -> float:
        """1 - ||W - 11'/n||, the share of the disagreement that one step removes; the geometric mean over a cycle of steps."""
        product = np.eye(self.num_nodes)
        for step in self.steps:
            product = step.matrix @ product
        norm = np.linalg.norm(product - 1 / self.num_nodes, 2)
        return float(1 - max(norm, 0.0) ** (1 / len(self.steps)))

    @property
    def flooding_steps(self) -> int:
        """The number of steps after which news of any node has reached all others, if it starts with the first step of a cycle."""
        reached, number = np.eye(self.num_nodes, dtype=bool), 0
        while not reached.all():
            reached = spread(self.step(number), reached)
            number += 1
        return number


def spread(step: MixingStep, reached: Bool[np.ndarray, "n n"]) -> Bool[np.ndarray, "n n"]:
    """Return from which nodes each node has news after a step."""
    arrives = reached[step.senders] & (step.weights > 0)[..., None]
    return reached | arrives.any(1)


# Graphs


def ring(num_nodes: int) -> Links:
    """Each node and its two neighbours on a circle."""
    return both_ways((i, (i + 1) % num_nodes) for i in range(num_nodes))


def exponential(num_nodes: int) -> Links:
    """Each node i sends to i + 1, i + 2, i + 4, ... (modulo n): directed, ceil(log2 n) links per node."""
    return {(i, (i + 2**t) % num_nodes) for i in range(num_nodes) for t in range(ceil(log(num_nodes, 2) - 1e-9))}


def complete(num_nodes: int) -> Links:
    """Each node and all others."""
    return {(i, j) for i in range(num_nodes) for j in range(num_nodes) if i != j}


def erdos_renyi(num_nodes: int, degree: float | None, seed: int) -> Links:
    """Each pair is linked with the same probability: `degree` neighbours on average, 2 ln n unless set (connected almost surely)."""
    expected = 2 * log(num_nodes) if degree is None else degree
    linked = generator(seed, "topology").random((num_nodes, num_nodes)) < expected / (num_nodes - 1)
    return both_ways((int(i), int(j)) for i, j in zip(*np.nonzero(np.triu(linked, 1)), strict=True))


GRAPHS: dict[str, Callable[[int, float | None, int], Links]] = {
    "ring": lambda num_nodes, _degree, _seed: ring(num_nodes),
    "exponential": lambda num_nodes, _degree, _seed: exponential(num_nodes),
    "erdos-renyi": erdos_renyi,
    "complete": lambda num_nodes, _degree, _seed: complete(num_nodes),
}
"""(number of nodes, mean degree, seed) -> links."""


def both_ways(pairs: Iterable[tuple[int, int]]) -> Links:
    """Return links in both directions; a node is not its own neighbour."""
    return {link for i, j in pairs if i != j for link in ((i, j), (j, i))}


def parse_edge_list(text: str, source: str) -> Links:
    """Return the links of an edge list: two node numbers per line, counted from 0; # starts a comment."""
    pairs = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].replace(",", " ").split()
        if not words:
            continue
        if len(words) != 2 or not all(word.isdecimal() for word in words):
            raise ValueError(f"--topology {source}, line {number}: an edge is two node numbers from 0, such as 0 1; got {line.strip()!r}")
        pairs.append((int(words[0]), int(words[1])))
    if not (links := both_ways(pairs)):
        raise ValueError(f"--topology {source} has no edges; write one edge per line, such as 0 1")
    return links


# From a graph to its mixing steps


def make_topology(name: str, links: Links, num_nodes: int, *, one_peer: bool = False) -> Topology:
    """Return the mixing steps of a graph, or raise ValueError if it does not connect all nodes."""
    if num_nodes < 2:
        raise ValueError(f"--topology {name} needs at least 2 nodes, because a node alone has nobody to talk to; got {num_nodes}")
    if (largest := max((max(link) for link in links), default=0)) >= num_nodes:
        raise ValueError(f"--topology {name} has a node {largest}, and there are {num_nodes} clients, counted from 0; change one of them")
    reached = np.eye(num_nodes, dtype=bool)
    everything = all_links_step(links, num_nodes)
    for _ in range(num_nodes):
        if np.array_equal(more := spread(everything, reached), reached):
            break
        reached = more
    if not reached.all():
        node, other = (int(index) for index in np.argwhere(~reached)[0])
        raise ValueError(
            f"--topology {name} is not connected: nothing from node {other} reaches node {node}, so they could never agree; add edges"
        )
    if not one_peer:
        return Topology(name, (everything,))
    return Topology(name, tuple(one_peer_step(pairs, num_nodes) for pairs in one_peer_links(links, num_nodes)))


def all_links_step(links: Links, num_nodes: int) -> MixingStep:
    """Return the step with all links and Metropolis weights 1 / (1 + max(d_i, d_j)): doubly stochastic on graphs with links both ways.

    On the exponential graph, in which all degrees are equal, these are uniform weights.
    """
    senders: list[list[int]] = [[] for _ in range(num_nodes)]
    for sender, receiver in sorted(links):
        senders[receiver].append(sender)
    degrees = [len(each) for each in senders]
    return _pad_senders(senders, [[1 / (1 + max(degrees[i], degrees[j])) for j in senders[i]] for i in range(num_nodes)])


def one_peer_links(links: Links, num_nodes: int) -> list[list[tuple[int, int]]]:
    """Return the steps in which each node has at most one peer: the hops of a directed circle, or matchings of an undirected graph."""
    if any((j, i) not in links for i, j in links):
        hops = sorted({(receiver - sender) % num_nodes for sender, receiver in links})
        return [[(i, (i + hop) % num_nodes) for i in range(num_nodes)] for hop in hops]
    matchings: list[dict[int, int]] = []
    for i, j in sorted(link for link in links if link[0] < link[1]):
        if (matching := next((each for each in matchings if i not in each and j not in each), None)) is None:
            matchings.append(matching := {})
        matching |= {i: j, j: i}
    return [list(matching.items()) for matching in matchings]


def one_peer_step(pairs: Sequence[tuple[int, int]], num_nodes: int) -> MixingStep:
    """Return the step in which a node averages with the one that it receives from."""
    sender_of = {receiver: sender for sender, receiver in pairs}
    senders = [[sender_of[i]] if i in sender_of else [] for i in range(num_nodes)]
    return _pad_senders(senders, [[0.5] * len(each) for each in senders])


def _pad_senders(senders: Sequence[Sequence[int]], weights: Sequence[Sequence[float]]) -> MixingStep:
    width = max(map(len, senders))
    rows = [[*each, *[i] * (width - len(each))] for i, each in enumerate(senders)]
    return MixingStep(np.array(rows, dtype=np.int64), np.array([[*each, *[0.0] * (width - len(each))] for each in weights]))


def without_nodes(step: MixingStep, absent: Bool[np.ndarray, " n"]) -> MixingStep:
    """Return the step if some nodes are absent: their links have no weight, and the others keep more of their own."""
    gone = absent[step.senders] | absent[:, None]
    return step._replace(weights=np.where(gone, 0.0, step.weights))
