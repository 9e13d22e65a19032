"""Models on disk: every format gives back the same model, other runtimes predict the same, and wrong files are refused in one line."""

import csv
import json
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import sparse
from sklearn.metrics import r2_score

from fedsieve import optional
from fedsieve.cli.main import main
from fedsieve.models import export, sparse_model
from fedsieve.models.export import Format, MismatchError
from fedsieve.models.sparse_model import ModelError, ModelMetadata, SparseModel
from fedsieve.objectives.lenet import lenet
from fedsieve.objectives.linear import Linear
from fedsieve.objectives.losses import Loss

RNG = np.random.default_rng(5)
LENET = "fedsieve.objectives.lenet:lenet"


def made(loss=Loss.SOFTMAX, features=40, outputs=3, intercept=True, density=0.2, **names):
    """A linear model with random weights."""
    outputs = 1 if loss in (Loss.SQUARED, Loss.LOGISTIC) else outputs
    tensors = {"weights": (outputs, features)} | ({"intercept": (outputs,)} if intercept else {})
    flat = RNG.standard_normal(outputs * features + (outputs if intercept else 0)).astype(np.float32)
    counted = flat[: outputs * features]
    counted[RNG.random(counted.shape) > density] = 0
    index = np.flatnonzero(flat).astype(np.int32)
    classes = {Loss.SQUARED: None, Loss.LOGISTIC: ("no", "yes")}.get(loss, tuple(f"class {i}" for i in range(outputs)))
    card = ModelMetadata(task="file", algorithm="sieve", loss=loss, input_shape=(features,), classes=classes, **names)
    return SparseModel(indices=index, values=flat[index], tensor_shapes=tensors, num_ungated=outputs if intercept else 0, metadata=card)


def network():
    """LeNet with one weight in twenty."""
    tensors = {name: tuple(parameter.shape) for name, parameter in lenet().named_parameters()}
    index = np.flatnonzero(RNG.random(44_426) < 0.05).astype(np.int32)
    card = ModelMetadata(
        task="mnist-cnn", algorithm="sieve", loss=Loss.SOFTMAX, input_shape=(1, 28, 28), classes=tuple("0123456789"), factory=LENET
    )
    return SparseModel(
        indices=index, values=RNG.standard_normal(len(index)).astype(np.float32) / 5, tensor_shapes=tensors, num_ungated=0, metadata=card
    )


MODELS = {
    "regression": made(Loss.SQUARED),
    "two classes": made(Loss.LOGISTIC, intercept=False),
    "classes": made(features=64),
    "labels": made(Loss.MULTILABEL, outputs=5),
    "network": network(),
}
LINEAR = [name for name in MODELS if name != "network"]


def same(one, other):
    return (
        one.metadata == other.metadata
        and one.tensor_shapes == other.tensor_shapes
        and one.num_ungated == other.num_ungated
        and np.array_equal(one.to_dense(), other.to_dense())
    )


def rows(given, count=50):
    return RNG.standard_normal((count, *given.metadata.input_shape)).astype(np.float32)


def named(given, *features):
    return replace(given, metadata=replace(given.metadata, features=features))


