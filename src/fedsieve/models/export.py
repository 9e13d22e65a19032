"""A model in the files other programs read, and the proof that they read the same model."""

import io
import logging
import warnings
from collections.abc import Callable
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file
from scipy import sparse
from torch import nn

from fedsieve import optional
from fedsieve.experiments.tasks import factory
from fedsieve.models import sparse_model
from fedsieve.models.sparse_model import Model

ROWS_AT_ONCE = 500
TOLERANCE = 1e-5
"""Largest difference between two runtimes, of the largest output: sums of float32 in another order differ by less."""
OPSET, IR = 20, 10
"""What the exporter of torch writes, so that both kinds of model need the same runtime."""

Rows = np.ndarray | sparse.csr_matrix


class Format(StrEnum):
    """What to write."""

    SAFETENSORS = "safetensors"
    """indices and values, no code: the file a run leaves"""
    NPZ = "npz"
    """a scipy.sparse matrix with the intercept beside it"""
    ONNX = "onnx"
    """a graph with sparse initialisers"""
    TORCH = "torch"
    """a plain state_dict with exact zeros"""


SUFFIX = {Format.SAFETENSORS: ".safetensors", Format.NPZ: ".npz", Format.ONNX: ".onnx", Format.TORCH: ".pt"}
RUNTIME = {Format.SAFETENSORS: "torch", Format.NPZ: "scipy", Format.ONNX: "onnxruntime", Format.TORCH: "torch"}


class MismatchError(RuntimeError):
    """Another runtime predicts something else than the run did."""


class Verified(NamedTuple):
    """What came of comparing predictions."""

    runtime: str
    rows: int
    difference: float
    """the largest, over all outputs"""
    scale: float
    """the largest output"""


def export(given: Model, format: Format) -> bytes:
    """The model in a format."""
    match format:
        case Format.SAFETENSORS:
            return sparse_model.pack(given)
        case Format.NPZ:
            return sparse_model.pack_npz(given)
        case Format.ONNX:
            return onnx_bytes(given)
        case Format.TORCH:
            file = io.BytesIO()
            torch.save(module_of(given).state_dict(), file)
            return file.getvalue()


def module_of(given: Model) -> nn.Module:
    """A plain module with exact zeros: `nn.Linear` for a linear model, else what its factory builds."""
    if given.card.build is None:
        module = nn.Linear(given.card.row[0], given.outputs, bias=given.free > 0)
        names = {"weights": "weight", "intercept": "bias"}
    else:
        module, names = factory(given.card.build)(), {}
    state = {names.get(name, name): torch.from_numpy(array) for name, array in given.named().items()}
    unknown = module.load_state_dict(state, strict=False).unexpected_keys
    if unknown:
        raise sparse_model.ModelError(f"{given.card.build} builds a module without {unknown[0]}; it has changed since the run")
    return module.eval()


def onnx_bytes(given: Model) -> bytes:
    """A graph from `rows` to `output`, its sparse tensors as sparse initialisers, the card in its metadata."""
    onnx = optional.need("onnx", "'fedsieve[onnx]'", "--format onnx")
    proto = _linear_graph(onnx, given) if given.card.build is None else _module_graph(onnx, given)
    _thin(onnx, proto.graph)
    onnx.helper.set_model_props(proto, {sparse_model.ABOUT: sparse_model.about(given)})
    onnx.checker.check_model(proto)
    return proto.SerializeToString(deterministic=True)


def _linear_graph(onnx, given: Model):  # noqa: ANN001, ANN202
    """One Gemm: rows W^T + b."""
    helper, float32 = onnx.helper, onnx.TensorProto.FLOAT
    features, outputs = given.card.row[0], given.outputs
    graph = helper.make_graph(
        [helper.make_node("Gemm", ["rows", "weights", "intercept"], ["output"], transB=1)],
        "fedsieve",
        [helper.make_tensor_value_info("rows", float32, ["n", features])],
        [helper.make_tensor_value_info("output", float32, ["n", outputs])],
        [onnx.numpy_helper.from_array(array, name) for name, array in (("weights", given.coef.toarray()), ("intercept", given.intercept))],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR)


def _module_graph(onnx, given: Model):  # noqa: ANN001, ANN202, ARG001
    """What torch's exporter makes of the module, for any number of rows."""
    optional.need("onnxscript", "'fedsieve[onnx]'", "--format onnx of a module")
    row = torch.zeros(2, *given.card.row)
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it reports operators of packages nobody uses here
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's own deprecations
        shapes = ({0: torch.export.Dim("n")},)
        made = torch.onnx.export(
            module_of(given), (row,), dynamo=True, dynamic_shapes=shapes, input_names=["rows"], output_names=["output"], verbose=False
        )
    return made.model_proto


