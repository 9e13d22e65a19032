"""Export a model to the formats of other programs, and verify that they predict the same."""

import io
import logging
import warnings
from collections.abc import Callable
from dataclasses import replace
from enum import StrEnum
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file
from scipy import sparse
from torch import nn

from fedsieve import optional
from fedsieve.models import sparse_model
from fedsieve.models.factory import load_factory
from fedsieve.models.sparse_model import SparseModel

BATCH_SIZE = 500
TOLERANCE = 1e-5
"""Maximum difference between two runtimes relative to the largest output. Sums of float32 in another order differ by less."""
OPSET_VERSION, IR_VERSION = 20, 10
"""The versions that torch's exporter writes, so that linear models and modules need the same runtime."""

DIGEST_KEY, EMPTY_DIGEST = "fedsieve digest", "0" * 32
"""The property of an ONNX file with the digest of the file, computed while the property has the second value."""

Examples = np.ndarray | sparse.csr_matrix


class Format(StrEnum):
    """The file formats."""

    SAFETENSORS = "safetensors"
    """indices and values, as in a run directory"""
    NPZ = "npz"
    """a scipy.sparse matrix and the intercept"""
    ONNX = "onnx"
    """a graph with sparse initializers"""
    TORCH = "torch"
    """a state_dict with exact zeros"""


SUFFIXES = {Format.SAFETENSORS: ".safetensors", Format.NPZ: ".npz", Format.ONNX: ".onnx", Format.TORCH: ".pt"}
RUNTIMES = {Format.SAFETENSORS: "torch", Format.NPZ: "scipy", Format.ONNX: "onnxruntime", Format.TORCH: "torch"}


class MismatchError(RuntimeError):
    """An exported model does not predict the same as the original."""


class VerificationResult(NamedTuple):
    """The comparison of two sets of predictions."""

    runtime: str
    num_examples: int
    max_difference: float
    max_output: float


def export(model: SparseModel, format: Format) -> bytes:
    """The model as a file of the given format."""
    match format:
        case Format.SAFETENSORS:
            return sparse_model.to_safetensors(model)
        case Format.NPZ:
            return sparse_model.to_npz(model)
        case Format.ONNX:
            return to_onnx(model)
        case Format.TORCH:
            file = io.BytesIO()
            torch.save(to_module(model).state_dict(), file)
            return file.getvalue()


def to_module(model: SparseModel) -> nn.Module:
    """The model as a module with exact zeros: `nn.Linear` for a linear model, otherwise built by its factory."""
    if model.metadata.factory is None:
        module = nn.Linear(model.metadata.input_shape[0], model.num_outputs, bias=model.num_ungated > 0)
        names = {"weights": "weight", "intercept": "bias"}
    else:
        module, names = load_factory(model.metadata.factory)(), {}
    state = {names.get(name, name): torch.from_numpy(array) for name, array in model.tensors_by_name().items()}
    unknown = module.load_state_dict(state, strict=False).unexpected_keys
    if unknown:
        raise sparse_model.ModelError(
            f"{model.metadata.factory} builds a module without the parameter {unknown[0]}; it has changed since the run, restore it"
        )
    return module.eval()


def to_onnx(model: SparseModel) -> bytes:
    """An ONNX graph from `rows` to `output` with sparse initializers and the model's metadata."""
    onnx = optional.require_package("onnx", "'fedsieve[onnx]'", "--format onnx")
    proto = _linear_graph(onnx, model) if model.metadata.factory is None else _module_graph(onnx, model)
    _sparsify(onnx, proto.graph)
    onnx.helper.set_model_props(proto, {sparse_model.METADATA_KEY: sparse_model.metadata_json(model), DIGEST_KEY: EMPTY_DIGEST})
    onnx.checker.check_model(proto)
    content = proto.SerializeToString(deterministic=True)
    return content.replace(EMPTY_DIGEST.encode(), onnx_digest(content).encode(), 1)


def onnx_digest(content: bytes) -> str:
    """A digest of an ONNX file in which the digest itself is empty."""
    return blake2b(content, digest_size=len(EMPTY_DIGEST) // 2).hexdigest()


def _linear_graph(onnx, model: SparseModel):  # noqa: ANN001, ANN202
    """One Gemm: x W^T + b."""
    helper, float32 = onnx.helper, onnx.TensorProto.FLOAT
    num_features = model.metadata.input_shape[0]
    graph = helper.make_graph(
        [helper.make_node("Gemm", ["rows", "weights", "intercept"], ["output"], transB=1)],
        "fedsieve",
        [helper.make_tensor_value_info("rows", float32, ["n", num_features])],
        [helper.make_tensor_value_info("output", float32, ["n", model.num_outputs])],
        [onnx.numpy_helper.from_array(array, name) for name, array in (("weights", model.coef.toarray()), ("intercept", model.intercept))],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET_VERSION)], ir_version=IR_VERSION)


def _module_graph(onnx, model: SparseModel):  # noqa: ANN001, ANN202, ARG001
    """The graph of torch's exporter for any number of examples."""
    optional.require_package("onnxscript", "'fedsieve[onnx]'", "--format onnx of a module")
    examples = torch.zeros(2, *model.metadata.input_shape)
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it reports missing operators of packages that are not used here
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations inside the exporter
        shapes = ({0: torch.export.Dim("n")},)
        program = torch.onnx.export(
            to_module(model), (examples,), dynamo=True, dynamic_shapes=shapes, input_names=["rows"], output_names=["output"], verbose=False
        )
    assert program is not None, "there is a program with dynamo=True"
    return program.model_proto


