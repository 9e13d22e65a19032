"""The commands `export`, `predict` and `inspect`."""

import csv
import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.metrics import r2_score

from fedsieve.cli.main import main
from fedsieve.models import export, sparse_model
from fedsieve.models.export import Format
from fedsieve.models.factory import load_factory
from fedsieve.objectives.losses import Loss
from helpers.models import MODELS, RNG, is_same_model, linear_model, random_examples, with_feature_names


def table(path, header, *lines):
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([header, *lines])
    return str(path)


def test_columns_are_matched_by_name_and_scored_like_scikit_learn(tmp_path, write_model, capsys):
    model = with_feature_names(linear_model(Loss.SQUARED, 3, density=1), "a", "b", "c")
    path, x = write_model(model), random_examples(model, 20)
    truth = model.predict(x)[:, 0] + RNG.standard_normal(20)
    shuffled = table(
        tmp_path / "rows.csv", ["c", "site", "a", "y", "b"], *([r[2], "s", r[0], t, r[1]] for r, t in zip(x, truth, strict=True))
    )
    assert main(["predict", str(path), shuffled, "--target", "y"]) == 0
    output = capsys.readouterr()
    predictions = np.array(output.out.split()[1:], float)
    np.testing.assert_allclose(predictions, model.predict(x)[:, 0], rtol=1e-4, atol=1e-5)
    assert "ignored: site" in output.err
    assert f"r2 {r2_score(truth, predictions):.4f}" in output.err and "on 20 examples" in output.err


def test_classes_have_their_names_and_probabilities_add_up(tmp_path, write_model, capsys):
    model = linear_model(features=4, outputs=3, density=1)
    np.savez(tmp_path / "rows.npz", x=random_examples(model, 6))
    assert main(["predict", str(write_model(model)), "rows.npz", "--probabilities"]) == 0
    head, *lines = csv.reader(capsys.readouterr().out.splitlines())
    assert head == ["prediction", "class 0", "class 1", "class 2"] and len(lines) == 6
    for name, *probabilities in lines:
        assert sum(map(float, probabilities)) == pytest.approx(1, abs=2e-4)
        assert name == head[1 + int(np.argmax(list(map(float, probabilities))))]


def test_svmlight_features_keep_their_ids(tmp_path, write_model, capsys):
    model = linear_model(Loss.SQUARED, features=3, density=1, first_feature_id=1)
    (tmp_path / "rows.svm").write_text("0 2:1.5 3:-1\n0 3:2\n")
    assert main(["predict", str(write_model(model)), "rows.svm"]) == 0
    predictions = np.array(capsys.readouterr().out.split()[1:], float)
    np.testing.assert_allclose(predictions, model.predict(np.array([[0, 1.5, -1], [0, 0, 2]], np.float32))[:, 0], rtol=1e-4)
    (tmp_path / "rows.svm").write_text("0 4:1.5\n")
    assert main(["predict", str(write_model(model)), "rows.svm"]) == 2
    assert "features outside 1 to 3" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["classes", "network"])
