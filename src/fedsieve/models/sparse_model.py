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

METADATA_KEY = "model"
"""Under which name a file holds the card."""
MAX_SPARSE_PRODUCT_DENSITY = 0.01
"""Sparse rows times sparse weights are faster below this density, times dense weights above it (`python -m benchmarks.predict`)."""


class ModelError(ValueError):
    """A file that is no model, or a model that cannot do what is asked; the message says why."""


@dataclass(frozen=True, kw_only=True)
class ModelMetadata:
    """What a model's numbers mean."""

    task: str
    algorithm: str
    loss: Loss
    input_shape: tuple[int, ...]
    """shape of one row it reads"""
    classes: tuple[str, ...] | None = None
    """names of what it tells apart; None where it predicts a number"""
    features: tuple[str, ...] | None = None
    """names of the columns it reads; None where they are known by number only"""
    first_feature_id: int = 0
    """number of the first feature in svmlight files like the one it learned from"""
    feature_std: tuple[float, ...] | None = None
    """standard deviation of each feature where it learned, in the feature's own units; None where rows were taken as they are"""
    factory: str | None = None
    """PACKAGE.MODULE:FACTORY of a module; None is a linear model"""


@dataclass(frozen=True, kw_only=True)
class SparseModel:
    """A flat vector of `size` weights, of which those at `index` are not zero, cut into tensors of these names and shapes."""

    indices: np.ndarray
    """(m,) int32, rising"""
    values: np.ndarray
    """(m,) float32"""
    tensor_shapes: dict[str, tuple[int, ...]]
    num_ungated: int
    """the last coordinates, always kept and outside the density (an intercept)"""
    metadata: ModelMetadata

    def __post_init__(self) -> None:
        """Refuse what is no vector of this size."""
        if self.indices.shape != self.values.shape or self.indices.ndim != 1:
            raise ModelError(f"there are {self.indices.shape} places for {self.values.shape} values")
        if len(self.indices) and (self.indices[0] < 0 or self.indices[-1] >= self.size or (np.diff(self.indices) <= 0).any()):
            raise ModelError(f"the places must rise from 0 to at most {self.size - 1}")
        if not np.isfinite(self.values).all():
            raise ModelError("a weight is not a finite number")
        if self.metadata.feature_std is not None and (len(self.metadata.feature_std),) != self.metadata.input_shape:
            raise ModelError(f"there are {len(self.metadata.feature_std)} spreads for rows of {self.metadata.input_shape}")
        if self.metadata.factory is None and next(iter(self.tensor_shapes.values())) != (self.num_outputs, *self.metadata.input_shape):
            raise ModelError(f"a linear model's weights have shape (outputs, features); got {next(iter(self.tensor_shapes.values()))}")

    @property
    def size(self) -> int:
        """All weights, zeros too."""
        return sum(map(prod, self.tensor_shapes.values()))

    @property
    def num_outputs(self) -> int:
        """Numbers it gives for a row: one for a regression and for two classes of a logistic model."""
        return 1 if self.metadata.loss in (Loss.SQUARED, Loss.LOGISTIC) else len(self.metadata.classes)

    @property
    def num_nonzero(self) -> int:
        """Weights that are not zero, of those the density counts."""
        return int((self.indices < self.size - self.num_ungated).sum())

    @property
    def density(self) -> float:
        """kept / counted."""
        return self.num_nonzero / (self.size - self.num_ungated)

    @property
    def layers(self) -> dict[str, dict[str, Any]]:
        """Where each tensor stands in the flat vector, and its shape."""
        ends = np.cumsum([prod(shape) for shape in self.tensor_shapes.values()]).tolist()
        return {
            name: {"start": end - prod(shape), "stop": end, "shape": shape}
            for (name, shape), end in zip(self.tensor_shapes.items(), ends, strict=True)
        }

    def to_dense(self) -> np.ndarray:
        """The flat vector with its zeros."""
        flat = np.zeros(self.size, np.float32)
        flat[self.indices] = self.values
        return flat

    def tensors_by_name(self) -> dict[str, np.ndarray]:
        """The tensors by name, with their zeros."""
        flat = self.to_dense()
        return {name: flat[part["start"] : part["stop"]].reshape(part["shape"]) for name, part in self.layers.items()}

    @cached_property
    def coef(self) -> sparse.csr_matrix:
        """The weights of a linear model, (outputs, features)."""
        self._require_linear("coef")
        counted = self.indices < self.size - self.num_ungated
        rows, columns = np.divmod(self.indices[counted], self.metadata.input_shape[0])
        return sparse.csr_matrix((self.values[counted], (rows, columns)), shape=(self.num_outputs, self.metadata.input_shape[0]))

    @cached_property
    def intercept(self) -> np.ndarray:
        """The offsets of a linear model, (outputs,)."""
        self._require_linear("intercept")
        return self.to_dense()[self.size - self.num_ungated :] if self.num_ungated else np.zeros(self.num_outputs, np.float32)

    def predict(self, x: np.ndarray | sparse.csr_matrix) -> np.ndarray:
        """theta x + b, (n, outputs): predictions or logits."""
        self._require_linear("predict")
        thin = sparse.issparse(x) and self.density < MAX_SPARSE_PRODUCT_DENSITY
        product = (x @ self._transposed).toarray() if thin else x @ self._transposed_dense
        return np.asarray(product, np.float32) + self.intercept

    @cached_property
    def _transposed(self) -> sparse.csr_matrix:
        return self.coef.T.tocsr()

    @cached_property
    def _transposed_dense(self) -> np.ndarray:
        return self._transposed.toarray()

    def _require_linear(self, operation: str) -> None:
        if self.metadata.factory is not None:
            raise ModelError(f"{operation} is of linear models; this one is built by {self.metadata.factory}")


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


