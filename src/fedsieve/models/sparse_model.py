"""A trained model: the weights that are not zero, and a card that says what they mean. A linear one predicts here, without torch."""

import io
import json
import zlib
from dataclasses import asdict, dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save
from scipy import sparse
from scipy.special import expit, log_softmax

from fedsieve.objectives.losses import Loss
from fedsieve.storage.run_directory import MODEL

ABOUT = "model"
"""Under which name a file holds the card."""
THIN = 0.01
"""Sparse rows times sparse weights are faster below this density, times dense weights above it (`python -m benchmarks.predict`)."""


class ModelError(ValueError):
    """A file that is no model, or a model that cannot do what is asked; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Card:
    """What a model's numbers mean."""

    task: str
    method: str
    loss: Loss
    row: tuple[int, ...]
    """shape of one row it reads"""
    classes: tuple[str, ...] | None = None
    """names of what it tells apart; None where it predicts a number"""
    features: tuple[str, ...] | None = None
    """names of the columns it reads; None where they are known by number only"""
    first: int = 0
    """number of the first feature in svmlight files like the one it learned from"""
    spread: tuple[float, ...] | None = None
    """standard deviation of each feature where it learned, in the feature's own units; None where rows were taken as they are"""
    build: str | None = None
    """PACKAGE.MODULE:FACTORY of a module; None is a linear model"""


@dataclass(frozen=True, kw_only=True)
class Model:
    """A flat vector of `size` weights, of which those at `index` are not zero, cut into tensors of these names and shapes."""

    index: np.ndarray
    """(m,) int32, rising"""
    value: np.ndarray
    """(m,) float32"""
    tensors: dict[str, tuple[int, ...]]
    free: int
    """the last coordinates, always kept and outside the density (an intercept)"""
    card: Card

    def __post_init__(self) -> None:
        """Refuse what is no vector of this size."""
        if self.index.shape != self.value.shape or self.index.ndim != 1:
            raise ModelError(f"there are {self.index.shape} places for {self.value.shape} values")
        if len(self.index) and (self.index[0] < 0 or self.index[-1] >= self.size or (np.diff(self.index) <= 0).any()):
            raise ModelError(f"the places must rise from 0 to at most {self.size - 1}")
        if not np.isfinite(self.value).all():
            raise ModelError("a weight is not a finite number")
        if self.card.spread is not None and (len(self.card.spread),) != self.card.row:
            raise ModelError(f"there are {len(self.card.spread)} spreads for rows of {self.card.row}")
        if self.card.build is None and next(iter(self.tensors.values())) != (self.outputs, *self.card.row):
            raise ModelError(f"a linear model's weights have shape (outputs, features); got {next(iter(self.tensors.values()))}")

    @property
    def size(self) -> int:
        """All weights, zeros too."""
        return sum(map(prod, self.tensors.values()))

    @property
    def outputs(self) -> int:
        """Numbers it gives for a row: one for a regression and for two classes of a logistic model."""
        return 1 if self.card.loss in (Loss.SQUARED, Loss.LOGISTIC) else len(self.card.classes)

    @property
    def kept(self) -> int:
        """Weights that are not zero, of those the density counts."""
        return int((self.index < self.size - self.free).sum())

    @property
    def density(self) -> float:
        """kept / counted."""
        return self.kept / (self.size - self.free)

    @property
    def layers(self) -> dict[str, dict[str, Any]]:
        """Where each tensor stands in the flat vector, and its shape."""
        ends = np.cumsum([prod(shape) for shape in self.tensors.values()]).tolist()
        return {
            name: {"start": end - prod(shape), "stop": end, "shape": shape}
            for (name, shape), end in zip(self.tensors.items(), ends, strict=True)
        }

    def dense(self) -> np.ndarray:
        """The flat vector with its zeros."""
        flat = np.zeros(self.size, np.float32)
        flat[self.index] = self.value
        return flat

    def named(self) -> dict[str, np.ndarray]:
        """The tensors by name, with their zeros."""
        flat = self.dense()
        return {name: flat[part["start"] : part["stop"]].reshape(part["shape"]) for name, part in self.layers.items()}

    @cached_property
    def coef(self) -> sparse.csr_matrix:
        """The weights of a linear model, (outputs, features)."""
        self._linear("coef")
        counted = self.index < self.size - self.free
        rows, columns = np.divmod(self.index[counted], self.card.row[0])
        return sparse.csr_matrix((self.value[counted], (rows, columns)), shape=(self.outputs, self.card.row[0]))

    @cached_property
    def intercept(self) -> np.ndarray:
        """The offsets of a linear model, (outputs,)."""
        self._linear("intercept")
        return self.dense()[self.size - self.free :] if self.free else np.zeros(self.outputs, np.float32)

    def predict(self, x: np.ndarray | sparse.csr_matrix) -> np.ndarray:
        """theta x + b, (n, outputs): predictions or logits."""
        self._linear("predict")
        thin = sparse.issparse(x) and self.density < THIN
        product = (x @ self._transposed).toarray() if thin else x @ self._transposed_dense
        return np.asarray(product, np.float32) + self.intercept

    @cached_property
    def _transposed(self) -> sparse.csr_matrix:
        return self.coef.T.tocsr()

    @cached_property
    def _transposed_dense(self) -> np.ndarray:
        return self._transposed.toarray()

    def _linear(self, what: str) -> None:
        if self.card.build is not None:
            raise ModelError(f"{what} is of linear models; this one is built by {self.card.build}")


