"""Import directions between the folders, and what may not be imported at start-up."""

import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "fedsieve"
FOLDERS = (
    "kernels",
    "core",
    "objectives",
    "algorithms",
    "wire",
    "runtime",
    "storage",
    "data",
    "models",
    "experiments",
    "studies",
    "report",
    "deployment",
    "flower",
    "cli",
)
"""The folders in the order of the architecture: a folder imports itself and the folders before it."""
WITHOUT_IMPORTS = {"formatting", "optional", "__version__"}
"""Modules of the package root that import nothing of the package, so that every layer may use them."""
OUTSIDE = {
    "kernels": {"numba", "numpy", "torch", "jaxtyping"},
    "core": {"torch", "numpy", "jaxtyping"},
    "algorithms": {"torch", "jaxtyping"},
    "wire": {"torch", "numpy"},
    "storage": {"torch", "numpy", "safetensors"},
}

SHARED_NAMES = {
    "ablation": "a study and its figures",
    "compare": "the comparison over seeds and its command",
    "equal_bytes": "a study and its figures",
    "flower": "deployments on Flower and their command",
    "gossip": "rounds without a server and what a node does in them",
    "linear": "linear models and their kernels",
    "paper": "the paper: its study, its figures and its numbers",
    "published_tables": "tables of others: the study, its figures and the published numbers",
    "rivals": "a study and its figures",
    "robustness": "a study and its figures",
    "topologies": "a study and its figures",
}
"""Names that several modules have, and the subject that these modules share."""


def modules(part):
    path = SOURCE / part
    return sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]


def imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            for alias in node.names:
                inside = SOURCE.parent / node.module.replace(".", "/") / alias.name
                is_module = inside.is_dir() or inside.with_suffix(".py").exists()
                yield f"{node.module}.{alias.name}" if is_module or node.module == "fedsieve" else node.module


@pytest.mark.parametrize("part", FOLDERS)
def test_imports_point_downwards(part):
    allowed = {*FOLDERS[: FOLDERS.index(part) + 1]} | WITHOUT_IMPORTS
    for path in modules(part):
        inside = {name.split(".")[1] for name in imported(path) if name.startswith("fedsieve.")}
        assert inside <= allowed, path


@pytest.mark.parametrize("part", sorted(WITHOUT_IMPORTS - {"__version__"}))
def test_modules_that_every_layer_uses_import_nothing_of_the_package(part):
    assert not [name for name in imported(SOURCE / f"{part}.py") if name.startswith("fedsieve")]


def test_every_folder_has_a_layer_and_the_root_at_most_six_modules():
    assert {path.name for path in SOURCE.iterdir() if path.is_dir() and path.name != "__pycache__"} == set(FOLDERS)
    assert len(list(SOURCE.glob("*.py"))) <= 6


def test_only_modules_on_one_subject_share_a_name():
    names = Counter(path.name for path in SOURCE.rglob("*.py") if path.name != "__init__.py")
    assert {name.removesuffix(".py") for name, count in names.items() if count > 1} == set(SHARED_NAMES)


def test_no_two_modules_import_each_other():
    """Imports inside functions count too: a cycle stays a cycle."""
    graph = {}
    for path in SOURCE.rglob("*.py"):
        if "template" in path.parts:
            continue
        name = "fedsieve." + ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")
        graph[name] = set(imported(path))
    names = set(graph)
    edges = {name: {target for target in targets if target in names and target != name} for name, targets in graph.items()}
    finished = set()

    def visit(name, path):
        assert name not in path, [*path, name]
        if name not in finished:
            for target in edges[name]:
                visit(target, [*path, name])
            finished.add(name)

    for name in names:
        visit(name, [])


@pytest.mark.parametrize("part", OUTSIDE)
def test_inner_layers_import_few_packages(part):
    for path in modules(part):
        outside = {name.split(".")[0] for name in imported(path)} - {"fedsieve"} - set(sys.stdlib_module_names)
        assert outside <= OUTSIDE[part], path


def test_only_five_files_and_the_drop_in_import_flwr():
    importing = [path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py") if any(n.startswith("flwr") for n in imported(path))]
    apps = [path for path in importing if "template/" in path]  # belongs to the user
    assert [path for path in sorted(set(importing) - set(apps)) if not path.startswith("flower/")] == [
        "deployment/flower.py",
        "deployment/flower_messages.py",
        "deployment/node_directory.py",
        "deployment/superexec.py",
        "deployment/superlink.py",
    ]


LEAN_CLIENTS = {
    "import app.client_app": {"fedsieve.deployment.flower", "fedsieve.runtime.loop"},
    "from fedsieve.flower import sparse_mod": {"fedsieve.flower.mod"},
}
"""What a Flower client imports, and modules that this must load."""


@pytest.mark.parametrize("statement", LEAN_CLIENTS)
def test_a_flower_client_imports_only_torch_numpy_and_flwr(statement):
    """An edge device has no plotting, no scikit-learn, no report, no command line."""
    app = SOURCE / "deployment" / "template"
    code = f"import sys; sys.path.insert(0, {str(app)!r}); {statement}; print(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {name.split(".")[0] for name in done.stdout.split()}
    assert not loaded & {"matplotlib", "sklearn", "scipy", "cyclopts", "safetensors", "pandas", "ray"}
    assert {name for name in done.stdout.split() if name.startswith("fedsieve.")} >= LEAN_CLIENTS[statement]
    assert not [name for name in done.stdout.split() if name.startswith(("fedsieve.report", "fedsieve.experiments", "fedsieve.data"))]


def test_the_report_imports_only_readers_of_stored_results():
    for path in modules("report"):
        inside = {name for name in imported(path) if name.startswith("fedsieve.") and not name.startswith("fedsieve.report")}
        assert inside <= {
            "fedsieve.storage.archives",
            "fedsieve.storage.run_directory",
            "fedsieve.studies.results",
            "fedsieve.studies.scale",
            "fedsieve.models.sparse_model",
            "fedsieve.formatting",
        }, path
        assert "torch" not in set(imported(path))


def test_the_run_directory_needs_no_torch():
    assert not {"torch", "fedsieve.core"} & set(imported(SOURCE / "storage" / "run_directory.py"))


@pytest.mark.parametrize("forbidden", ["manual_seed", "logging", "print(", "time.", "open("])
def test_the_core_has_no_files_no_clock_no_global_random_state(forbidden):
    for part in ("core", "algorithms"):
        for path in modules(part):
            assert forbidden not in path.read_text(), path


@pytest.mark.parametrize("argv", ["['--help']", "[]", "['--version']"])
def test_help_imports_no_torch(argv):
    code = f"import sys; from fedsieve.cli.main import main; sys.exit(main({argv}) or ('torch' in sys.modules) * 9)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_help_imports_no_numpy():
    """Importing numpy would take a quarter of the time of `--help`."""
    code = "import sys; from fedsieve.cli.main import main; main(['--help']); sys.exit(('numpy' in sys.modules) * 9)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
