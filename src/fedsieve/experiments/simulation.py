"""A run's rows on its clients, the engine over them, and what its parameters are measured by."""

from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from scipy.sparse import csr_matrix
from torch import Tensor

from fedsieve.core.reply_validation import Screen
from fedsieve.core.types import Bytes, Exchange
from fedsieve.data import standardization
from fedsieve.data.federated_dataset import Drawn, Spread
from fedsieve.data.standardization import Units
from fedsieve.experiments.config import Centring, Counting, Engine, Judge, Run
from fedsieve.experiments.tasks import MEASURES
from fedsieve.models.initial_weights import load_start
from fedsieve.objectives.linear import Linear, Loss
from fedsieve.objectives.module import Module
from fedsieve.runtime import metrics
from fedsieve.runtime.batched import Batched
from fedsieve.runtime.client_data import Rows
from fedsieve.runtime.loop import Loop
from fedsieve.runtime.rounds import Population


class Problem:
    """A run's data on tensors, drawn once."""

    def __init__(self, run: Run) -> None:
        self.run = run
        spread = Spread(run.federation.clients, run.federation.partition, run.federation.alpha)
        self.drawn: Drawn = run.about.draw(run.data, spread, run.seed, run.federation.server_rows)
        if run.judge is Judge.VALIDATION:
            self.drawn = held_out(self.drawn)
        if len(self.drawn.counts) != run.federation.clients:
            raise ValueError(
                f"federation.clients {run.federation.clients} contradicts data.client: the rows name {len(self.drawn.counts)} clients; "
                f"leave it out"
            )
        if run.federation.clients > self.drawn.counts.sum() and not run.federation.central:
            raise ValueError(
                f"federation.clients {run.federation.clients} is more than the {self.drawn.counts.sum()} rows there are; use fewer clients"
            )

    def check(self) -> None:
        """Fail early, before anything is written: rows that cannot be prepared, a start or a module that does not fit."""
        _ = self.rows
        if self.run.start is not None:
            load_start(self.run.start, self.run.objective)
        if isinstance(self.run.objective, Module):
            x, y = self.test
            try:
                outputs = self.run.objective.predict(self.run.objective.flat(self.run.objective.module).to(self.run.dtype), x[:2])
            except RuntimeError as problem:
                shape = " x ".join(map(str, x.shape[1:]))
                raise ValueError(f"--model {self.run.model} cannot take rows of {shape} numbers: {str(problem).splitlines()[0]}") from None
            if outputs.shape[-1] <= int(y.max()):
                raise ValueError(f"--model {self.run.model} has {outputs.shape[-1]} outputs; there are {int(y.max()) + 1} classes")

    def for_run(self, run: Run) -> "Problem":
        """The same rows under another method."""
        other = Problem.__new__(Problem)
        other.run, other.drawn = run, self.drawn
        return other

    @cached_property
    def counts(self) -> np.ndarray:
        """Rows of each client."""
        counts = self.drawn.counts
        return np.array([counts.sum()]) if self.run.federation.central else counts

    @cached_property
    def population(self) -> Population:
        """Who may be picked."""
        return Population(len(self.counts), np.flatnonzero(self.counts).tolist())

    @property
    def screen(self) -> Screen:
        """What a reply may be at most."""
        federation = self.run.federation
        return Screen(norm_limit=federation.norm_limit, most_examples=federation.most_examples or int(self.counts.max()))

    @cached_property
    def units(self) -> Units | None:
        """What linear models of a user's own rows are trained in, agreed on by those who train; None where rows are taken as they are."""
        if not getattr(self.run.data, "standardize", False):
            return None
        squared = self.run.about.loss is Loss.SQUARED
        return standardization.units(self.drawn.x, self.drawn.y, self.counts, features=True, target=squared, centre=self.run.data.intercept)

    @property
    def spread(self) -> np.ndarray | None:
        """The scale of each feature, where clients agreed on one."""
        known = self.units is not None and isinstance(self.drawn.x, np.ndarray)
        return self.units.features.scale if known else None

    @property
    def agreeing(self) -> Bytes:
        """What agreeing on units took, up and down alike."""
        sent = 0 if self.units is None else self.units.bytes_each_way * len(self.population.present)
        return Bytes(formula=sent, payload=sent, wire=sent, weights=sent)

    def inward(self, theta: Float[Tensor, " p"]) -> Float[Tensor, " p"]:
        """A model for rows as the user has them, as it is trained."""
        if self.units is None:
            return theta
        matrix, intercept = self.run.objective.parts(theta)
        return self.units.inward(matrix.double().numpy(force=True), None if intercept is None else intercept.double().numpy(force=True)).to(
            theta
        )

    def outward(self, theta: Float[Tensor, " p"]) -> Float[Tensor, " p"]:
        """The model under training, for rows as the user has them; what is not zero stays so in the smallest units."""
        if self.units is None:
            return theta
        coef, intercept = self.units.outward(*(None if part is None else part.cpu() for part in self.run.objective.parts(theta)))
        parts = (coef.reshape(-1), intercept if self.run.objective.intercept else [])
        found = torch.from_numpy(np.concatenate(parts)).to(theta)
        return torch.where((found == 0) & (theta != 0), torch.finfo(torch.float32).tiny, found)

    @cached_property
    def rows(self) -> Rows:
        """The clients' rows, in common units, centred if asked."""
        x, y = self._united(self.drawn.x, self.drawn.y)
        if self.run.federation.centring is Centring.CLIENT:
            if isinstance(x, csr_matrix):
                raise ValueError("federation.centring client would fill sparse rows with numbers; use --federation.centring none")
            x, y = centred(x, y, self.counts, targets=self.run.about.loss is Loss.SQUARED)
        return self._rows(x, y, self.counts)

    @cached_property
    def server_rows(self) -> Rows:
        """The server's own rows."""
        return self._rows(*self._united(self.drawn.server_x, self.drawn.server_y), [len(self.drawn.server_y)])

    @cached_property
    def test(self) -> tuple[Tensor | csr_matrix, Tensor]:
        """Test rows, of linear models feature by feature: a sparse model reads only the features it uses."""
        x = self.drawn.test_x
        if isinstance(x, np.ndarray):
            by_feature = isinstance(self.run.objective, Linear)
            x = self._tensor(np.ascontiguousarray(x.T)).T if by_feature else self._tensor(x)
        return x, self._tensor(self.drawn.test_y)

    @cached_property
    def truth(self) -> Tensor | None:
        """The true coefficients, (outputs, features), where they are known."""
        return None if self.drawn.truth is None else self._tensor(self.drawn.truth)

    def exchange(self, rows: Rows, seed: int) -> Exchange:
        """The chosen engine over some rows."""
        run = self.run
        parts = {"algorithm": run.algorithm, "objective": run.objective, "rows": rows, "seed": seed, "fingerprint": run.fingerprint}
        parts |= {"dtype": run.dtype, "device": run.device}
        return Loop(**parts) if run.engine is Engine.LOOP else Batched(**parts, sample_bytes=run.bytes is Counting.SAMPLED)

    def measure(self, theta: Tensor) -> dict[str, float]:
        """Test metrics of a parameter vector under training, in the user's units."""
        x, y = self.test
        return MEASURES[self.run.about.loss][0](self.run.objective.predict(self.outward(theta), x), y)

    def recovery(self, theta: Tensor) -> dict[str, float]:
        """How well its support is the true one, where that is known."""
        if self.truth is None:
            return {}
        return metrics.recovery((theta[: self.truth.numel()] != 0).view_as(self.truth), self.truth != 0)

    def _united(self, x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return (x, y) if self.units is None else self.units.apply(x, y)

    def _rows(self, x: np.ndarray, y: np.ndarray, counts: Any) -> Rows:
        rows = x.astype(np.dtype(str(self.run.dtype).removeprefix("torch."))) if isinstance(x, csr_matrix) else self._tensor(x)
        return Rows(rows, self._tensor(y), counts, self.run.objective, self.run.algorithm.batch_rows)

    def _tensor(self, array: np.ndarray) -> Tensor:
        kind = self.run.dtype if array.dtype.kind == "f" else torch.int64
        return torch.from_numpy(array).to(device=self.run.device, dtype=kind)


def held_out(drawn: Drawn) -> Drawn:
    """A tenth of each client's rows in the place of the test rows; rows of a client are in random order already."""
    starts = np.repeat(np.cumsum(drawn.counts) - drawn.counts, drawn.counts)
    held = np.arange(len(drawn.y)) - starts < np.repeat(drawn.counts // 10, drawn.counts)
    rest = {"x": drawn.x[~held], "y": drawn.y[~held], "counts": drawn.counts - drawn.counts // 10}
    return drawn._replace(**rest, test_x=drawn.x[held], test_y=drawn.y[held])


def centred(x: np.ndarray, y: np.ndarray, counts: np.ndarray, *, targets: bool) -> tuple[np.ndarray, np.ndarray]:
    """Each client's features (and targets) less their own mean."""
    starts = np.concatenate(([0], np.cumsum(counts)[:-1]))[counts > 0]
    held = counts[counts > 0]
    x = x - np.repeat(np.add.reduceat(x, starts, axis=0) / held[:, None], held, axis=0)
    return x, y - np.repeat(np.add.reduceat(y, starts) / held, held) if targets else y
