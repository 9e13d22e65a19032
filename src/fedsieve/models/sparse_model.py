"""SparseModel: the non-zero weights of a trained model and their metadata. Linear models predict without torch."""

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
"""The name of the metadata in a file."""
MAX_SPARSE_PRODUCT_DENSITY = 0.01
"""For sparse examples, sparse weights are faster below this density and dense weights above it (`python -m benchmarks.predict`)."""


class ModelError(ValueError):
    """A file is not a model, or a model does not support an operation."""


@dataclass(frozen=True, kw_only=True)
class ModelMetadata:
    """What the weights of a model mean."""

    task: str
    algorithm: str
    loss: Loss
    input_shape: tuple[int, ...]
    """shape of one example"""
    classes: tuple[str, ...] | None = None
    """names of the classes or labels; None for regression"""
    features: tuple[str, ...] | None = None
    """names of the features; None if they have only numbers"""
    first_feature_id: int = 0
    """id of the first feature in svmlight files"""
    feature_std: tuple[float, ...] | None = None
    """standard deviation of each feature in the training data; None if the features were not standardized"""
    factory: str | None = None
    """PACKAGE.MODULE:FACTORY of a module; None for a linear model"""


@dataclass(frozen=True, kw_only=True)
class SparseModel:
    """A parameter vector with non-zero `values` at `indices`, which consists of tensors with the given names and shapes."""

    indices: np.ndarray
    """(m,) int32, increasing"""
    values: np.ndarray
    """(m,) float32"""
    tensor_shapes: dict[str, tuple[int, ...]]
    num_ungated: int
    """number of parameters at the end that have no gate and are not counted in the density, such as an intercept"""
    metadata: ModelMetadata

    def __post_init__(self) -> None:
        """Validate indices, values and shapes."""
        if self.indices.shape != self.values.shape or self.indices.ndim != 1:
            raise ModelError(f"indices and values must be vectors of one length; got {self.indices.shape} and {self.values.shape}")
        if len(self.indices) and (self.indices[0] < 0 or self.indices[-1] >= self.size or (np.diff(self.indices) <= 0).any()):
            raise ModelError(f"the indices must increase and be between 0 and {self.size - 1}")
        if not np.isfinite(self.values).all():
            raise ModelError("a weight is not a finite number")
        if self.metadata.feature_std is not None and (len(self.metadata.feature_std),) != self.metadata.input_shape:
            raise ModelError(f"feature_std has {len(self.metadata.feature_std)} entries for examples of shape {self.metadata.input_shape}")
        if self.metadata.factory is None and next(iter(self.tensor_shapes.values())) != (self.num_outputs, *self.metadata.input_shape):
            raise ModelError(
                f"the weights of a linear model must have the shape (outputs, features); got {next(iter(self.tensor_shapes.values()))}"
            )

    @property
    def size(self) -> int:
        """Number of parameters, including zeros."""
        return sum(map(prod, self.tensor_shapes.values()))

    @property
    def num_outputs(self) -> int:
        """Outputs per example: one for regression and for a logistic model of two classes."""
        return 1 if self.metadata.loss in (Loss.SQUARED, Loss.LOGISTIC) else len(self.metadata.classes or ())

    @property
    def num_nonzero(self) -> int:
        """Number of non-zero weights that are counted in the density."""
        return int((self.indices < self.size - self.num_ungated).sum())

    @property
    def density(self) -> float:
        """Fraction of the gated weights that are not zero."""
        return self.num_nonzero / (self.size - self.num_ungated)

    @property
    def layers(self) -> dict[str, dict[str, Any]]:
        """Start, stop and shape of each tensor in the parameter vector."""
        ends = np.cumsum([prod(shape) for shape in self.tensor_shapes.values()]).tolist()
        return {
            name: {"start": end - prod(shape), "stop": end, "shape": shape}
            for (name, shape), end in zip(self.tensor_shapes.items(), ends, strict=True)
        }

    def to_dense(self) -> np.ndarray:
        """The parameter vector, including zeros."""
        flat = np.zeros(self.size, np.float32)
        flat[self.indices] = self.values
        return flat

    def tensors_by_name(self) -> dict[str, np.ndarray]:
        """The tensors by name, including zeros."""
        flat = self.to_dense()
        return {name: flat[part["start"] : part["stop"]].reshape(part["shape"]) for name, part in self.layers.items()}

    @cached_property
    def coef(self) -> sparse.csr_matrix:
        """The weights of a linear model, (outputs, features)."""
        self._require_linear("coef")
        gated = self.indices < self.size - self.num_ungated
        rows, columns = np.divmod(self.indices[gated], self.metadata.input_shape[0])
        return sparse.csr_matrix((self.values[gated], (rows, columns)), shape=(self.num_outputs, self.metadata.input_shape[0]))

    @cached_property
    def intercept(self) -> np.ndarray:
        """The intercepts of a linear model, (outputs,)."""
        self._require_linear("intercept")
        return self.to_dense()[self.size - self.num_ungated :] if self.num_ungated else np.zeros(self.num_outputs, np.float32)

    def predict(self, x: np.ndarray | sparse.csr_matrix) -> np.ndarray:
        """Predictions or logits theta x + b of a linear model, (n, outputs)."""
        self._require_linear("predict")
        use_sparse = sparse.issparse(x) and self.density < MAX_SPARSE_PRODUCT_DENSITY
        product: Any = x @ (self._transposed if use_sparse else self._transposed_dense)
        product = product.toarray() if use_sparse else product
        return np.asarray(product, np.float32) + self.intercept

    @cached_property
    def _transposed(self) -> sparse.csr_matrix:
        return self.coef.T.tocsr()

    @cached_property
    def _transposed_dense(self) -> np.ndarray:
        return self._transposed.toarray()

    def _require_linear(self, operation: str) -> None:
        if self.metadata.factory is not None:
            raise ModelError(f"{operation} needs a linear model; this one is built by {self.metadata.factory}")