def test_every_format_gives_the_same_predictions(name, write_model, capsys, tmp_path):
    model = MODELS[name]
    np.savez(tmp_path / "rows.npz", x=random_examples(model, 5))
    formats = [Format.SAFETENSORS, Format.NPZ, *([Format.ONNX] if name == "classes" else [])]
    outputs = []
    for format in formats:
        assert main(["predict", str(write_model(model, format)), "rows.npz"]) == 0
        outputs.append(capsys.readouterr().out)
    assert len(outputs[0].splitlines()) == 6 and set(outputs) == {outputs[0]}


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["export", "nowhere"], "nowhere does not exist"),
        (["export", "empty"], "has no model.safetensors"),
        (["export", "model.safetensors", "--format", "pickle"], "--format takes safetensors, npz, onnx, torch; got pickle"),
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
        (["predict", "model.safetensors", "wide.npz"], "the model takes 2"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_two(words, text, write_model, capsys, tmp_path):
    write_model(with_feature_names(linear_model(Loss.SQUARED, features=2, density=1), "age", "height"))
    table(tmp_path / "rows.csv", ["age", "heigth"], [1, 2])
    table(tmp_path / "words.csv", ["age", "height"], [1, "tall"])
    table(tmp_path / "good.csv", ["age", "height"], [1, 2])
    (tmp_path / "empty").mkdir()
    np.savez(tmp_path / "wide.npz", x=np.ones((2, 5)))
    assert main(words) == 2
    error = capsys.readouterr().err
    assert text in error
    assert error.count("\n") == 1 and "Traceback" not in error


def test_inspect_reports_counts_and_the_strongest_weights(write_model, capsys, tmp_path):
    model = MODELS["network"]
    path = write_model(model)
    assert main(["inspect", str(path), "--json", "--top", "4"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["nonzero"] == sum(layer["kept"] for layer in result["layers"]) == len(model.indices)
    assert result["bytes"] == path.stat().st_size < result["bytes_dense"] == 4 * 44_426
    largest = np.sort(np.abs(model.values))[::-1][:4]
    np.testing.assert_allclose([abs(entry["weight"]) for entry in result["strongest"]], largest)
    assert result["picture"] is None and not list(tmp_path.glob("*.png"))


def test_features_are_ranked_by_weight_times_standard_deviation(write_model, capsys):
    model = linear_model(Loss.SQUARED, feature_std=tuple(np.exp(RNG.normal(0, 3, 40))))
    assert is_same_model(sparse_model.read_model(write_model(model)), model)
    assert main(["inspect", str(write_model(model)), "--json", "--top", "3"]) == 0
    result = json.loads(capsys.readouterr().out)
    effect = model.coef.toarray()[0] * model.metadata.feature_std
    order = np.argsort(-np.abs(effect))[:3]
    assert [entry["feature"] for entry in result["strongest"]] == [f"x{j}" for j in order]
    np.testing.assert_allclose([entry["weight x sd"] for entry in result["strongest"]], effect[order], rtol=1e-5)


PICTURED = [
    MODELS["regression"],
    replace(MODELS["classes"], metadata=replace(MODELS["classes"].metadata, task="digits")),
    MODELS["network"],
]


@pytest.mark.parametrize("model", PICTURED, ids=["features", "pixels", "layers"])
def test_inspect_prints_tables_and_writes_a_picture(model, write_model, capsys, tmp_path):
    assert main(["inspect", str(write_model(model))]) == 0
    output = capsys.readouterr().out
    assert f"{model.num_nonzero} of {model.size - model.num_ungated}" in output and ("strongest of" in output or "largest of" in output)
    assert all(len(line) <= 80 for line in output.splitlines() if "model.png" not in line)
    assert (tmp_path / "model.png").read_bytes().startswith(b"\x89PNG")


def test_a_linear_model_predicts_without_torch(write_model, tmp_path):
    model = MODELS["regression"]
    np.savez(tmp_path / "rows.npz", x=random_examples(model, 2))
    words = ["predict", str(write_model(model)), str(tmp_path / "rows.npz")]
    code = f"import sys; from fedsieve.cli.main import main; sys.exit(main({words}) or ('torch' in sys.modules) * 9)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 3


def test_a_closed_pipe_is_not_an_error(write_model, tmp_path):
    model = linear_model(Loss.SQUARED, features=2, density=1)
    np.savez(tmp_path / "rows.npz", x=random_examples(model, 20_000))
    words = [sys.executable, "-m", "fedsieve", "predict", str(write_model(model)), str(tmp_path / "rows.npz")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


def test_a_model_without_test_examples_is_verified_on_random_ones(write_model, capsys, tmp_path):
    (tmp_path / "run").mkdir()
    write_model(MODELS["labels"], name="run/model")
    (tmp_path / "run" / "config.toml").write_text('method = "sieve"\n')  # what a federation on several machines leaves
    for path in ("run", "run/model.safetensors"):
        assert main(["export", path, "--format", "npz", "--verify", "--out", "out.npz"]) == 0
        assert "verified in scipy: 1000 random examples" in capsys.readouterr().out


def test_a_run_is_exported_and_verified_on_its_test_examples(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small = ["--rounds", "2", "--algorithm.local-steps", "2", "--federation.clients", "5", "--federation.participation", "0.4"]
    assert main(["train", "--task", "digits", "--quiet", "--json", "--out", "run", *small]) == 0
    trained = json.loads(capsys.readouterr().out)
    for format in Format:
        assert main(["export", "run", "--format", format, "--verify", "--json"]) == 0
        result = json.loads(capsys.readouterr().out)
        assert result["verified"]["num_examples"] == 360
        assert result["bytes"] == (tmp_path / "run" / f"model{export.SUFFIXES[format]}").stat().st_size
    from fedsieve.data.builtin import load_digits

    x, y = load_digits(None)[1]
    np.savez("test.npz", x=x, y=y)
    assert main(["predict", "run", "test.npz", "--target", "y", "--out", "predictions.csv"]) == 0
    assert f"accuracy {trained['accuracy']:.4f}" in capsys.readouterr().err


NETWORK = """
import torch
from torch import nn

def build():
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
"""


def test_a_module_with_batch_norm_resumes_predicts_and_exports_its_statistics(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "norm_networks.py").write_text(NETWORK)
    rng = np.random.default_rng(0)
    x = (5 + 3 * rng.normal(size=(120, 6))).astype(np.float32)
    np.savez("rows.npz", x=x, y=(x[:, 0] > 5).astype(int))
    options = ["--task", "file", "--data.path", "rows.npz", "--model", "norm_networks:build", "--density", "0.5", "--quiet"]
    train = ["train", *options, "--federation.clients", "4", "--algorithm.local-steps", "10"]
    assert main([*train, "--rounds", "4", "--out", "whole"]) == 0
    assert main([*train, "--rounds", "4", "--out", "again", "--engine", "loop"]) == 0
    whole, again = (sparse_model.read_model(tmp_path / name) for name in ("whole", "again"))
    names = {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    assert names < set(whole.tensor_shapes) and whole.num_nonzero == 37 and whole.tensors_by_name()["1.num_batches_tracked"] == 40
    np.testing.assert_allclose(whole.tensors_by_name()["1.running_var"], again.tensors_by_name()["1.running_var"], rtol=1e-3)
    assert main(["export", "whole", "--format", "torch", "--trust"]) == 0
    capsys.readouterr()
    assert main(["predict", "whole", "rows.npz", "--trust"]) == 0
    classes = [int(line.split(",")[0]) for line in capsys.readouterr().out.split()[1:]]
    module = load_factory("norm_networks:build")().eval()
    module.load_state_dict(torch.load(next(tmp_path.rglob("*.pt")), weights_only=True))
    assert classes == module(torch.from_numpy(x)).argmax(1).tolist() and 20 < sum(classes) < 100
    continued = ["train", *options, "--federation.clients", "4", "--rounds", "1", "--out", "next"]
    assert main([*continued, "--init-weights", "whole/model.safetensors"]) == 0
    assert sparse_model.read_model(tmp_path / "next").tensors_by_name()["1.num_batches_tracked"] > 40
