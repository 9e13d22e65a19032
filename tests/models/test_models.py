"""A stored model is the model that was written, in every format and runtime; damaged files raise an error."""

import subprocess
import sys
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import sparse

from fedsieve import optional
from fedsieve.models import export, sparse_model
from fedsieve.models.export import Format, MismatchError
from fedsieve.models.sparse_model import ModelError
from fedsieve.objectives.linear import Linear
from helpers.models import LINEAR, MODELS, RNG, is_same_model, linear_model, random_examples


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("format", [Format.SAFETENSORS, Format.NPZ])
def test_a_model_is_read_as_it_was_written(name, format, write_model):
    assert is_same_model(sparse_model.read_model(write_model(MODELS[name], format)), MODELS[name])


@pytest.mark.parametrize("model", [*(MODELS[name] for name in LINEAR), linear_model(features=2000, density=0.005)], ids=[*LINEAR, "thin"])
def test_a_linear_model_predicts_the_same_as_its_objective(model):
    objective = Linear(
        loss=model.metadata.loss, num_features=model.metadata.input_shape[0], num_outputs=model.num_outputs, intercept=model.num_ungated > 0
    )
    x = random_examples(model) * (RNG.random((50, model.metadata.input_shape[0])) < 0.3)
    expected = objective.predict(torch.from_numpy(model.to_dense()), torch.from_numpy(x)).numpy()
    for form in (x, sparse.csr_matrix(x)):
        np.testing.assert_allclose(model.predict(form), expected, rtol=1e-5, atol=1e-5)


def test_scipy_reads_the_matrix_without_this_package(write_model):
    model = MODELS["classes"]
    matrix = sparse.load_npz(write_model(model, Format.NPZ))
    assert matrix.nnz == model.num_nonzero and (matrix != model.coef).nnz == 0


def test_torch_loads_the_state_without_this_package(write_model):
    names = ("classes", "network")
    paths = [str(write_model(MODELS[name], Format.TORCH, name)) for name in names]
    code = f"import sys, torch; states = [torch.load(path, weights_only=True) for path in {paths}]; assert 'fedsieve' not in sys.modules; "
    code += "print(*(sum(int((t != 0).sum()) for t in state.values()) for state in states))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert list(map(int, done.stdout.split())) == [len(MODELS[name].indices) for name in names]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("format", Format)
def test_verification_accepts_the_same_model_and_rejects_another(name, format, write_model):
    model = MODELS[name]
    if format is Format.ONNX and name == "network":
        pytest.importorskip("onnxscript")
    x = random_examples(model)
    expected = export.predict(model, x)
    verification = export.verify(write_model(model, format), format, model, x, expected)
    assert verification.num_examples == 50 and verification.max_difference <= 1e-5 * verification.max_output
    if (format, name) == (Format.ONNX, "network"):
        return  # once is enough: the exporter takes its time
    other = write_model(replace(model, values=model.values * np.float32(1.01)), format, "other")
    with pytest.raises(MismatchError, match="does not predict the same as the run"):
        export.verify(other, format, model, x, expected)


def test_an_onnx_graph_stores_only_non_zero_weights(write_model):
    model = linear_model(features=2000, density=0.01)
    onnx = pytest.importorskip("onnx")
    path = write_model(model, Format.ONNX)
    graph = onnx.load(path).graph
    assert [tensor.values.name for tensor in graph.sparse_initializer] == ["weights"]
    assert path.stat().st_size < 12 * model.num_nonzero + 1000


@pytest.mark.parametrize("format", [Format.SAFETENSORS, Format.NPZ])
def test_a_truncated_model_raises_an_error(format, write_model):
    path = write_model(MODELS["regression"], format)
    content = path.read_bytes()
    for cut in range(0, len(content) - 1, 37):
        path.write_bytes(content[:cut])
        with pytest.raises(ModelError, match="is not a model written by fedsieve"):
            sparse_model.read_model(path)


@pytest.mark.parametrize("format", [Format.SAFETENSORS, Format.NPZ])
def test_a_changed_file_is_a_valid_model_or_an_error(format, write_model):
    path = write_model(MODELS["regression"], format)
    content = path.read_bytes()
    for index in range(0, len(content), 11):
        path.write_bytes(content[:index] + bytes([content[index] ^ 0x55]) + content[index + 1 :])
        with suppress(ModelError):
            assert np.isfinite(sparse_model.read_model(path).to_dense()).all()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"indices": np.array([3, 3], np.int32), "values": np.ones(2, np.float32)}, "must increase"),
        ({"indices": np.array([41], np.int32), "values": np.ones(1, np.float32)}, "between 0 and 40"),
        ({"indices": np.array([1], np.int32), "values": np.array([np.nan], np.float32)}, "not a finite number"),
        ({"indices": np.array([1], np.int32)}, "vectors of one length"),
    ],
)
def test_invalid_indices_or_values_raise_an_error(change, text):
    with pytest.raises(ModelError, match=text):
        replace(MODELS["regression"], **change)


def test_the_error_about_a_missing_package_has_the_command_to_install_it():
    with pytest.raises(optional.MissingPackageError, match=r"no_such_package, which is not installed; pip install 'fedsieve\[onnx\]'"):
        optional.require_package("no_such_package", "'fedsieve[onnx]'", "--format onnx")