def probabilities(loss: Loss, outputs: np.ndarray) -> np.ndarray:
    """P(class) of each class, (n, classes), or of each label by itself."""
    match loss:
        case Loss.SQUARED:
            raise ModelError("a model that predicts a number has no probabilities; leave out --probabilities")
        case Loss.LOGISTIC:
            return np.column_stack((expit(-outputs[:, 0]), expit(outputs[:, 0])))
        case Loss.SOFTMAX:
            return np.exp(log_softmax(outputs, axis=1))
        case Loss.MULTILABEL:
            return expit(outputs)


def about(model: Model) -> str:
    """Everything but the weights, as one line of JSON."""
    card = {name: value for name, value in asdict(model.card).items() if value is not None}
    return json.dumps({"tensors": model.tensors, "free": model.free, "card": card})


def card_of(text: str) -> Card:
    """The card in that line."""
    return _parsed(text)[0]


def assembled(text: str, index: np.ndarray, value: np.ndarray) -> Model:
    """A model from its parts; the inverse of `about` for the first."""
    card, tensors, free = _parsed(text)
    return Model(index=index, value=value, tensors=tensors, free=free, card=card)


def _parsed(text: str) -> tuple[Card, dict[str, tuple[int, ...]], int]:
    try:
        parts = json.loads(text)
        known = {name: tuple(value) if isinstance(value, list) else value for name, value in parts["card"].items()}
        spread = {"spread": tuple(map(float, known["spread"]))} if "spread" in known else {}
        card = Card(**known | {"loss": Loss(known["loss"])} | spread)
        return card, {str(name): tuple(map(int, shape)) for name, shape in parts["tensors"].items()}, int(parts["free"])
    except (ValueError, KeyError, TypeError, AttributeError) as problem:
        raise ModelError(f"its card is damaged ({type(problem).__name__}: {problem})") from None


def pack(model: Model) -> bytes:
    """Indices and values in a safetensors file, the card as one line (several keys would have no fixed order)."""
    return save({"index": model.index, "value": model.value}, {ABOUT: about(model)})


def pack_npz(model: Model) -> bytes:
    """What `scipy.sparse.load_npz` reads: the matrix of a linear model, else one row of all weights; beside it intercept and card."""
    flat = sparse.csr_matrix((model.value, model.index, [0, len(model.index)]), shape=(1, model.size))
    matrix, beside = (model.coef, {"intercept": model.intercept}) if model.card.build is None else (flat, {})
    file = io.BytesIO()
    arrays = {"indices": matrix.indices, "indptr": matrix.indptr, "format": np.array(b"csr"), "shape": np.array(matrix.shape)}
    np.savez_compressed(file, data=matrix.data, **arrays, **beside, **{ABOUT: np.array(about(model))})
    return file.getvalue()


def locate(path: Path) -> Path:
    """The model file of a run folder, or the file itself."""
    if not path.exists():
        raise ModelError(f"{path} does not exist; name a run folder or a model file")
    if not path.is_dir():
        return path
    if not (path / MODEL).is_file():
        raise ModelError(f"{path} holds no {MODEL}: a run leaves one when it ends")
    return path / MODEL


def read(path: Path) -> Model:
    """The model of a run folder, or in a .safetensors or .npz file that `fedsieve` wrote."""
    path = locate(path)
    readers = {".safetensors": _safetensors, ".npz": _npz}
    if path.suffix not in readers:
        raise ModelError(f"{path} is not read as a model; name a run folder or a file that ends in {' or '.join(readers)}")
    try:
        return readers[path.suffix](path)
    except (OSError, EOFError, SafetensorError, BadZipFile, zlib.error, NotImplementedError, ValueError, KeyError, IndexError) as problem:
        raise ModelError(f"{path} is not a model fedsieve wrote: {problem}") from None


def _safetensors(path: Path) -> Model:
    with safe_open(path, "numpy") as file:
        text = (file.metadata() or {}).get(ABOUT)
        if text is None:
            raise ModelError("it has no card; train again, or export the run")
        index, value = (file.get_tensor(name) for name in ("index", "value"))
    return assembled(text, index, value)


def _npz(path: Path) -> Model:
    with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:  # numpy forgets to close what it cannot read
        if ABOUT not in arrays:
            raise ModelError("it has no card")
        text, data, indices, indptr, shape = (arrays[name] for name in (ABOUT, "data", "indices", "indptr", "shape"))
        free = arrays["intercept"] if "intercept" in arrays else np.zeros(0, np.float32)
    index = np.repeat(np.arange(len(indptr) - 1), np.diff(indptr)) * shape[1] + indices
    last = np.flatnonzero(free)
    return assembled(
        str(text),
        np.concatenate((index, prod(shape.tolist()) + last)).astype(np.int32),
        np.concatenate((data, free[last])).astype(np.float32),
    )
