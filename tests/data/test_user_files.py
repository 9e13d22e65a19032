"""Data files, modules and initial weights of a user, through the command line."""

import io
import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from fedsieve import RunConfig, Simulation, run_rounds
from fedsieve.cli.main import main
from fedsieve.core.types import Traffic
from fedsieve.data.user_files import UserFiles
from fedsieve.experiments.config import FederationConfig
from fedsieve.experiments.resolve import resolve
from fedsieve.runtime.privacy import Privacy

RNG = np.random.default_rng(3)
X = RNG.standard_normal((240, 12)).astype(np.float32)
TRUE = np.zeros(12, np.float32)
TRUE[[1, 4, 9]] = [2, -3, 1.5]
Y = X @ TRUE + 5 + 0.1 * RNG.standard_normal(240).astype(np.float32)
KINDS = np.array(["low", "mid", "high"])[np.digitize(Y, [4, 6])]
SITES = np.array([f"site {i % 4}" for i in range(240)])


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.savez("rows.npz", x=X, y=Y, kind=KINDS, site=SITES)
    lines = [",".join([*(f"f{j}" for j in range(12)), "price", "kind", "site"])]
    lines += [",".join([*map(str, x), str(y), k, s]) for x, y, k, s in zip(X, Y, KINDS, SITES, strict=True)]
    (tmp_path / "rows.csv").write_text("\n".join(lines) + "\n")
    numbers = [line.split(",") for line in lines]
    (tmp_path / "numbers.csv").write_text("\n".join(",".join(parts[:13]) for parts in numbers) + "\n")
    (tmp_path / "rows.svm").write_text(
        "\n".join(f"{int(y > 5)} " + " ".join(f"{j + 1}:{v}" for j, v in enumerate(x)) for x, y in zip(X, Y, strict=True))
    )
    (tmp_path / "many.svm").write_text(
        "\n".join(f"{'0,2' if y > 5 else '1'} " + " ".join(f"{j + 1}:{v}" for j, v in enumerate(x)) for x, y in zip(X, Y, strict=True))
    )


def train(capsys, *options, algorithm="fed-round-ht", rounds=10):
    rounds = min(rounds, 3) if algorithm == "flops" else rounds  # it exchanges every batch
    code = main(["train", "--task", "file", "--algorithm", algorithm, "--rounds", str(rounds), "--json", "--quiet", *options])
    output = capsys.readouterr()
    assert code == 0, output.err
    return json.loads(output.out.splitlines()[-1])


@pytest.mark.parametrize("algorithm", ["fed-round-ht", "flops-pa", "flops", "fed-iter-ht", "fed-l1", "gradual"])
def test_regression_fits_an_intercept_not_counted_in_the_density(capsys, algorithm):
    result = train(
        capsys,
        "--data.path",
        "numbers.csv",
        "--data.target",
        "price",
        "--density",
        "0.25",
        "--federation.clients",
        "4",
        algorithm=algorithm,
    )
    assert result["nonzero"] == 3 and result["size"] == 12
    assert result["value"] > 0.9


def test_without_an_intercept_an_offset_cannot_be_fitted(capsys):
    options = ["--data.path", "numbers.csv", "--data.target", "price", "--density", "0.25", "--federation.clients", "4"]
    assert train(capsys, *options, "--data.no-intercept")["value"] < 0.5


def test_classes_may_be_options_and_clients_may_be_named(capsys):
    result = train(capsys, "--data.path", "rows.npz", "--data.target", "kind", "--data.client", "site", "--density", "0.25")
    assert result["metric"] == "accuracy" and result["value"] > 0.8
    assert result["size"] == 36 and result["nonzero"] == 9


def test_two_classes_have_one_logit_and_small_cohorts_are_complete(capsys):
    np.savez("two.npz", x=X, y=np.where(Y > 5, "high", "low"), site=SITES)
    result = train(capsys, "--data.path", "two.npz", "--data.client", "site", "--density", "0.25")
    assert result["size"] == 12 and result["nonzero"] == 3 and result["value"] > 0.9
    assert result["asked"] == 4 * result["rounds"]
    assert sorted(result["features"]) == ["x1", "x4", "x9"]
    assert file_run("two.npz").federation.participation == 10 / 12  # 240 rows, 20 a client