@pytest.fixture
def saved(tmp_path, monkeypatch):
    """Write a model into this test's own folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")

    def save(given, format=Format.SAFETENSORS, name="model"):
        path = tmp_path / (name + export.SUFFIXES[format])
        path.write_bytes(export.export(given, format))
        return path

    return save


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("format", [Format.SAFETENSORS, Format.NPZ])
def test_a_written_model_is_read_back_whole(name, format, saved):
    assert same(sparse_model.read_model(saved(MODELS[name], format)), MODELS[name])


@pytest.mark.parametrize("given", [*(MODELS[name] for name in LINEAR), made(features=2000, density=0.005)], ids=[*LINEAR, "thin"])
def test_a_linear_model_predicts_what_its_objective_does_on_dense_and_sparse_rows(given):
    objective = Linear(
        loss=given.metadata.loss, num_features=given.metadata.input_shape[0], num_outputs=given.num_outputs, intercept=given.num_ungated > 0
    )
    x = rows(given) * (RNG.random((50, given.metadata.input_shape[0])) < 0.3)
    expected = objective.predict(torch.from_numpy(given.to_dense()), torch.from_numpy(x)).numpy()
    for form in (x, sparse.csr_matrix(x)):
        np.testing.assert_allclose(given.predict(form), expected, rtol=1e-5, atol=1e-5)


def test_scipy_reads_the_matrix_without_this_package(saved):
    given = MODELS["classes"]
    matrix = sparse.load_npz(saved(given, Format.NPZ))
    assert matrix.nnz == given.num_nonzero and (matrix != given.coef).nnz == 0


def test_torch_loads_the_state_without_this_package(saved):
    names = ("classes", "network")
    paths = [str(saved(MODELS[name], Format.TORCH, name)) for name in names]
    code = f"import sys, torch; states = [torch.load(path, weights_only=True) for path in {paths}]; assert 'fedsieve' not in sys.modules; "
    code += "print(*(sum(int((t != 0).sum()) for t in state.values()) for state in states))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert list(map(int, done.stdout.split())) == [len(MODELS[name].indices) for name in names]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("format", Format)
def test_every_runtime_predicts_the_same_and_other_weights_are_noticed(name, format, saved):
    given = MODELS[name]
    if format is Format.ONNX and name == "network":
        pytest.importorskip("onnxscript")
    x = rows(given)
    expected = export.predict(given, x)
    found = export.verify(saved(given, format), format, given, x, expected)
    assert found.num_examples == 50 and found.max_difference <= 1e-5 * found.max_output
    if (format, name) == (Format.ONNX, "network"):
        return  # once is enough: the exporter takes its time
    other = saved(replace(given, values=given.values * np.float32(1.01)), format, "other")
    with pytest.raises(MismatchError, match="does not predict what the run does"):
        export.verify(other, format, given, x, expected)


def test_an_onnx_graph_stores_only_the_weights_that_matter(saved):
    given = made(features=2000, density=0.01)
    onnx = pytest.importorskip("onnx")
    path = saved(given, Format.ONNX)
    graph = onnx.load(path).graph
    assert [tensor.values.name for tensor in graph.sparse_initializer] == ["weights"]
    assert path.stat().st_size < 12 * given.num_nonzero + 1000


@pytest.mark.parametrize("format", [Format.SAFETENSORS, Format.NPZ])
def test_a_damaged_model_is_refused_in_one_line(format, saved):
    path = saved(MODELS["regression"], format)
    whole = path.read_bytes()
    for cut in range(0, len(whole) - 1, 37):
        path.write_bytes(whole[:cut])
        with pytest.raises(ModelError, match="is not a model fedsieve wrote"):
            sparse_model.read_model(path)


@pytest.mark.parametrize("format", [Format.SAFETENSORS, Format.NPZ])
def test_an_altered_model_is_refused_or_still_a_model(format, saved):
    path = saved(MODELS["regression"], format)
    whole = path.read_bytes()
    for place in range(0, len(whole), 11):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x55]) + whole[place + 1 :])
        with suppress(ModelError):
            assert np.isfinite(sparse_model.read_model(path).to_dense()).all()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"indices": np.array([3, 3], np.int32), "values": np.ones(2, np.float32)}, "must rise"),
        ({"indices": np.array([41], np.int32), "values": np.ones(1, np.float32)}, "at most 40"),
        ({"indices": np.array([1], np.int32), "values": np.array([np.nan], np.float32)}, "not a finite number"),
        ({"indices": np.array([1], np.int32)}, "places for"),
    ],
)
def test_a_model_that_is_no_vector_is_refused(change, said):
    with pytest.raises(ModelError, match=said):
        replace(MODELS["regression"], **change)


def table(path, header, *lines):
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([header, *lines])
    return str(path)


def test_columns_are_found_by_name_and_the_score_is_scikit_learns(tmp_path, saved, capsys):
    given = named(made(Loss.SQUARED, 3, density=1), "a", "b", "c")
    path, x = saved(given), rows(given, 20)
    truth = given.predict(x)[:, 0] + RNG.standard_normal(20)
    shuffled = table(
        tmp_path / "rows.csv", ["c", "site", "a", "y", "b"], *([r[2], "s", r[0], t, r[1]] for r, t in zip(x, truth, strict=True))
    )
    assert main(["predict", str(path), shuffled, "--target", "y"]) == 0
    said = capsys.readouterr()
    got = np.array(said.out.split()[1:], float)
    np.testing.assert_allclose(got, given.predict(x)[:, 0], rtol=1e-4, atol=1e-5)
    assert "not read: site" in said.err
    assert f"r2 {r2_score(truth, got):.4f}" in said.err and "on 20 rows" in said.err


def test_classes_have_their_names_and_probabilities_add_up(tmp_path, saved, capsys):
    given = made(features=4, outputs=3, density=1)
    np.savez(tmp_path / "rows.npz", x=rows(given, 6))
    assert main(["predict", str(saved(given)), "rows.npz", "--probabilities"]) == 0
    head, *lines = csv.reader(capsys.readouterr().out.splitlines())
    assert head == ["prediction", "class 0", "class 1", "class 2"] and len(lines) == 6
    for name, *chance in lines:
        assert sum(map(float, chance)) == pytest.approx(1, abs=2e-4)
        assert name == head[1 + int(np.argmax(list(map(float, chance))))]


def test_svmlight_features_keep_the_numbers_the_model_learned_them_under(tmp_path, saved, capsys):
    given = made(Loss.SQUARED, features=3, density=1, first_feature_id=1)
    (tmp_path / "rows.svm").write_text("0 2:1.5 3:-1\n0 3:2\n")
    assert main(["predict", str(saved(given)), "rows.svm"]) == 0
    got = np.array(capsys.readouterr().out.split()[1:], float)
    np.testing.assert_allclose(got, given.predict(np.array([[0, 1.5, -1], [0, 0, 2]], np.float32))[:, 0], rtol=1e-4)
    (tmp_path / "rows.svm").write_text("0 4:1.5\n")
    assert main(["predict", str(saved(given)), "rows.svm"]) == 2
    assert "features outside 1 to 3" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["classes", "network"])
def test_every_format_that_can_be_asked_gives_the_same_predictions(name, saved, capsys, tmp_path):
    given = MODELS[name]
    np.savez(tmp_path / "rows.npz", x=rows(given, 5))
    formats = [Format.SAFETENSORS, Format.NPZ, *([Format.ONNX] if name == "classes" else [])]
    said = []
    for format in formats:
        assert main(["predict", str(saved(given, format)), "rows.npz"]) == 0
        said.append(capsys.readouterr().out)
    assert len(said[0].splitlines()) == 6 and set(said) == {said[0]}


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["export", "nowhere"], "nowhere does not exist"),
        (["export", "empty"], "holds no model.safetensors"),
        (["export", "model.safetensors", "--format", "pickle"], "Choose from"),
        (["export", "model.safetensors", "--out", "."], "is a folder"),
        (["export", "model.safetensors", "--out", "no/such/file.npz"], "choose another file with --out"),
        (["export", "rows.csv"], "name a run folder or a file"),
        (["inspect", "model.safetensors", "--top", "0"], "at least 1"),
        (["inspect", "model.safetensors", "--out", "x.txt"], "name a .png"),
        (["predict", "model.safetensors", "missing.csv"], "is not a file"),
        (["predict", "model.safetensors", "rows.csv"], "did you mean heigth"),
        (["predict", "model.safetensors", "words.csv"], "not a number"),
        (["predict", "model.safetensors", "good.csv", "--probabilities"], "has no probabilities"),
        (["predict", "model.safetensors", "good.csv", "--target", "price"], "--target price is not in"),
        (["predict", "model.safetensors", "good.csv", "--out", "no/such.csv"], "choose another file"),
        (["predict", "model.safetensors", "wide.npz"], "the model reads 2"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_two(words, text, saved, capsys, tmp_path):
    saved(named(made(Loss.SQUARED, features=2, density=1), "age", "height"))
    table(tmp_path / "rows.csv", ["age", "heigth"], [1, 2])
    table(tmp_path / "words.csv", ["age", "height"], [1, "tall"])
    table(tmp_path / "good.csv", ["age", "height"], [1, 2])
    (tmp_path / "empty").mkdir()
    np.savez(tmp_path / "wide.npz", x=np.ones((2, 5)))
    assert main(words) == 2
    said = capsys.readouterr().err
    assert text in said
    assert said.count("\n") == 1 and "Traceback" not in said


def test_inspect_counts_what_is_there(saved, capsys, tmp_path):
    given = MODELS["network"]
    path = saved(given)
    assert main(["inspect", str(path), "--json", "--top", "4"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["nonzero"] == sum(layer["kept"] for layer in told["layers"]) == len(given.indices)
    assert told["bytes"] == path.stat().st_size < told["bytes_dense"] == 4 * 44_426
    largest = np.sort(np.abs(given.values))[::-1][:4]
    np.testing.assert_allclose([abs(entry["weight"]) for entry in told["strongest"]], largest)
    assert told["picture"] is None and not list(tmp_path.glob("*.png"))


def test_features_are_ranked_by_weight_times_spread_where_that_is_known(saved, capsys):
    given = made(Loss.SQUARED, feature_std=tuple(np.exp(RNG.normal(0, 3, 40))))
    assert same(sparse_model.read_model(saved(given)), given)
    assert main(["inspect", str(saved(given)), "--json", "--top", "3"]) == 0
    told = json.loads(capsys.readouterr().out)
    effect = given.coef.toarray()[0] * given.metadata.feature_std
    order = np.argsort(-np.abs(effect))[:3]
    assert [entry["feature"] for entry in told["strongest"]] == [f"x{j}" for j in order]
    np.testing.assert_allclose([entry["weight x sd"] for entry in told["strongest"]], effect[order], rtol=1e-5)


PICTURED = [
    MODELS["regression"],
    replace(MODELS["classes"], metadata=replace(MODELS["classes"].metadata, task="digits")),
    MODELS["network"],
]


@pytest.mark.parametrize("given", PICTURED, ids=["features", "pixels", "layers"])
def test_inspect_shows_tables_and_leaves_a_picture(given, saved, capsys, tmp_path):
    assert main(["inspect", str(saved(given))]) == 0
    said = capsys.readouterr().out
    assert f"{given.num_nonzero} of {given.size - given.num_ungated}" in said and "strongest" in said
    assert all(len(line) <= 80 for line in said.splitlines() if "model.png" not in line)
    assert (tmp_path / "model.png").read_bytes().startswith(b"\x89PNG")


def test_a_linear_model_predicts_without_torch(saved, tmp_path):
    given = MODELS["regression"]
    np.savez(tmp_path / "rows.npz", x=rows(given, 2))
    words = ["predict", str(saved(given)), str(tmp_path / "rows.npz")]
    code = f"import sys; from fedsieve.cli.main import main; sys.exit(main({words}) or ('torch' in sys.modules) * 9)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 3


def test_a_reader_that_goes_away_is_no_error(saved, tmp_path):
    given = made(Loss.SQUARED, features=2, density=1)
    np.savez(tmp_path / "rows.npz", x=rows(given, 20_000))
    words = [sys.executable, "-m", "fedsieve", "predict", str(saved(given)), str(tmp_path / "rows.npz")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


def test_a_missing_package_is_named_with_the_command_that_installs_it():
    with pytest.raises(optional.MissingPackageError, match=r"no_such_package, which is not installed; pip install 'fedsieve\[onnx\]'"):
        optional.require_package("no_such_package", "'fedsieve[onnx]'", "--format onnx")


def test_a_model_whose_rows_are_elsewhere_is_verified_on_made_up_rows(saved, capsys, tmp_path):
    (tmp_path / "run").mkdir()
    saved(MODELS["labels"], name="run/model")
    (tmp_path / "run" / "config.toml").write_text('method = "sieve"\n')  # what a federation on several machines leaves
    for place in ("run", "run/model.safetensors"):
        assert main(["export", place, "--format", "npz", "--verify", "--out", "out.npz"]) == 0
        assert "verified in scipy: 1000 made-up rows" in capsys.readouterr().out


def test_a_run_is_exported_and_verified_on_its_own_test_rows(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small = ["--rounds", "2", "--algorithm.local-steps", "2", "--federation.clients", "5", "--federation.participation", "0.4"]
    assert main(["train", "--task", "digits", "--quiet", "--json", "--out", "run", *small]) == 0
    result = json.loads(capsys.readouterr().out)
    for format in Format:
        assert main(["export", "run", "--format", format, "--verify", "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert told["verified"]["num_examples"] == 360
        assert told["bytes"] == (tmp_path / "run" / f"model{export.SUFFIXES[format]}").stat().st_size
    from fedsieve.data.builtin import load_digits

    x, y = load_digits(None)[1]
    np.savez("test.npz", x=x, y=y)
    assert main(["predict", "run", "test.npz", "--target", "y", "--out", "said.csv"]) == 0
    assert f"accuracy {result['accuracy']:.4f}" in capsys.readouterr().err
