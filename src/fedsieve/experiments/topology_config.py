"""Who talks to whom in a run: the options of --topology, and the graph or the tree that they describe."""

from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from fedsieve.core.topology import GRAPHS, Topology, make_topology, parse_edge_list

STAR, TREE = "star", "tree"
WITH_SERVER = (STAR, TREE)


@dataclass(frozen=True, kw_only=True)
class TopologyConfig:
    """Who talks to whom."""

    name: str = STAR
    """who talks to whom: star and tree have a server; ring, exponential, erdos-renyi, complete, or a FILE of edges have none"""
    levels: int = 1
    """levels of aggregators between the clients and the root of a tree"""
    degree: float | None = None
    """mean number of neighbours in an erdos-renyi graph (default: twice the natural logarithm of the number of nodes)"""
    seed: int = 0
    """seed of an erdos-renyi graph"""
    one_peer: bool = False
    """without a server: each node talks to one neighbour at a time, in turn, instead of to all"""
    mixing_steps: int | None = None
    """without a server: messages to each current neighbour per round (default: 1, or 2 with one-peer)"""

    def __post_init__(self) -> None:
        """Validate the options; an option without effect is an error."""
        for option, needed in (("levels", (TREE,)), ("degree", ("erdos-renyi",)), ("seed", ("erdos-renyi",))):
            value = getattr(self, option)
            if value != getattr(type(self), option) and self.name not in needed:
                raise ValueError(f"topology.{option} {value:g} applies to --topology {needed[0]}, not to {self.name}; leave it out")
        if not self.is_gossip and (self.one_peer or self.mixing_steps is not None):
            option = "one-peer" if self.one_peer else "mixing-steps"
            raise ValueError(f"topology.{option} applies to topologies without a server, and {self.name} has one; leave it out")
        for option, value in (("levels", self.levels), ("mixing-steps", self.num_mixing_steps)):
            if value < 1:
                raise ValueError(f"topology.{option} must be at least 1; got {value}")
        if self.degree is not None and not self.degree > 0:
            raise ValueError(f"topology.degree must be above 0; got {self.degree:g}")
        if self.name not in WITH_SERVER and self.name not in GRAPHS and not Path(self.name).is_file():
            raise ValueError(
                f"--topology takes {', '.join((*WITH_SERVER, *GRAPHS))} or a file with one edge per line; there is no file {self.name}"
            )

    @property
    def is_gossip(self) -> bool:
        """Whether there is no server."""
        return self.name not in WITH_SERVER

    @property
    def num_mixing_steps(self) -> int:
        """The number of mixing steps in a round."""
        return (2 if self.one_peer else 1) if self.mixing_steps is None else self.mixing_steps

    def make_graph(self, num_nodes: int) -> Topology:
        """Return the graph of this many nodes, or raise ValueError if it does not connect them."""
        if num_nodes < 2:
            links = set()
        elif self.name in GRAPHS:
            links = GRAPHS[self.name](num_nodes, self.degree, self.seed)
        else:
            try:
                links = parse_edge_list(Path(self.name).read_text(), self.name)
            except (OSError, UnicodeDecodeError) as error:
                raise ValueError(f"--topology {self.name} cannot be read as text: {error}") from None
        return make_topology(self.name, links, num_nodes, one_peer=self.one_peer)

    def describe(self, num_nodes: int) -> dict[str, Any] | None:
        """Return the graph in a few plain numbers; None for a star."""
        if self.name == STAR:
            return None
        if self.name == TREE:
            return {"name": self.name, "levels": self.levels}
        graph = self.make_graph(num_nodes)
        digest = blake2b(repr([step.matrix.tolist() for step in graph.steps]).encode(), digest_size=8).hexdigest()
        sizes = {"nodes": num_nodes, "links": graph.num_links, "steps": len(graph.steps)}
        return {"name": self.name, **sizes, "spectral_gap": graph.spectral_gap, "digest": digest}
