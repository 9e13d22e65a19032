"""A user's own rows, model and start, through the command line."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from fedsieve.cli import main

RNG = np.random.default_rng(3)
X = RNG.standard_normal((240, 12)).astype(np.float32)
TRUE = np.zeros(12, np.float32)
TRUE[[1, 4, 9]] = [2, -3, 1.5]
Y = X @ TRUE + 5 + 0.1 * RNG.standard_normal(240).astype(np.float32)
WORDS = np.array(["low", "mid", "high"])[np.digitize(Y, [4, 6])]
SITES = np.array([f"site {i % 4}" for i in range(240)])


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.savez("rows.npz", x=X, y=Y, kind=WORDS, site=SITES)
    lines = [",".join([*(f"f{j}" for j in range(12)), "price", "kind", "site"])]
    lines += [",".join([*map(str, x), str(y), k, s]) for x, y, k, s in zip(X, Y, WORDS, SITES, strict=True)]
    (tmp_path / "rows.csv").write_text("\n".join(lines) + "\n")
    numbers = [line.split(",") for line in lines]
    (tmp_path / "numbers.csv").write_text("\n".join(",".join(parts[:13]) for parts in numbers) + "\n")
    (tmp_path / "rows.svm").write_text(
        "\n".join(f"{int(y > 5)} " + " ".join(f"{j + 1}:{v}" for j, v in enumerate(x)) for x, y in zip(X, Y, strict=True))
    )
    (tmp_path / "many.svm").write_text(
        "\n".join(f"{'0,2' if y > 5 else '1'} " + " ".join(f"{j + 1}:{v}" for j, v in enumerate(x)) for x, y in zip(X, Y, strict=True))
    )


def trained(capsys, *words, method="fed-round-ht"):
    code = main(["train", "--task", "file", "--method", method, "--rounds", "25", "--json", "--quiet", *words])
    said = capsys.readouterr()
    assert code == 0, said.err
    return json.loads(said.out.splitlines()[-1])


@pytest.mark.parametrize("method", ["fed-round-ht", "flops-pa", "flops", "fed-iter-ht", "fed-l1", "gradual"])
def test_regression_on_a_csv_fits_an_intercept_outside_the_density(capsys, method):
    result = trained(
        capsys, "--data.path", "numbers.csv", "--data.target", "price", "--density", "0.25", "--federation.clients", "4", method=method
    )
    assert result["nonzero"] == 3 and result["size"] == 12
    assert result["value"] > 0.9


def test_without_an_intercept_the_offset_cannot_be_fitted(capsys):
    words = ["--data.path", "numbers.csv", "--data.target", "price", "--density", "0.25", "--federation.clients", "4"]
    assert trained(capsys, *words, "--data.no-intercept")["value"] < 0.5


def test_classes_may_be_words_and_clients_may_be_named(capsys):
    result = trained(capsys, "--data.path", "rows.npz", "--data.target", "kind", "--data.client", "site", "--density", "0.25")
    assert result["metric"] == "accuracy" and result["value"] > 0.8
    assert result["size"] == 36 and result["nonzero"] == 9


def test_svmlight_rows_stay_sparse_and_may_have_several_labels(capsys):
    one = trained(capsys, "--data.path", "rows.svm", "--model", "softmax", "--density", "0.25", "--federation.clients", "4")
    assert one["size"] == 24 and one["value"] > 0.8
    many = trained(capsys, "--data.path", "many.svm", "--density", "0.25", "--federation.clients", "4")
    assert many["metric"] == "micro_f1" and many["size"] == 36 and many["value"] > 0.8


def test_features_share_gates_and_are_listed_by_name(capsys):
    words = ["--data.path", "rows.npz", "--data.target", "kind", "--data.client", "site", "--gates.group", "feature", "--density", "0.25"]
    result = trained(capsys, *words)
    assert sorted(result["features"]) == ["x1", "x4", "x9"]
    assert result["nonzero"] == 9


@pytest.mark.parametrize("method", ["flops-pa", "flops", "fed-iter-ht", "random-mask"])
def test_groups_are_kept_or_dropped_whole_by_every_method(capsys, method):
    words = ["--data.path", "rows.npz", "--data.target", "kind", "--data.client", "site", "--gates.group", "feature", "--density", "0.2"]
    result = trained(capsys, *words, method=method)
    assert result["nonzero"] == 6 and len(result["features"]) == 2  # 7 weights asked for, groups of 3


def test_a_module_of_ones_own_is_trained(capsys, tmp_path):
    (tmp_path / "nets.py").write_text(
        "from torch import nn\ndef net():\n    return nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 3))\n"
    )
    words = ["--data.path", "rows.npz", "--data.target", "kind", "--data.client", "site", "--model", "nets:net", "--density", "0.3"]
    result = trained(capsys, *words)
    assert result["size"] == 12 * 16 + 16 + 16 * 3 + 3 and result["value"] > 0.7
    grouped = trained(capsys, *words, "--gates.group", "neuron")
    assert grouped["nonzero"] <= result["nonzero"]


@pytest.mark.parametrize("method", ["flops-pa", "flops", "fed-iter-ht", "fed-avg", "gradual", "random-mask"])
def test_groups_of_unequal_size_share_one_global_budget(capsys, tmp_path, method):
    (tmp_path / "nets.py").write_text(
        "from torch import nn\ndef net():\n    return nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 3))\n"
    )
    words = ["--data.path", "rows.npz", "--data.target", "kind", "--data.client", "site", "--model", "nets:net", "--density", "0.3"]
    result = trained(capsys, *words, "--gates.group", "neuron", "--algorithm.budget", "global", method=method)
    allowed = int(0.3 * (12 * 16 + 16 + 16 * 3 + 3))
    assert allowed - 12 < result["nonzero"] <= allowed  # neurons of 12 and 16 weights, biases alone


def test_a_run_starts_from_an_earlier_model_or_from_named_tensors(capsys):
    words = ["--data.path", "numbers.csv", "--data.target", "price", "--density", "0.25", "--federation.clients", "4"]
    once = ["train", "--task", "file", "--method", "fed-round-ht", "--quiet", "--json", "--rounds", "1", "--algorithm.steps", "1", *words]

    def value(*more):
        assert main([*once, *more]) == 0
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    trained(capsys, *words, "--out", "first")
    warm, cold = value("--start", "first/model.safetensors"), value()
    assert warm["value"] > cold["value"]
    assert warm["bytes_down"] > cold["bytes_down"]  # weights were sent, not a seed
    save_file({"weights": torch.from_numpy(TRUE)[None], "intercept": torch.full((1,), 5.0)}, "named.safetensors")
    assert value("--start", "named.safetensors")["value"] > 0.99
    save_file({"weights": torch.zeros(3, 12), "intercept": torch.ones(1)}, "wrong.safetensors")
    assert main([*once, "--start", "wrong.safetensors"]) == 2
    assert "has shape (3, 12)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "needs --data.path"),
        (["--data.path", "nowhere.csv"], "is not a file"),
        (["--data.path", "rows.txt"], "is not a file"),
        (["--data.path", "rows.csv", "--data.target", "prise"], "did you mean price?"),
        (["--data.path", "rows.csv", "--data.target", "price"], "column kind is"),
        (["--data.path", "bad.csv", "--data.target", "b"], "line 3: 3 columns, the header has 2"),
        (["--data.path", "nan.csv", "--data.target", "b"], "not a finite number"),
        (["--data.path", "one.csv", "--data.target", "b", "--model", "softmax"], "one value only"),
        (["--data.path", "numbers.csv", "--data.target", "price", "--model", "guess"], "--model takes linear"),
        (["--data.path", "numbers.csv", "--data.target", "price", "--model", "no.such:thing"], "cannot be loaded"),
        (["--data.path", "numbers.csv", "--data.target", "price", "--gates.group", "filter"], "needs a module with layers"),
        (["--data.path", "numbers.csv", "--data.target", "price", "--start", "numbers.csv"], "cannot be read as safetensors"),
        (["--data.path", "rows.npz", "--data.target", "kind", "--model", "linear"], "holds words"),
    ],
)
def test_rows_that_cannot_be_used_are_refused_in_one_line(words, text, capsys, tmp_path):
    (tmp_path / "bad.csv").write_text("a,b\n1,2\n1,2,3\n")
    (tmp_path / "nan.csv").write_text("a,b\n1,2\nnan,3\n2,2\n3,1\n")
    (tmp_path / "one.csv").write_text("a,b\n1,2\n2,2\n3,2\n")
    assert main(["train", "--task", "file", "--quiet", "--density", "0.5", *words]) == 2
    said = capsys.readouterr().err
    assert text in said and said.count("\n") == 1


def test_a_model_for_another_task_is_refused(capsys):
    assert main(["train", "--task", "lr", "--model", "softmax", "--quiet"]) == 2
    assert "belongs to task file" in capsys.readouterr().err