def probabilities(loss: Loss, outputs: np.ndarray) -> np.ndarray:
    """The probability of each class or label, (n, classes)."""
    match loss:
        case Loss.SQUARED:
            raise ModelError("a regression model has no probabilities; leave out --probabilities")
        case Loss.LOGISTIC:
            return np.column_stack((expit(-outputs[:, 0]), expit(outputs[:, 0])))
        case Loss.SOFTMAX:
            return np.exp(log_softmax(outputs, axis=1))
        case Loss.MULTILABEL:
            return expit(outputs)


def metadata_json(model: SparseModel) -> str:
    """Everything except the weights as one line of JSON."""
    metadata = {name: value for name, value in asdict(model.metadata).items() if value is not None}
    return json.dumps({"tensors": model.tensor_shapes, "num_ungated": model.num_ungated, "metadata": metadata})


def metadata_from(text: str) -> ModelMetadata:
    """The metadata in a line written by `metadata_json`."""
    return _parse_metadata(text)[0]


def from_parts(text: str, indices: np.ndarray, values: np.ndarray) -> SparseModel:
    """A model from the text of `metadata_json`, indices and values."""
    metadata, shapes, num_ungated = _parse_metadata(text)
    return SparseModel(indices=indices, values=values, tensor_shapes=shapes, num_ungated=num_ungated, metadata=metadata)


def _parse_metadata(text: str) -> tuple[ModelMetadata, dict[str, tuple[int, ...]], int]:
    try:
        parts = json.loads(text)
        fields: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in parts["metadata"].items()}
        fields["loss"] = Loss(fields["loss"])
        if "feature_std" in fields:
            fields["feature_std"] = tuple(map(float, fields["feature_std"]))
        return (
            ModelMetadata(**fields),
            {str(name): tuple(map(int, shape)) for name, shape in parts["tensors"].items()},
            int(parts["num_ungated"]),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"its metadata is damaged ({type(error).__name__}: {error})") from None


def to_safetensors(model: SparseModel) -> bytes:
    """A safetensors file of indices and values. The metadata is one key, because several have no fixed order."""
    return save({"index": model.indices, "value": model.values}, {METADATA_KEY: metadata_json(model)})


def to_npz(model: SparseModel) -> bytes:
    """A file for `scipy.sparse.load_npz`: the matrix of a linear model, or all weights as one row; with intercept and metadata."""
    flat = sparse.csr_matrix((model.values, model.indices, [0, len(model.indices)]), shape=(1, model.size))
    matrix, extra = (model.coef, {"intercept": model.intercept}) if model.metadata.factory is None else (flat, {})
    file = io.BytesIO()
    arrays: dict[str, Any] = {
        "indices": matrix.indices,
        "indptr": matrix.indptr,
        "format": np.array(b"csr"),
        "shape": np.array(matrix.shape),
    }
    arrays |= extra | {METADATA_KEY: np.array(metadata_json(model))}
    np.savez_compressed(file, data=matrix.data, **arrays)
    return file.getvalue()


def find_model_file(path: Path) -> Path:
    """The model file of a run directory, or the file itself."""
    if not path.exists():
        raise ModelError(f"{path} does not exist; name a run folder or a model file")
    if not path.is_dir():
        return path
    if not (path / MODEL).is_file():
        raise ModelError(f"{path} has no {MODEL}, which is written when a run ends; wait, or resume the run")
    return path / MODEL


def read_model(path: Path) -> SparseModel:
    """The model of a run directory, or of a .safetensors or .npz file written by fedsieve."""
    path = find_model_file(path)
    readers = {".safetensors": _read_safetensors, ".npz": _read_npz}
    if path.suffix not in readers:
        raise ModelError(f"{path} is not a model file; name a run folder or a file that ends in {' or '.join(readers)}")
    try:
        return readers[path.suffix](path)
    except (OSError, EOFError, SafetensorError, BadZipFile, zlib.error, NotImplementedError, ValueError, KeyError, IndexError) as error:
        raise ModelError(f"{path} is not a model written by fedsieve: {error}") from None


def _read_safetensors(path: Path) -> SparseModel:
    with safe_open(path, "numpy") as file:
        text = (file.metadata() or {}).get(METADATA_KEY)
        if text is None:
            raise ModelError("it has no metadata; train again, or export the run")
        indices, values = (file.get_tensor(name) for name in ("index", "value"))
    return from_parts(text, indices, values)


def _read_npz(path: Path) -> SparseModel:
    with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:  # np.load does not close a file it cannot read
        if METADATA_KEY not in arrays:
            raise ModelError("it has no metadata; export the run again")
        text, data, indices, indptr, shape = (arrays[name] for name in (METADATA_KEY, "data", "indices", "indptr", "shape"))
        intercept = arrays["intercept"] if "intercept" in arrays else np.zeros(0, np.float32)
    flat_indices = np.repeat(np.arange(len(indptr) - 1), np.diff(indptr)) * shape[1] + indices
    nonzero = np.flatnonzero(intercept)
    return from_parts(
        str(text),
        np.concatenate((flat_indices, prod(shape.tolist()) + nonzero)).astype(np.int32),
        np.concatenate((data, intercept[nonzero])).astype(np.float32),
    )