def metadata_json(model: SparseModel) -> str:
    """Everything but the weights, as one line of JSON."""
    card = {name: value for name, value in asdict(model.metadata).items() if value is not None}
    return json.dumps({"tensors": model.tensor_shapes, "num_ungated": model.num_ungated, "metadata": card})


def metadata_from(text: str) -> ModelMetadata:
    """The card in that line."""
    return _parse_metadata(text)[0]


def from_parts(text: str, indices: np.ndarray, values: np.ndarray) -> SparseModel:
    """A model from its parts; the inverse of `about` for the first."""
    card, tensors, free = _parse_metadata(text)
    return SparseModel(indices=indices, values=values, tensor_shapes=tensors, num_ungated=free, metadata=card)


def _parse_metadata(text: str) -> tuple[ModelMetadata, dict[str, tuple[int, ...]], int]:
    try:
        parts = json.loads(text)
        known = {name: tuple(value) if isinstance(value, list) else value for name, value in parts["metadata"].items()}
        spread = {"feature_std": tuple(map(float, known["feature_std"]))} if "feature_std" in known else {}
        card = ModelMetadata(**known | {"loss": Loss(known["loss"])} | spread)
        return card, {str(name): tuple(map(int, shape)) for name, shape in parts["tensors"].items()}, int(parts["num_ungated"])
    except (ValueError, KeyError, TypeError, AttributeError) as problem:
        raise ModelError(f"its card is damaged ({type(problem).__name__}: {problem})") from None


def to_safetensors(model: SparseModel) -> bytes:
    """Indices and values in a safetensors file, the card as one line (several keys would have no fixed order)."""
    return save({"index": model.indices, "value": model.values}, {METADATA_KEY: metadata_json(model)})


def to_npz(model: SparseModel) -> bytes:
    """What `scipy.sparse.load_npz` reads: the matrix of a linear model, else one row of all weights; beside it intercept and card."""
    flat = sparse.csr_matrix((model.values, model.indices, [0, len(model.indices)]), shape=(1, model.size))
    matrix, beside = (model.coef, {"intercept": model.intercept}) if model.metadata.factory is None else (flat, {})
    file = io.BytesIO()
    arrays = {"indices": matrix.indices, "indptr": matrix.indptr, "format": np.array(b"csr"), "shape": np.array(matrix.shape)}
    np.savez_compressed(file, data=matrix.data, **arrays, **beside, **{METADATA_KEY: np.array(metadata_json(model))})
    return file.getvalue()


def find_model_file(path: Path) -> Path:
    """The model file of a run folder, or the file itself."""
    if not path.exists():
        raise ModelError(f"{path} does not exist; name a run folder or a model file")
    if not path.is_dir():
        return path
    if not (path / MODEL).is_file():
        raise ModelError(f"{path} holds no {MODEL}: a run leaves one when it ends")
    return path / MODEL


def read_model(path: Path) -> SparseModel:
    """The model of a run folder, or in a .safetensors or .npz file that `fedsieve` wrote."""
    path = find_model_file(path)
    readers = {".safetensors": _read_safetensors, ".npz": _read_npz}
    if path.suffix not in readers:
        raise ModelError(f"{path} is not read as a model; name a run folder or a file that ends in {' or '.join(readers)}")
    try:
        return readers[path.suffix](path)
    except (OSError, EOFError, SafetensorError, BadZipFile, zlib.error, NotImplementedError, ValueError, KeyError, IndexError) as problem:
        raise ModelError(f"{path} is not a model fedsieve wrote: {problem}") from None


def _read_safetensors(path: Path) -> SparseModel:
    with safe_open(path, "numpy") as file:
        text = (file.metadata() or {}).get(METADATA_KEY)
        if text is None:
            raise ModelError("it has no card; train again, or export the run")
        index, value = (file.get_tensor(name) for name in ("index", "value"))
    return from_parts(text, index, value)


def _read_npz(path: Path) -> SparseModel:
    with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:  # numpy forgets to close what it cannot read
        if METADATA_KEY not in arrays:
            raise ModelError("it has no card")
        text, data, indices, indptr, shape = (arrays[name] for name in (METADATA_KEY, "data", "indices", "indptr", "shape"))
        free = arrays["intercept"] if "intercept" in arrays else np.zeros(0, np.float32)
    index = np.repeat(np.arange(len(indptr) - 1), np.diff(indptr)) * shape[1] + indices
    last = np.flatnonzero(free)
    return from_parts(
        str(text),
        np.concatenate((index, prod(shape.tolist()) + last)).astype(np.int32),
        np.concatenate((data, free[last])).astype(np.float32),
    )