def file_run(path, **settings):
    return resolve(
        RunConfig(
            task="file", data=UserFiles(path=Path(path)), **{"density": 0.25, "rounds": 5, "algorithm_name": "fed-round-ht"} | settings
        )
    )


def test_standardization_uses_training_examples_and_counts_its_bytes(monkeypatch):
    simulation = Simulation(file_run("rows.npz"))
    np.testing.assert_allclose(simulation.standardizer.features.mean, simulation.dataset.x.mean(0, dtype=float), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(simulation.standardizer.target.scale, simulation.dataset.y.std(dtype=float), rtol=1e-5)
    num_bytes = 4 * 2 * (12 + 1) * len(simulation.population.clients_with_data)
    counted = [step.metrics for step in run_rounds(simulation.run, simulation)]
    monkeypatch.setattr(Simulation, "standardization_traffic", Traffic(0, 0, 0))
    without = [step.metrics for step in run_rounds(simulation.run, simulation)]
    for name in ("bytes_up", "bytes_down"):
        assert [one[name] - other[name] for one, other in zip(counted, without, strict=True)] == [num_bytes, 0, 0, 0, 0]


def test_the_units_of_a_file_do_not_change_the_model(capsys):
    offset, scale = RNG.normal(0, 9, 12), np.exp2(RNG.integers(-8, 9, 12))
    np.savez("units.npz", x=X * scale + offset, y=1000 * Y - 70)
    plain, other = (Simulation(run).build_model(last(run).parameters) for run in (file_run("rows.npz"), file_run("units.npz")))
    np.testing.assert_array_equal(plain.coef.indices, other.coef.indices)
    np.testing.assert_allclose(other.coef.toarray(), 1000 * plain.coef.toarray() / scale, rtol=1e-3)
    np.testing.assert_allclose(other.predict(X * scale + offset), 1000 * plain.predict(X) - 70, rtol=1e-3, atol=10)
    assert last(file_run("units.npz")).metrics["mse"] == pytest.approx(1e6 * last(file_run("rows.npz")).metrics["mse"], rel=1e-2)


def last(run):
    return list(run_rounds(run))[-1]


def test_standardizing_parameters_inverts_the_conversion_to_original():
    run = file_run("rows.npz")
    simulation, parameters = Simulation(run), last(run).parameters
    torch.testing.assert_close(simulation.to_standardized(simulation.to_original(parameters)), parameters, rtol=1e-4, atol=1e-6)


def test_private_clients_never_send_means_without_noise():
    private = {
        "privacy": Privacy(noise_multiplier=1.0),
        "algorithm_name": "fed-avg",
        "federation": FederationConfig(clients=20, participation=0.5),
    }
    assert Simulation(file_run("rows.npz", **private)).standardizer is None
    with pytest.raises(ValueError, match=r"without noise, which privacy.noise-multiplier forbids"):
        resolve(RunConfig(task="file", data=UserFiles(path=Path("rows.npz"), standardize=True), density=0.25, **private))
    with pytest.raises(ValueError, match="applies to linear models"):
        resolve(RunConfig(task="file", data=UserFiles(path=Path("rows.npz"), target="kind", standardize=True), model="torch.nn:Identity"))


def test_integer_targets_that_may_be_classes_cause_a_note(tmp_path):
    lines = ["a,b,y", *(f"{a},{b},{int(a > b)}" for a, b in X[:, :2])]
    (tmp_path / "zero-one.csv").write_text("\n".join(lines))
    assert "for classes use --model logistic" in Simulation(file_run("zero-one.csv", density=0.5)).dataset.note
    assert Simulation(file_run("zero-one.csv", density=0.5, model="linear")).dataset.note is None
    assert Simulation(file_run("rows.npz")).dataset.note is None


def test_svmlight_examples_may_have_several_labels(capsys):
    one = train(capsys, "--data.path", "rows.svm", "--model", "softmax", "--density", "0.25", "--federation.clients", "4", rounds=5)
    assert one["size"] == 24 and one["value"] > 0.8
    many = train(capsys, "--data.path", "many.svm", "--density", "0.25", "--federation.clients", "4", rounds=5)
    assert many["metric"] == "micro_f1" and many["size"] == 36 and many["value"] > 0.8


def test_selected_features_are_listed_by_name(capsys):
    options = [
        "--data.path",
        "rows.npz",
        "--data.target",
        "kind",
        "--data.client",
        "site",
        "--gate-granularity",
        "feature",
        "--density",
        "0.25",
    ]
    result = train(capsys, *options)
    assert sorted(result["features"]) == ["x1", "x4", "x9"]
    assert result["nonzero"] == 9


@pytest.mark.parametrize("algorithm", ["flops-pa", "flops", "fed-iter-ht", "random-mask"])
def test_every_algorithm_keeps_or_drops_whole_groups(capsys, algorithm):
    options = [
        "--data.path",
        "rows.npz",
        "--data.target",
        "kind",
        "--data.client",
        "site",
        "--gate-granularity",
        "feature",
        "--density",
        "0.2",
    ]
    result = train(capsys, *options, algorithm=algorithm, rounds=3)
    assert result["nonzero"] == 6 and len(result["features"]) == 2  # 7 weights asked for, groups of 3


def test_examples_keep_their_shape_for_a_module(capsys, tmp_path):
    np.savez("images.npz", x=X.reshape(240, 1, 3, 4), y=KINDS)
    (tmp_path / "images.py").write_text(
        "from torch import nn\ndef net():\n    return nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Flatten(), nn.Linear(24, 3))\n"
    )
    options = ["--data.path", "images.npz", "--model", "images:net", "--density", "0.5"]
    train(capsys, *options, "--out", "images", rounds=1)
    assert main(["predict", "images", "images.npz", "--target", "y", "--trust"]) == 0
    assert capsys.readouterr().out.count("\n") == 241
    np.savez("images.npz", x=X, y=KINDS)
    assert main(["train", "--task", "file", "--quiet", *options]) == 2
    assert "images:net cannot take rows of 12 numbers: " in capsys.readouterr().err


def test_a_module_of_ones_own_is_train(capsys, tmp_path):
    (tmp_path / "nets.py").write_text(
        "from torch import nn\ndef net():\n    return nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 3))\n"
    )
    options = ["--data.path", "rows.npz", "--data.target", "kind", "--data.client", "site", "--model", "nets:net", "--density", "0.3"]
    result = train(capsys, *options)
    assert result["size"] == 12 * 16 + 16 + 16 * 3 + 3 and result["value"] > 0.7
    grouped = train(capsys, *options, "--gate-granularity", "neuron", rounds=1)
    assert grouped["nonzero"] <= result["nonzero"]


@pytest.mark.parametrize("algorithm", ["flops-pa", "flops", "fed-iter-ht", "fed-avg", "gradual", "random-mask"])
def test_groups_of_unequal_size_share_one_global_budget(capsys, tmp_path, algorithm):
    (tmp_path / "nets.py").write_text(
        "from torch import nn\ndef net():\n    return nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 3))\n"
    )
    options = ["--data.path", "rows.npz", "--data.target", "kind", "--data.client", "site", "--model", "nets:net", "--density", "0.3"]
    result = train(
        capsys, *options, "--gate-granularity", "neuron", "--algorithm.sparsity-allocation", "global", algorithm=algorithm, rounds=1
    )
    allowed = int(0.3 * (12 * 16 + 16 + 16 * 3 + 3))
    assert allowed - 12 < result["nonzero"] <= allowed  # neurons of 12 and 16 weights, biases alone


def test_initial_weights_come_from_a_model_or_from_named_tensors(capsys):
    options = ["--data.path", "numbers.csv", "--data.target", "price", "--density", "0.25", "--federation.clients", "4"]
    once = [
        "train",
        "--task",
        "file",
        "--algorithm",
        "fed-round-ht",
        "--no-refit",
        "--quiet",
        "--json",
        "--rounds",
        "1",
        "--algorithm.local-steps",
        "1",
        *options,
    ]

    def value(*more):
        assert main([*once, *more]) == 0
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    train(capsys, *options, "--out", "first")
    warm, cold = value("--init-weights", "first/model.safetensors"), value()
    assert warm["value"] > cold["value"]
    assert warm["bytes_down"] > cold["bytes_down"]  # weights were sent, not a seed
    save_file({"weights": torch.from_numpy(TRUE)[None], "intercept": torch.full((1,), 5.0)}, "named.safetensors")
    assert value("--init-weights", "named.safetensors")["value"] > 0.99
    save_file({"weights": torch.zeros(3, 12), "intercept": torch.ones(1)}, "wrong.safetensors")
    assert main([*once, "--init-weights", "wrong.safetensors"]) == 2
    assert "has shape (3, 12)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ([], "needs --data.path"),
        (["--data.path", "nowhere.csv"], "is not a file"),
        (["--data.path", "rows.txt"], "is not a file"),
        (["--data.path", "rows.csv", "--data.target", "prise"], "did you mean price?"),
        (
            ["--data.path", "rows.csv", "--data.target", "price"],
            "column kind is 'high', not a number; replace it, or remove the column; if it",
        ),
        (["--data.path", "rows.csv", "--data.target", "zzz"], "there are f0, f1, f2, f3, f4, f5, ..., site"),
        (["--data.path", "bad.csv", "--data.target", "b"], "line 3: 3 columns, the header has 2"),
        (["--data.path", "nan.csv", "--data.target", "b"], "not a finite number"),
        (["--data.path", "one.csv", "--data.target", "b", "--model", "softmax"], "only one value"),
        (["--data.path", "numbers.csv", "--data.target", "price", "--model", "guess"], "--model takes linear"),
        (["--data.path", "numbers.csv", "--data.target", "price", "--model", "no.such:thing"], "cannot be loaded"),
        (["--data.path", "numbers.csv", "--data.target", "price", "--gate-granularity", "filter"], "needs a module with layers"),
        (["--data.path", "numbers.csv", "--data.target", "price", "--init-weights", "numbers.csv"], "cannot be read as safetensors"),
        (["--data.path", "rows.npz", "--data.target", "kind", "--model", "linear"], "holds words"),
    ],
)
def test_unusable_files_are_one_line_and_exit_code_two(options, text, capsys, tmp_path):
    (tmp_path / "bad.csv").write_text("a,b\n1,2\n1,2,3\n")
    (tmp_path / "nan.csv").write_text("a,b\n1,2\nnan,3\n2,2\n3,1\n")
    (tmp_path / "one.csv").write_text("a,b\n1,2\n2,2\n3,2\n")
    assert main(["train", "--task", "file", "--quiet", "--density", "0.5", *options]) == 2
    error = capsys.readouterr().err
    assert text in error and error.count("\n") == 1


