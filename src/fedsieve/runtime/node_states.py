"""The states of nodes, stacked: one tensor per field, with a node axis in front."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from fedsieve.algorithms.gossip import Nodes
from fedsieve.core.types import ClientMemory, Clock

SUPPORT, LEADER = "support", "leader"
"""What a node keeps besides the state of its algorithm: the support that it adopted, and which node chose it."""
SEARCHING = -1


class NodeSupports(NamedTuple):
    """The support of each own node after the search, and which node chose that of every node: the lowest leader wins."""

    support: Bool[Tensor, "k p"]
    leader: Int64[Tensor, " n"]
    """a node; nodes that were absent at the end of the search count behind all others; SEARCHING before"""

    @property
    def is_common(self) -> bool:
        """Whether all nodes have node_supports on one support."""
        return int(self.leader[0]) != SEARCHING and bool((self.leader == self.leader[0]).all())


def tensors_of(nodes: Nodes) -> dict[str, Tensor]:
    """Return the tensors of the nodes' states by name."""
    return {name: part for name, part in zip(nodes._fields, nodes, strict=True) if isinstance(part, Tensor)}


def stack_start(start: Any, num_nodes: int) -> Nodes:
    """Return the same start at all nodes."""
    return type(start)(*(torch.stack([part] * num_nodes) if isinstance(part, Tensor) else part for part in start))


def select_nodes(nodes: Nodes, chosen: Sequence[int]) -> Nodes:
    """Return some nodes."""
    rows = torch.as_tensor(chosen)
    return type(nodes)(*(part[rows] if isinstance(part, Tensor) else part for part in nodes))


def replace_nodes(nodes: Nodes, chosen: Sequence[int], parts: Sequence[Nodes]) -> Nodes:
    """Return the nodes with new states of some of them, which are in order."""
    rows = torch.as_tensor(chosen)
    columns = zip(nodes, *parts, strict=True)
    return type(nodes)(*(old.index_copy(0, rows, torch.cat(new)) if isinstance(old, Tensor) else old for old, *new in columns))


def where_nodes(condition: Bool[Tensor, " n"], new: Nodes, old: Nodes) -> Nodes:
    """Return the new state of each node for which the condition holds."""
    pairs = zip(new, old, strict=True)
    return type(new)(*(torch.where(condition.view(-1, *[1] * (a.ndim - 1)), a, b) if isinstance(a, Tensor) else a for a, b in pairs))


def mean_node(nodes: Nodes) -> Any:
    """Return the mean of all nodes as the state of one."""
    return type(nodes)(*(part.mean(0) if isinstance(part, Tensor) else part for part in nodes))


def node_state(nodes: Nodes, node: int) -> Any:
    """Return the state of one node."""
    return type(nodes)(*(part[node] if isinstance(part, Tensor) else part for part in nodes))


def store_nodes(nodes: Nodes, node_supports: NodeSupports, clock: Clock) -> dict[int, ClientMemory]:
    """Return what each node keeps until the next round."""
    tensors = tensors_of(nodes) | {SUPPORT: node_supports.support, LEADER: node_supports.leader}
    return {i: ClientMemory(clock.round, {name: part[i] for name, part in tensors.items()}) for i in range(len(node_supports.leader))}


def restore_nodes(start: Any, memories: Mapping[int, ClientMemory], num_nodes: int) -> tuple[Nodes, NodeSupports]:
    """Return the nodes as they are stored, or all at the start."""
    nodes = stack_start(start, num_nodes)
    if not memories:
        return nodes, NodeSupports(torch.zeros(num_nodes, start.layout.size, dtype=torch.bool), torch.full((num_nodes,), SEARCHING))
    stored = {name: torch.stack([memories[i].vectors[name] for i in range(num_nodes)]) for name in memories[0].vectors}
    node_supports = NodeSupports(stored.pop(SUPPORT), stored.pop(LEADER))
    return nodes._replace(**stored), node_supports
