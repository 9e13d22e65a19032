"""`fedsieve data`: what there is, how it falls on clients, where to get it, whether it is whole. Only `show` imports torch."""

from pathlib import Path
from typing import Literal

from cyclopts import App
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn
from rich.table import Table

from fedsieve.data.downloads import DataError, DataFile, checksum_ok, default_folder, fetch, find_file
from fedsieve.data.federated_dataset import label_counts
from fedsieve.data.mnist import EMNIST_FILES, MNIST_FILES
from fedsieve.data.rcv1 import TRAIN_TEST_FILES

DATASET_FILES: dict[str, tuple[DataFile, ...]] = {
    "digits": (),
    "mnist": MNIST_FILES,
    "mnist-cnn": MNIST_FILES,
    "emnist": EMNIST_FILES,
    "rcv1": TRAIN_TEST_FILES[0],
}
ALTERNATIVE_FILES = {"emnist": EMNIST_FILES[2:], "rcv1": TRAIN_TEST_FILES[1]}
"""Files that serve where the whole set is not there."""
GENERATED_TASKS = ("lr", "lg", "mc")
RealTask = Literal["digits", "mnist", "mnist-cnn", "emnist", "rcv1"]
AnyTask = Literal["lr", "lg", "mc", "digits", "mnist", "mnist-cnn", "emnist", "rcv1"]


def data_app() -> App:
    """The four commands."""
    app = App(name="data", help="What data there is, how it falls on clients, where to get it.", result_action="return_value")
    for command in (list_, show, fetch_, check):
        app.command(command, name=command.__name__.strip("_"))
    return app


def availability(task: str, folder: Path | None) -> str:
    """Whether a task's files are there."""
    if not DATASET_FILES[task]:
        return "shipped with scikit-learn"
    if _has_all_files(DATASET_FILES[task], folder):
        return "found"
    if task in ALTERNATIVE_FILES and _has_all_files(ALTERNATIVE_FILES[task], folder):
        return "found in part: EMNIST's test file" if task == "emnist" else "found: a sample of it"
    return f"missing; fedsieve data fetch {task}"


def _has_all_files(files: tuple[DataFile, ...], folder: Path | None) -> bool:
    try:
        return all(find_file(folder, known) for known in files)
    except DataError:
        return False


def list_(*, path: Path | None = None) -> int:
    """The tasks, and whether their files are there.

    Parameters
    ----------
    path
        folder to look in (default: FEDSIEVE_DATA, else a cache folder in your home)
    """
    table = Table("task", "data", title=f"looked for in {path or default_folder()}", title_justify="left")
    for task in GENERATED_TASKS:
        table.add_row(task, "generated")
    for task in DATASET_FILES:
        table.add_row(task, availability(task, path))
    Console(highlight=False).print(table)
    return 0


def fetch_(task: RealTask, *, path: Path | None = None) -> int:
    """Fetch a task's original files from their public homes, with checksums.

    Parameters
    ----------
    task
        whose files
    path
        folder to put them into (default: FEDSIEVE_DATA, else a cache folder in your home)
    """
    folder = path or default_folder()
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    for known in DATASET_FILES[task]:
        if _has_all_files((known,), folder):
            print(f"{known.name}: already there")
            continue
        with Progress(*columns, console=Console(stderr=True)) as bar:
            job = bar.add_task(known.name, total=None)
            place = fetch(known, folder, lambda done, total, job=job, bar=bar: bar.update(job, completed=done, total=total or None))
        print(f"{known.name}: {place}")
    if not DATASET_FILES[task]:
        print(f"{task} is shipped with scikit-learn; there is nothing to fetch")
    return 0


def check(folder: Path) -> int:
    """Read every known file in a folder, compare checksums; exit 1 if one is damaged.

    Parameters
    ----------
    folder
        where the files are
    """
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder")
    table = Table("file", "state", title=str(folder), title_justify="left")
    bad = found = 0
    for known in dict.fromkeys((*MNIST_FILES, *EMNIST_FILES, *TRAIN_TEST_FILES[0], *TRAIN_TEST_FILES[1])):
        try:
            path = find_file(folder, known)
        except DataError:
            continue
        found += 1
        good = checksum_ok(path, known) if known.sha256 else None
        bad += good is False
        table.add_row(path.name, {True: "checksum matches", False: "DAMAGED or another file", None: "no known checksum"}[good])
    if not found:
        raise DataError(f"{folder} holds none of the known files; `fedsieve data list` says what is looked for")
    Console(highlight=False).print(table)
    return 1 if bad else 0


def show(
    task: AnyTask, *, path: Path | None = None, clients: int | None = None, alpha: float = 0.5, seed: int = 0, out: Path | None = None
) -> int:
    """Draw how a task's rows and labels fall on clients: a table, and a picture.

    Parameters
    ----------
    task
        which task
    path
        folder with the files (default: FEDSIEVE_DATA, else a cache folder in your home)
    clients
        how many clients (default: the task's)
    alpha
        Dirichlet parameter of a skewed partition
    seed
        decides who holds which row
    out
        the picture (default: TASK-clients.png)
    """
    from fedsieve.experiments.config import FederationConfig, RunConfig
    from fedsieve.experiments.resolve import resolve
    from fedsieve.experiments.simulation import Simulation
    from fedsieve.experiments.tasks import TASKS

    options = TASKS[task].data_options
    data = options(path=path) if path is not None and task not in GENERATED_TASKS else options()
    run = resolve(RunConfig(task=task, seed=seed, data=data, federation=FederationConfig(clients=clients, alpha=alpha)))
    drawn = Simulation(run).dataset
    counts = label_counts(drawn.y, drawn.counts)
    table = Table(title=f"{task}: {len(drawn.y)} rows on {len(drawn.counts)} clients ({run.federation.partition})", title_justify="left")
    for column in ("rows per client", "least", "median", "most", "empty clients", "labels per client (median)"):
        table.add_column(column, justify="right")
    held = sorted(drawn.counts)
    kinds = "" if counts is None else str(int(sorted((counts > 0).sum(1))[len(counts) // 2]))
    mean = f"{len(drawn.y) / len(drawn.counts):.0f}"
    table.add_row(mean, str(held[0]), str(held[len(held) // 2]), str(held[-1]), str(int((drawn.counts == 0).sum())), kinds)
    place = out or Path(f"{task}-clients.png")
    try:
        draw_partition(task, drawn.counts, counts, place)
    except OSError as problem:
        raise DataError(f"--out {place} cannot be written: {problem.strerror}") from None
    Console(highlight=False).print(table)
    if drawn.note:
        print(drawn.note)
    print(f"picture in {place}")
    return 0


def draw_partition(task: str, num_examples, labels_per_client, path: Path) -> None:  # noqa: ANN001
    """Rows per client, and below them the share of each label."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

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
    axes[0, 0].set(ylabel="rows", title=f"{task}: rows on each client")
    if labels_per_client is not None:
        share = labels_per_client[order] / labels_per_client[order].sum(1, keepdims=True).clip(1)
        image = axes[1, 0].imshow(share.T, aspect="auto", cmap="cividis", interpolation="nearest", vmin=0)
        axes[1, 0].set(ylabel="label", title="share of each label in a client's rows")
        figure.colorbar(image, ax=axes[1, 0], label="share")
    axes[-1, 0].set_xlabel("client, largest first")
    figure.savefig(path, dpi=130)
    plt.close(figure)