ARRAYS = {"x": X, "y": Y, "site": SITES}


def with_value(array, index, value):
    array = array.astype(np.float64)
    array[index] = value
    return array


@pytest.mark.parametrize(
    ("arrays", "text"),
    [
        ({"x": with_value(X, (3, 2), np.nan)}, "row 4: feature x2 is nan, not a finite number"),
        ({"x": with_value(X, (0, 11), -np.inf)}, "row 1: feature x11 is -inf"),
        ({"x": with_value(X, (5, 0), 1e300)}, "row 6: feature x0 is inf, not a finite number in single precision"),
        ({"y": with_value(Y, 7, np.nan)}, "row 8: the target is not a finite number"),
        ({"y": with_value(Y, 7, 1e300)}, "row 8: the target is not a finite number"),
        ({"x": X + 1j}, "array x is complex64 of shape (240, 12); use real numbers"),
        ({"x": X.astype(str)}, "use real numbers"),
        ({"x": np.float32(1)}, "array x is float32 of shape ()"),
        ({"x": np.zeros(240, dtype=[("a", "f4")])}, "use real numbers"),
        ({"x": np.zeros((240, 0))}, "has 240 examples and 0 features"),
        ({"x": np.zeros((0, 3))}, "has 0 examples and 3 features"),
        ({"x": np.zeros((240, 3), object)}, "array x holds Python objects"),
        ({"y": np.float32(1)}, "the target is float32 of shape ()"),
        ({"y": Y + 1j}, "the target is complex64"),
        ({"y": np.zeros(240, "M8[D]")}, "the target is datetime64[D]"),
        ({"y": Y[:7]}, "240 examples but 7 targets"),
        ({"y": np.stack([Y, Y], 1)}, "needs 0 or 1 for each label"),
        ({"site": SITES[:9]}, "240 examples but data.client has the shape (9,)"),
        ({"site": np.stack([SITES, SITES], 1)}, "data.client has the shape (240, 2)"),
        ({"site": with_value(np.zeros(240), 4, np.nan)}, "row 5: data.client is empty"),
        ({"site": np.where(np.arange(240) == 2, " ", SITES)}, "row 3: data.client is empty"),
        ({"site": np.zeros(240, complex)}, "data.client holds complex128"),
    ],
)
def test_invalid_arrays_are_one_line_and_exit_code_two(arrays, text, capsys):
    np.savez("bad.npz", **(ARRAYS | arrays))
    assert main(["train", "--task", "file", "--quiet", "--data.path", "bad.npz", "--data.client", "site"]) == 2
    error = capsys.readouterr().err
    assert text in error and error.count("\n") == 1


