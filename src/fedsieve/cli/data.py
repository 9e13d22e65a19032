"""The command `fedsieve data`: list, show, fetch and check the data sets. Only `show` imports torch."""

from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from cyclopts import App
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn
from rich.table import Table

from fedsieve.data import rcv1
from fedsieve.data.cifar10 import BINARY_FILES, PYTHON_FILES, SHEET_FILES
from fedsieve.data.downloads import DataError, DataFile, checksum_ok, default_folder, fetch, find_file
from fedsieve.data.federated_dataset import label_counts
from fedsieve.data.heart import HEART_FILES
from fedsieve.data.mnist import EMNIST_FILES, MNIST_FILES, QMNIST_FILES
from fedsieve.formatting import PlainConsole

if TYPE_CHECKING:
    import numpy as np

DATASET_FILES: dict[str, tuple[DataFile, ...]] = {
    "digits": (),
    "mnist": MNIST_FILES,
    "mnist-cnn": MNIST_FILES,
    "mnist-writers": (*MNIST_FILES, *QMNIST_FILES),
    "emnist": EMNIST_FILES,
    "rcv1": rcv1.TRAIN_TEST_FILES[0],
    "heart": HEART_FILES,
    "cifar10": SHEET_FILES,
    "cifar10-cnn": SHEET_FILES,
    "fed-ht-mnist": MNIST_FILES,
    "fedml-mnist": MNIST_FILES,
    "heterofl-mnist": MNIST_FILES,
}
EQUIVALENT_FILES: dict[str, tuple[tuple[DataFile, ...], ...]] = dict.fromkeys(("cifar10", "cifar10-cnn"), (PYTHON_FILES, BINARY_FILES))
"""Other files with the same examples."""
ALTERNATIVE_FILES = {"emnist": EMNIST_FILES[2:], "rcv1": rcv1.TRAIN_TEST_FILES[1]}
"""Files that are used if the complete data set is missing."""
GENERATED_TASKS = ("lr", "lg", "mc", "fed-ht-linear", "fed-ht-logistic")
RealTask = Literal[*DATASET_FILES]
AnyTask = Literal[*GENERATED_TASKS, *DATASET_FILES]


def data_app() -> App:
    """The app with the four commands."""
    app = App(name="data", help="List, show, fetch and check the data sets.", result_action="return_value")
    for command in (list_, show, fetch_, check):
        app.command(command, name=command.__name__.strip("_"))
    return app


def availability(task: str, folder: Path | None) -> str:
    """Whether the files of a task are present, as text."""
    if not DATASET_FILES[task]:
        return "part of scikit-learn"
    if any(_has_all_files(files, folder) for files in (DATASET_FILES[task], *EQUIVALENT_FILES.get(task, ()))):
        return "found"
    if task == "rcv1" and rcv1.has_sklearn_cache(folder or default_folder()):
        return "found"
    if task in ALTERNATIVE_FILES and _has_all_files(ALTERNATIVE_FILES[task], folder):
        return "found in part: the test files" if task == "emnist" else "found in part: a sample"
    return f"missing; fedsieve data fetch {task}"


def _has_all_files(files: tuple[DataFile, ...], folder: Path | None) -> bool:
    try:
        return all(find_file(folder, data_file) for data_file in files)
    except DataError:
        return False


def list_(*, path: Path | None = None) -> int:
    """List the tasks and whether their files are present.

    Parameters
    ----------
    path
        folder of the files (default: FEDSIEVE_DATA, or ~/.cache/fedsieve if it is not set)
    """
    table = Table("task", "data", title=f"data folder {path or default_folder()}", title_justify="left")
    for task in GENERATED_TASKS:
        table.add_row(task, "generated")
    for task in DATASET_FILES:
        table.add_row(task, availability(task, path))
    PlainConsole().print(table)
    return 0


def fetch_(task: RealTask, *, path: Path | None = None) -> int:  # pyright: ignore[reportInvalidTypeForm]  # its names are known only at run time
    """Download the files of a task and verify their checksums.

    Parameters
    ----------
    task
        the task
    path
        folder to write to (default: FEDSIEVE_DATA, or ~/.cache/fedsieve if it is not set)
    """
    folder = path or default_folder()
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn())
    missing: dict[str, list[DataFile]] = {}
    if task == "rcv1" and availability(task, folder) != "found":
        rcv1.download(folder)
        print(f"{task}: in scikit-learn's cache in {folder}")
        return 0
    for data_file in DATASET_FILES[task]:
        if _has_all_files((data_file,), folder):
            print(f"{data_file.name}: already present")
        else:
            missing.setdefault(data_file.url, []).append(data_file)
    for url, files in missing.items():
        with Progress(*columns, console=PlainConsole(stderr=True)) as bar:
            job = bar.add_task(url.rpartition("/")[2], total=None)
            targets = fetch(files, folder, lambda done, total, job=job, bar=bar: bar.update(job, completed=done, total=total or None))
        for data_file, target in zip(files, targets, strict=True):
            print(f"{data_file.name}: {target}")
    if not DATASET_FILES[task]:
        print(f"{task} is part of scikit-learn; there is nothing to download")
    return 0


