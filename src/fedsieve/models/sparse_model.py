"""SparseModel: the non-zero weights of a trained model and their metadata. Linear models predict without torch."""

import io
import json
import re
from dataclasses import asdict, dataclass
from functools import cached_property
from hashlib import blake2b
from math import inf, prod
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save
from scipy import sparse

from fedsieve.objectives.losses import Loss
from fedsieve.storage.archives import read_arrays
from fedsieve.storage.run_directory import MODEL

METADATA_KEY = "model"
"""The name of the metadata in a file."""
MAX_PARAMETERS = 1 << 28
"""Largest size of a model in a file, 1 GiB of float32: a small file cannot claim more memory than that."""
MAX_DIMENSIONS = 8
FACTORY_PATTERN = re.compile(r"[\w.]+:[\w.]+")
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
        if not 0 <= self.num_ungated < self.size:
            raise ModelError(f"num_ungated must be between 0 and {self.size - 1}; got {self.num_ungated}")
        if self.metadata.features is not None and (len(self.metadata.features),) != self.metadata.input_shape:
            raise ModelError(f"there are {len(self.metadata.features)} feature names for examples of shape {self.metadata.input_shape}")
        if self.metadata.feature_std is not None and (len(self.metadata.feature_std),) != self.metadata.input_shape:
            raise ModelError(f"feature_std has {len(self.metadata.feature_std)} entries for examples of shape {self.metadata.input_shape}")
        if self.metadata.loss is not Loss.SQUARED and len(self.metadata.classes or ()) < (2 if self.metadata.loss is Loss.LOGISTIC else 1):
            raise ModelError(f"a model with the loss {self.metadata.loss} names its classes; got {self.metadata.classes}")
        if self.metadata.factory is None:
            weights, *intercept = self.tensor_shapes.values()
            if weights != (self.num_outputs, *self.metadata.input_shape) or len(weights) != 2:
                raise ModelError(f"the weights of a linear model must have the shape (outputs, features); got {weights}")
            if intercept != [(self.num_outputs,)] * (self.num_ungated > 0) or self.num_ungated not in (0, self.num_outputs):
                raise ModelError(f"a linear model has one intercept per output, or none; got {intercept}, num_ungated {self.num_ungated}")

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
    from scipy.special import expit, log_softmax  # training needs neither

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
    """Everything except the weights, and a digest of everything, as one line of JSON."""
    return json.dumps(_description(model) | {"digest": model_digest(model)})


def model_digest(model: SparseModel) -> str:
    """A digest of metadata and weights, by which a changed file is noticed; it does not say who wrote the file."""
    digest = blake2b(json.dumps(_description(model)).encode(), digest_size=16)
    for array, dtype in ((model.indices, "<i4"), (model.values, "<f4")):
        digest.update(np.ascontiguousarray(array, dtype).tobytes())
    return digest.hexdigest()


def _description(model: SparseModel) -> dict[str, Any]:
    metadata = {name: value for name, value in asdict(model.metadata).items() if value is not None}
    return {"tensors": model.tensor_shapes, "num_ungated": model.num_ungated, "metadata": metadata}


def metadata_from(text: str) -> ModelMetadata:
    """The metadata in a line written by `metadata_json`."""
    return _parse_metadata(text)[0]


def from_parts(text: str, indices: np.ndarray, values: np.ndarray) -> SparseModel:
    """A model from the text of `metadata_json`, indices and values."""
    metadata, shapes, num_ungated, digest = _parse_metadata(text)
    model = SparseModel(indices=indices, values=values, tensor_shapes=shapes, num_ungated=num_ungated, metadata=metadata)
    if digest != model_digest(model):
        raise ModelError("its content does not match its digest: it was changed or damaged; copy or export it again")
    return model


