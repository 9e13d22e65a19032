"""A deployment before it begins: what its parties agree on, and how long the server waits for them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedsieve.core.reply_validation import ReplyLimits
from fedsieve.runtime.client_data import ClientData
from fedsieve.runtime.context import RunContext
from fedsieve.runtime.loop import LoopEngine


@dataclass(frozen=True, kw_only=True)
class DeploymentConfig(RunContext):
    """What the server and every client know of a run."""

    clients: int
    """how many there are, numbered from 0"""
    rounds: int
    participation: float = 1.0
    """fraction of the clients asked in a round"""
    quorum: float = 0.5
    """fraction of those asked who must answer; below it the exchange is tried again"""
    retries: int = 2
    """how often an exchange below the quorum is tried again before the run stops"""
    round_seconds: float = 600.0
    """how long the server waits for the answers of one exchange"""
    start_seconds: float = 300.0
    """how long the server waits for all clients before the first round"""
    reply_limits: ReplyLimits = ReplyLimits()  # noqa: RUF009
    """what a reply may be at most"""
    threads: int = 1
    """threads for tensor arithmetic; results repeat bit for bit for one number of threads"""
    run_dir: Path | None = None
    """where the server keeps rounds, checkpoints and the model; None keeps nothing"""
    start_from_seed: bool = True
    """whether every party can draw the start from the seed"""
    evaluate: Callable[[Tensor], dict[str, float]] | None = None
    """what the server can say of a model after every round, by name"""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """all of this as plain values, for records"""

    def __post_init__(self) -> None:
        """Refuse what cannot work while a person can still mend it."""
        for name, least in (("clients", 1), ("rounds", 1), ("retries", 0), ("threads", 1), ("seed", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}; got {getattr(self, name)}")
        for name in ("participation", "quorum"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} is a fraction, above 0 and at most 1; got {getattr(self, name):g}")
        for name in ("round_seconds", "start_seconds"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name.replace('_', '-')} must be above 0 and finite; got {getattr(self, name):g}")
        self.algorithm.final_budget(self.objective.layout)

    def min_replies(self, num_asked: int) -> int:
        """How many of those asked must answer."""
        return max(1, ceil(self.quorum * num_asked - 1e-9))

    def client_engine(self, client: int, x: np.ndarray | Tensor, y: np.ndarray | Tensor) -> LoopEngine:
        """What client number `client` computes with, over its own rows."""
        x, y = (self._to_tensor(part) for part in (x, y))
        if not 0 <= client < self.clients:
            raise ValueError(f"partition-id {client} is not below clients {self.clients}; number the nodes from 0")
        if len(x) != len(y):
            raise ValueError(f"x has {len(x)} rows and y has {len(y)}; they must be as many")
        if not all(part.isfinite().all() for part in (x, y)):
            raise ValueError("a row holds a value that is not a finite number; clean the rows first")
        torch.set_num_threads(self.threads)
        rows = ClientData(x, y, [0] * client + [len(y)], self.objective, self.algorithm.examples_per_step)
        parts = {name: getattr(self, name) for name in RunContext.__dataclass_fields__}
        return LoopEngine(**parts, data=rows)

    def _to_tensor(self, array: np.ndarray | Tensor) -> Tensor:
        tensor = torch.as_tensor(array)
        return tensor.to(device=self.device, dtype=self.dtype if tensor.is_floating_point() else torch.int64)