def check(folder: Path) -> int:
    """Verify the checksums of all data files in a folder. The exit code is 1 if a file is damaged.

    Parameters
    ----------
    folder
        folder of the files
    """
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder")
    table = Table("file", "state", title=str(folder), title_justify="left")
    num_files = num_damaged = 0
    for data_file in dict.fromkeys((*chain(*DATASET_FILES.values()), *rcv1.TRAIN_TEST_FILES[1], *PYTHON_FILES, *BINARY_FILES)):
        try:
            path = find_file(folder, data_file)
        except DataError:
            continue
        num_files += 1
        is_valid = checksum_ok(path, data_file) if data_file.sha256 else None
        num_damaged += is_valid is False
        table.add_row(path.name, {True: "checksum matches", False: "DAMAGED or another file", None: "no known checksum"}[is_valid])
    if not num_files:
        raise DataError(f"{folder} has none of the known data files; `fedsieve data list` shows the data sets")
    PlainConsole().print(table)
    return 1 if num_damaged else 0


def show(
    task: AnyTask,  # pyright: ignore[reportInvalidTypeForm]  # its names are known only at run time
    *,
    path: Path | None = None,
    clients: int | None = None,
    alpha: float = 0.5,
    seed: int = 0,
    out: Path | None = None,
) -> int:
    """Show how the examples and labels of a task are distributed over clients, as a table and a picture.

    Parameters
    ----------
    task
        the task
    path
        folder of the files (default: FEDSIEVE_DATA, or ~/.cache/fedsieve if it is not set)
    clients
        number of clients (default: depends on the task)
    alpha
        Dirichlet parameter of a skewed partition
    seed
        seed of the partition and of generated data
    out
        file of the picture (default: TASK-clients.png)
    """
    from fedsieve.experiments.config import FederationConfig, RunConfig
    from fedsieve.experiments.resolve import resolve
    from fedsieve.experiments.simulation import Simulation
    from fedsieve.experiments.tasks import TASKS

    options = TASKS[task].data_options
    data = options(path=path) if path is not None and task not in GENERATED_TASKS else options()
    run = resolve(RunConfig(task=task, seed=seed, data=data, federation=FederationConfig(clients=clients, alpha=alpha)))
    dataset = Simulation(run).dataset
    counts = label_counts(dataset.y, dataset.counts)
    table = Table(
        title=f"{task}: {len(dataset.y)} examples on {len(dataset.counts)} clients ({run.federation.partition})", title_justify="left"
    )
    for column in ("examples per client", "minimum", "median", "maximum", "empty clients", "labels per client (median)"):
        table.add_column(column, justify="right")
    sizes = sorted(dataset.counts)
    labels_per_client = "" if counts is None else str(int(sorted((counts > 0).sum(1))[len(counts) // 2]))
    mean = f"{len(dataset.y) / len(dataset.counts):.0f}"
    table.add_row(
        mean, str(sizes[0]), str(sizes[len(sizes) // 2]), str(sizes[-1]), str(int((dataset.counts == 0).sum())), labels_per_client
    )
    picture = out or Path(f"{task}-clients.png")
    try:
        draw_partition(task, dataset.counts, counts, picture)
    except OSError as error:
        raise DataError(f"--out {picture} cannot be written: {error.strerror}; choose another file") from None
    PlainConsole().print(table)
    print(dataset.description)
    print(f"picture in {picture}")
    return 0


def draw_partition(task: str, num_examples: "np.ndarray", labels_per_client: "np.ndarray | None", path: Path) -> None:
    """Draw the number of examples per client and the fraction of each label."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    from fedsieve.report.figures.style import save_figure

    order = (-num_examples).argsort(kind="stable")
    figure, axes = plt.subplots(
        1 if labels_per_client is None else 2,
        1,
        figsize=(8, 3 if labels_per_client is None else 5.5),
        sharex=True,
        squeeze=False,
        layout="constrained",
    )
    axes[0, 0].bar(range(len(num_examples)), num_examples[order], width=1.0, color="#0072B2")
    axes[0, 0].set(ylabel="examples", title=f"{task}: examples per client")
    if labels_per_client is not None:
        fraction = labels_per_client[order] / labels_per_client[order].sum(1, keepdims=True).clip(1)
        image = axes[1, 0].imshow(fraction.T, aspect="auto", cmap="cividis", interpolation="nearest", vmin=0)
        axes[1, 0].set(ylabel="label", title="fraction of each label in a client's examples")
        figure.colorbar(image, ax=axes[1, 0], label="fraction")
    axes[-1, 0].set_xlabel("client, largest first")
    save_figure(figure, path, dpi=130)
    plt.close(figure)