def _thin(onnx, graph) -> None:  # noqa: ANN001
    """Tensors that are smaller as indices (8 bytes) and values (4 bytes) become sparse initialisers."""
    helper, arrays = onnx.helper, onnx.numpy_helper
    kept = []
    for tensor in graph.initializer:
        array = arrays.to_array(tensor)
        places = np.flatnonzero(array)
        if array.dtype != np.float32 or 12 * len(places) >= array.nbytes:
            kept.append(tensor)
            continue
        value = arrays.from_array(array.reshape(-1)[places], tensor.name)
        index = arrays.from_array(places.astype(np.int64), f"{tensor.name}.index")
        graph.sparse_initializer.append(helper.make_sparse_tensor(value, index, list(array.shape)))
    del graph.initializer[:]
    graph.initializer.extend(kept)


def predict(given: Model, x: Rows) -> np.ndarray:
    """Predictions or logits, (n, outputs): scipy for a linear model, torch for a module."""
    return given.predict(x) if given.card.build is None else _run(module_of(given), x)


def onnx_predict(path: Path, x: Rows) -> np.ndarray:
    """What onnxruntime makes of the rows."""
    runtime = optional.need("onnxruntime", "'fedsieve[onnx]'", path.name)
    session = runtime.InferenceSession(path.read_bytes(), providers=["CPUExecutionProvider"])
    return np.concatenate([session.run(None, {"rows": part})[0] for part in _dense_parts(x)])


def onnx_card(path: Path) -> sparse_model.Card:
    """What an exported graph says of itself."""
    onnx = optional.need("onnx", "'fedsieve[onnx]'", path.name)
    try:
        properties = {entry.key: entry.value for entry in onnx.load(path).metadata_props}
        return sparse_model.card_of(properties[sparse_model.ABOUT])
    except (OSError, KeyError, ValueError, onnx.ONNXException) as problem:
        raise sparse_model.ModelError(f"{path} is not a model fedsieve exported: {type(problem).__name__}: {problem}") from None


def _dense_parts(x: Rows) -> list[np.ndarray]:
    parts = (x[i : i + ROWS_AT_ONCE] for i in range(0, x.shape[0], ROWS_AT_ONCE))
    return [np.ascontiguousarray(part.toarray() if sparse.issparse(part) else part, np.float32) for part in parts]


def _run(module: nn.Module, x: Rows) -> np.ndarray:
    with torch.no_grad():
        return torch.cat([module(torch.from_numpy(part)) for part in _dense_parts(x)]).numpy()


def _reloaded(path: Path, format: Format, given: Model) -> Callable[[Rows], np.ndarray]:
    """The file in its own runtime, through that runtime's reader and none of ours."""
    match format:
        case Format.ONNX:
            return lambda x: onnx_predict(path, x)
        case Format.NPZ if given.card.build is None:
            matrix, offset = sparse.load_npz(path), np.load(path)["intercept"]
            return lambda x: np.asarray(_product(matrix, x)) + offset
        case Format.NPZ:
            row = sparse.load_npz(path)
            index, value = row.indices, row.data
        case Format.SAFETENSORS:
            parts = load_file(path)
            index, value = parts["index"].numpy(), parts["value"].numpy()
        case Format.TORCH:
            module = module_of(given)
            module.load_state_dict(torch.load(path, weights_only=True))
            return lambda x: _run(module, x)
    return lambda x: _run(module_of(replace(given, index=index, value=value)), x)


def _product(matrix: sparse.csr_matrix, x: Rows) -> np.ndarray:
    return (x @ matrix.T).toarray() if sparse.issparse(x) else (matrix @ x.T).T


def verify(path: Path, format: Format, given: Model, x: Rows, expected: np.ndarray) -> Verified:
    """Compare what the file's own runtime predicts with what the run predicted."""
    found = _reloaded(path, format, given)(x)
    scale = float(np.abs(expected).max(initial=0))
    difference = float(np.abs(found - expected).max(initial=0)) if found.shape == expected.shape else float("inf")
    if not difference <= TOLERANCE * max(scale, 1):
        raise MismatchError(
            f"{path} does not predict what the run does: in {RUNTIME[format]} it differs by up to {difference:.2g} in {len(expected)} rows,"
            f" where the largest output is {scale:.3g}; do not use it"
        )
    return Verified(RUNTIME[format], len(expected), difference, scale)