def _parse_metadata(text: str) -> tuple[ModelMetadata, dict[str, tuple[int, ...]], int, str]:
    """Metadata, shapes, number of parameters without a gate and digest; raises ModelError if a field is missing, unknown or absurd."""
    try:
        parts = json.loads(text)
        if "digest" not in parts:
            raise ModelError(
                "it has no digest, by which damage is noticed, since an older version wrote it; remove result.json of its run and resume it"
            )
        fields = {name: _parse_field(name, value) for name, value in parts["metadata"].items()}
        shapes = {str(name): _parse_shape(shape, "a tensor") for name, shape in parts["tensors"].items()}
        if not shapes or sum(map(prod, shapes.values())) > MAX_PARAMETERS:
            raise ModelError(f"it has {sum(map(prod, shapes.values()))} parameters; between 1 and {MAX_PARAMETERS} are supported")
        return ModelMetadata(**fields), shapes, _parse_count(parts["num_ungated"], "num_ungated"), str(parts["digest"])
    except ModelError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"its metadata is damaged ({type(error).__name__}: {error})") from None


def _parse_field(name: str, value: Any) -> Any:
    """One field of the metadata from its JSON value."""
    if name == "loss":
        return Loss(value)
    if name == "input_shape":
        return _parse_shape(value, name)
    if name == "first_feature_id":
        return _parse_count(value, name)
    if name == "feature_std":
        if not isinstance(value, list) or not all(type(scale) is float and 0 < scale < inf for scale in value):
            raise ModelError("feature_std must be positive finite numbers")
        return tuple(value)
    is_list = name in ("classes", "features")
    if not isinstance(value, list if is_list else str) or not all(isinstance(entry, str) for entry in value):
        raise ModelError(f"{name} must be {'a list of names' if is_list else 'text'}; got {type(value).__name__}")
    if name == "factory" and not FACTORY_PATTERN.fullmatch(str(value)):
        raise ModelError(f"factory must be PACKAGE.MODULE:FACTORY; got {value[:80]!r}")
    return tuple(value) if is_list else value


def _parse_shape(value: Any, name: str) -> tuple[int, ...]:
    """A shape of positive whole numbers with at most MAX_PARAMETERS entries; a scalar has the shape ()."""
    if not isinstance(value, list) or not all(type(length) is int and 0 < length <= MAX_PARAMETERS for length in value):
        raise ModelError(f"the shape of {name} must consist of whole numbers between 1 and {MAX_PARAMETERS}")
    if len(value) > MAX_DIMENSIONS or prod(value) > MAX_PARAMETERS:
        raise ModelError(f"the shape of {name} has more than {MAX_DIMENSIONS} dimensions or {MAX_PARAMETERS} entries")
    return tuple(value)


def _parse_count(value: Any, name: str) -> int:
    if type(value) is not int or not 0 <= value <= MAX_PARAMETERS:
        raise ModelError(f"{name} must be a whole number between 0 and {MAX_PARAMETERS}")
    return value


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
    except (OSError, SafetensorError, ValueError, KeyError, IndexError, TypeError) as error:
        raise ModelError(f"{path} is not a model written by fedsieve: {error}") from None


def _read_safetensors(path: Path) -> SparseModel:
    with safe_open(path, "numpy") as file:
        text = (file.metadata() or {}).get(METADATA_KEY)
        if text is None:
            raise ModelError("it has no metadata; train again, or export the run")
        indices, values = (file.get_tensor(name) for name in ("index", "value"))
    return from_parts(text, indices, values)


def _read_npz(path: Path) -> SparseModel:
    arrays = read_arrays(path)
    if METADATA_KEY not in arrays:
        raise ModelError("it has no metadata; export the run again")
    text, data, indices, indptr, shape = (arrays[name] for name in (METADATA_KEY, "data", "indices", "indptr", "shape"))
    intercept = arrays.get("intercept", np.zeros(0, np.float32))
    if shape.shape != (2,) or (np.diff(indptr) < 0).any() or not indptr[-1] == len(indices) == len(data):
        raise ModelError("its matrix is damaged: the lengths of its parts differ")
    flat_indices = np.repeat(np.arange(len(indptr) - 1), np.diff(indptr)) * shape[1] + indices
    nonzero = np.flatnonzero(intercept)
    return from_parts(
        str(text),
        np.concatenate((flat_indices, prod(shape.tolist()) + nonzero)).astype(np.int32),
        np.concatenate((data, intercept[nonzero])).astype(np.float32),
    )