def _sparsify(onnx, graph) -> None:  # noqa: ANN001
    """Replace tensors that are smaller as indices (8 bytes) and values (4 bytes) by sparse initializers."""
    helper, arrays = onnx.helper, onnx.numpy_helper
    dense = []
    for tensor in graph.initializer:
        array = arrays.to_array(tensor)
        indices = np.flatnonzero(array)
        if array.dtype != np.float32 or 12 * len(indices) >= array.nbytes:
            dense.append(tensor)
            continue
        value = arrays.from_array(array.reshape(-1)[indices], tensor.name)
        index = arrays.from_array(indices.astype(np.int64), f"{tensor.name}.index")
        graph.sparse_initializer.append(helper.make_sparse_tensor(value, index, list(array.shape)))
    del graph.initializer[:]
    graph.initializer.extend(dense)


def predict(model: SparseModel, x: Examples) -> np.ndarray:
    """Predictions or logits, (n, outputs), computed by scipy for a linear model and by torch for a module."""
    return model.predict(x) if model.metadata.factory is None else _run_module(to_module(model), x)


def predict_onnx(path: Path, x: Examples) -> np.ndarray:
    """Predictions or logits of an ONNX file, computed by onnxruntime."""
    runtime = optional.require_package("onnxruntime", "'fedsieve[onnx]'", path.name)
    session = runtime.InferenceSession(path.read_bytes(), providers=["CPUExecutionProvider"])
    return np.concatenate([session.run(None, {"rows": part})[0] for part in _dense_batches(x)])


def read_onnx_metadata(path: Path) -> sparse_model.ModelMetadata:
    """The metadata in an exported ONNX file."""
    onnx = optional.require_package("onnx", "'fedsieve[onnx]'", path.name)
    try:
        content = path.read_bytes()
        properties = {entry.key: entry.value for entry in onnx.load_model_from_string(content).metadata_props}
        digest = properties[DIGEST_KEY]
        if digest != onnx_digest(content.replace(digest.encode(), EMPTY_DIGEST.encode(), 1)):
            raise sparse_model.ModelError("its content does not match its digest: it was changed or damaged; export the run again")
        return sparse_model.metadata_from(properties[sparse_model.METADATA_KEY])
    except Exception as error:  # what the parser raises depends on the versions of onnx and protobuf
        raise sparse_model.ModelError(f"{path} is not a model exported by fedsieve: {type(error).__name__}: {error}") from None


def _dense_batches(x: Examples) -> list[np.ndarray]:
    num_examples: int = x.shape[0]  # pyright: ignore[reportOptionalSubscript]  # SciPy has no stubs
    parts = (x[i : i + BATCH_SIZE] for i in range(0, num_examples, BATCH_SIZE))
    return [np.ascontiguousarray(part if isinstance(part, np.ndarray) else part.toarray(), np.float32) for part in parts]


def _run_module(module: nn.Module, x: Examples) -> np.ndarray:
    with torch.no_grad():
        return torch.cat([module(torch.from_numpy(part)) for part in _dense_batches(x)]).numpy()


def _predictor(path: Path, format: Format, model: SparseModel) -> Callable[[Examples], np.ndarray]:
    """The predictions of a file, read and computed only by the libraries of its format."""
    match format:
        case Format.ONNX:
            return lambda x: predict_onnx(path, x)
        case Format.NPZ if model.metadata.factory is None:
            matrix, offset = sparse.load_npz(path), np.load(path)["intercept"]
            return lambda x: np.asarray(_matmul(matrix, x)) + offset
        case Format.NPZ:
            vector = sparse.load_npz(path)
            indices, values = vector.indices, vector.data
        case Format.SAFETENSORS:
            parts = load_file(path)
            indices, values = parts["index"].numpy(), parts["value"].numpy()
        case Format.TORCH:
            module = to_module(model)
            module.load_state_dict(torch.load(path, weights_only=True))
            return lambda x: _run_module(module, x)
    return lambda x: _run_module(to_module(replace(model, indices=indices, values=values)), x)


def _matmul(matrix: sparse.csr_matrix, x: Examples) -> np.ndarray:
    return (x @ matrix.T).toarray() if sparse.issparse(x) else (matrix @ x.T).T


def verify(path: Path, format: Format, model: SparseModel, x: Examples, expected: np.ndarray) -> VerificationResult:
    """Compare the predictions of a file with the expected ones; raises MismatchError if they differ."""
    outputs = _predictor(path, format, model)(x)
    scale = float(np.abs(expected).max(initial=0))
    difference = float(np.abs(outputs - expected).max(initial=0)) if outputs.shape == expected.shape else float("inf")
    if not difference <= TOLERANCE * max(scale, 1):
        raise MismatchError(
            f"{path} does not predict the same as the run: in {RUNTIMES[format]} it differs by up to {difference:.2g} on {len(expected)} "
            f"examples, the largest output is {scale:.3g}; do not use this file"
        )
    return VerificationResult(RUNTIMES[format], len(expected), difference, scale)
