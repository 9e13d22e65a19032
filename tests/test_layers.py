"""The house's walls: who may import whom, and what the command line may not wait for."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "fedsieve"
MAY_IMPORT = {
    "core": {"core", "passes", "image_passes", "sparse_passes"},
    "passes": set(),
    "image_passes": {"passes"},
    "sparse_passes": {"passes"},
    "algorithms": {"core", "algorithms"},
    "objectives": {"core", "objectives"},
    "metrics": {"core"},
    "data": {"core", "data"},
    "train": {"core"},
    "failures": {"core"},
    "privacy": {"core"},
    "wire": {"core"},
    "durable": set(),
    "checkpoint": {"core", "durable"},
    "engines": {"core", "train", "wire", "engines"},
}
OUTSIDE = {
    "core": {"torch", "numpy", "jaxtyping"},
    "passes": {"numba", "numpy"},
    "image_passes": {"numba"},
    "sparse_passes": {"numba", "numpy"},
    "algorithms": {"torch", "jaxtyping"},
    "train": {"torch"},
    "wire": {"torch", "numpy"},
    "durable": set(),
    "checkpoint": {"torch", "numpy", "safetensors"},
    "engines": {"torch", "numpy", "flwr"},
}


def modules(part):
    path = SOURCE / part
    return sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]


def imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"fedsieve.{alias.name}" for alias in node.names) if node.module == "fedsieve" else (node.module,)


@pytest.mark.parametrize("part", MAY_IMPORT)
def test_imports_point_inwards(part):
    for path in modules(part):
        inside = {name.split(".")[1] for name in imported(path) if name.startswith("fedsieve.")}
        assert inside <= MAY_IMPORT[part], path


@pytest.mark.parametrize("part", OUTSIDE)
def test_the_inner_layers_need_little_from_outside(part):
    for path in modules(part):
        outside = {name.split(".")[0] for name in imported(path)} - {"fedsieve"} - set(sys.stdlib_module_names)
        assert outside <= OUTSIDE[part], path


def test_one_file_alone_imports_flwr():
    importing = [path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py") if any(n.startswith("flwr") for n in imported(path))]
    apps = [path for path in importing if path.startswith("template/")]  # what a user owns
    assert sorted(set(importing) - set(apps)) == ["engines/flower.py"]


def test_a_flower_client_loads_torch_numpy_and_flwr_and_no_more_of_ours():
    """An edge device has no plotting, no scikit-learn, no report, no command line."""
    app = SOURCE / "template"
    code = f"import sys; sys.path.insert(0, {str(app)!r}); import app.client_app; print(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {name.split(".")[0] for name in done.stdout.split()}
    assert not loaded & {"matplotlib", "sklearn", "scipy", "cyclopts", "safetensors", "pandas", "ray"}
    assert {name for name in done.stdout.split() if name.startswith("fedsieve.")} >= {"fedsieve.engines.flower", "fedsieve.engines.loop"}
    assert not [name for name in done.stdout.split() if name.startswith(("fedsieve.report", "fedsieve.experiments", "fedsieve.data"))]


def test_the_report_reads_the_store_and_nothing_else():
    for path in modules("report"):
        inside = {name for name in imported(path) if name.startswith("fedsieve.") and not name.startswith("fedsieve.report")}
        assert inside <= {
            "fedsieve.experiments",
            "fedsieve.experiments.results",
            "fedsieve.model",
            "fedsieve.show",
            "fedsieve.options",
        }, path
        assert "torch" not in set(imported(path))


def test_the_store_needs_no_torch():
    assert not {"torch", "fedsieve.core"} & set(imported(SOURCE / "experiments" / "store.py"))


@pytest.mark.parametrize("forbidden", ["manual_seed", "logging", "print(", "time.", "open("])
def test_the_core_has_no_files_no_clock_no_global_random_state(forbidden):
    for part in ("core", "algorithms"):
        for path in modules(part):
            assert forbidden not in path.read_text(), path


@pytest.mark.parametrize("words", ["['--help']", "[]", "['--version']"])
def test_help_answers_without_torch(words):
    code = f"import sys; from fedsieve.cli import main; sys.exit(main({words}) or ('torch' in sys.modules) * 9)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_help_imports_no_numpy():
    """It would take a quarter of the time help takes."""
    code = "import sys; from fedsieve.cli import main; main(['--help']); sys.exit(('numpy' in sys.modules) * 9)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