@pytest.mark.parametrize("ending", ["npz", "csv", "svm"])
@pytest.mark.parametrize("harm", [lambda data: b"", lambda data: data[: len(data) // 2 - 1], lambda data: b"\xff\xfe" + data[2:]])
def test_a_damaged_file_is_one_line_and_exit_code_two(ending, harm, capsys, tmp_path):
    path = tmp_path / f"rows.{ending}"
    path.write_bytes(harm(path.read_bytes()))
    options = [] if ending != "csv" else ["--data.target", "kind", "--data.client", "site"]
    assert main(["train", "--task", "file", "--quiet", "--data.path", path.name, *options]) == 2
    error = capsys.readouterr().err
    assert f"rows.{ending}" in error and error.count("\n") == 1 and "pickle" not in error


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("a.csv", "a,a,y\n1,2,3\n", "two columns have the name a"),
        ("a.csv", "a,site,y\n1,,3\n", "row 1: data.client is empty"),
        ("a.svm", "1 1:1\n0 2:nan\n", "row 2: feature x2 is nan"),
        ("a.svm", "1 1:1\n0 2000000000:1\n", "a feature with the id 2000000000"),
        ("a.svm", "1 1:1\n0 99999999999999:1\n", "cannot be read as .svm"),
        ("a.svm", "1,nan 1:1\n0 2:1\n", "a label that is not a finite number"),
        ("a.svm", "inf 1:1\n0 2:1\n", "row 1: the target is not a finite number"),
    ],
)
def test_the_error_names_the_invalid_entry(name, content, text, capsys, tmp_path):
    (tmp_path / name).write_text(content)
    options = ["--data.client", "site"] if "site" in content else []
    assert main(["train", "--task", "file", "--quiet", "--data.path", name, *options]) == 2
    error = capsys.readouterr().err
    assert text in error and error.count("\n") == 1


@pytest.mark.parametrize("name", ["x", "y", "site"])
def test_an_archive_member_that_is_not_an_array_is_an_error(name, tmp_path, capsys):
    with zipfile.ZipFile("odd.npz", "w") as archive:
        for member, array in ARRAYS.items():
            content = io.BytesIO()
            np.save(content, array)
            archive.writestr(f"{member}.npy", b"nonsense" if member == name else content.getvalue())
    assert main(["train", "--task", "file", "--quiet", "--data.path", "odd.npz", "--data.client", "site"]) == 2
    assert f"odd.npz: {name} is damaged" in capsys.readouterr().err


def test_a_file_that_changed_is_read_again(tmp_path):
    from fedsieve.data.user_files import read_table

    path = tmp_path / "a.csv"
    path.write_text("a,y\n1,2\n3,4\n")
    first = read_table(path, "y", None)
    assert read_table(path, "y", None) is first
    path.write_text("a,y\n1,2\n3,4\n5,6\n")
    assert len(read_table(path, "y", None).y) == 3


def test_unusual_clients_cause_a_note_but_no_error(capsys):
    sites = np.where(np.arange(240) == 0, "Site 1 ", SITES)
    kinds = np.where(SITES == "site 2", "low", KINDS)
    np.savez("odd.npz", x=X, kind=kinds, site=sites)
    options = ["--data.path", "odd.npz", "--data.target", "kind", "--data.client", "site", "--density", "0.25"]
    results = (train(capsys, *options, "--seed", str(seed), rounds=1) for seed in range(9))
    note = next(result["note"] for result in results if "no training" in result["note"])
    assert "1 client has no training examples: 'Site 1 '" in note
    assert "1 client has examples of only one class: 'site 2'" in note
    assert "2 clients have a name that differs from another only in case or spaces: 'Site 1 ', 'site 1'" in note


def test_a_model_option_for_a_built_in_task_is_an_error(capsys):
    assert main(["train", "--task", "lr", "--model", "softmax", "--quiet"]) == 2
    assert "belongs to task file" in capsys.readouterr().err
