"""Real files: every layout people keep them in, every way they can be broken; made here, small, so that no download is needed."""

import gzip
import hashlib
import http.server
import threading
import zipfile

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

RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (30, 28, 28), dtype=np.uint8)
LABELS = (np.arange(30) % 10).astype(np.uint8)


@pytest.fixture(autouse=True)
def nothing_remembered():
    yield
    for loader in builtin.LOADERS.values():
        loader.cache_clear()


def idx_bytes(array):
    magic = mnist.IMAGES_MAGIC if array.ndim == 3 else mnist.LABELS_MAGIC
    return np.array([magic, *array.shape], ">i4").tobytes() + array.tobytes()


def put(path, data, packed):
    path.parent.mkdir(parents=True, exist_ok=True)
    (path.with_name(path.name + ".gz") if packed else path).write_bytes(gzip.compress(data) if packed else data)


def put_mnist(folder, packed=True):
    for name, array in zip(
        ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"), (IMAGES, LABELS) * 2, strict=True
    ):
        put(folder / f"{name}-ubyte", idx_bytes(array), packed)


@pytest.mark.parametrize("inner", ["", "mnist", "MNIST/raw", "raw"])
@pytest.mark.parametrize("packed", [True, False])
def test_mnist_is_found_in_every_layout(tmp_path, inner, packed):
    put_mnist(tmp_path / inner, packed)
    (x, y), (test_x, _), note = builtin.load_mnist(tmp_path)
    assert x.shape == (30, 784) and test_x.shape == (30, 784) and note is None
    assert np.allclose(x * 255, IMAGES.reshape(30, -1))
    assert np.array_equal(y, LABELS)


def test_emnist_is_turned_upright_and_a_lone_test_file_is_cut_in_two(tmp_path):
    put(tmp_path / "gzip" / "emnist-byclass-test-images-idx3-ubyte", idx_bytes(IMAGES), True)
    put(tmp_path / "gzip" / "emnist-byclass-test-labels-idx1-ubyte", idx_bytes(LABELS), True)
    (x, _), (test_x, _), note = mnist.read_emnist(tmp_path)
    assert len(x) + len(test_x) == 30
    assert np.array_equal(x[0], IMAGES[0].T)
    assert "test file only" in note
    put(tmp_path / "gzip" / "emnist-byclass-train-images-idx3-ubyte", idx_bytes(IMAGES[:12]), True)
    put(tmp_path / "gzip" / "emnist-byclass-train-labels-idx1-ubyte", idx_bytes(LABELS[:12]), True)
    (x, _), (test_x, _), note = mnist.read_emnist(tmp_path)
    assert (len(x), len(test_x), note) == (12, 30, None)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (idx_bytes(IMAGES)[:-5], "cut or damaged"),
        (idx_bytes(IMAGES) + b"x", "cut or damaged"),
        (b"\x00\x00\x08\x05" + bytes(20), "no IDX file"),
        (b"", "no IDX file"),
        (gzip.compress(idx_bytes(IMAGES))[:-30], "cannot be read"),
        (b"\x1f\x8bnonsense", "cannot be read"),
        (np.array([mnist.IMAGES_MAGIC, 2**31 - 1, 28, 28], ">i4").tobytes(), "announces"),
    ],
)
def test_a_broken_image_file_is_refused(tmp_path, data, text):
    (tmp_path / "f").write_bytes(data)
    with pytest.raises(DataError, match=text):
        mnist.read_idx(tmp_path / "f")


def test_images_and_labels_must_fit_together(tmp_path):
    (tmp_path / "x").write_bytes(idx_bytes(IMAGES))
    (tmp_path / "y").write_bytes(idx_bytes(LABELS[:7]))
    with pytest.raises(DataError, match=r"30 images.* 7 labels"):
        mnist.read_pair(tmp_path / "x", tmp_path / "y", 10)
    (tmp_path / "z").write_bytes(idx_bytes(LABELS + 60))
    with pytest.raises(DataError, match="has a label 69; this task has classes 0 to 9"):
        mnist.read_pair(tmp_path / "x", tmp_path / "z", 10)


def test_missing_files_say_what_to_put_where(tmp_path):
    with pytest.raises(DataError, match="fedsieve data fetch mnist"):
        builtin.load_mnist(tmp_path)


def test_rcv1_keeps_the_most_frequent_topics_and_stays_sparse(tmp_path):
    rows = [f"{i % 3},{40 + i % 40} 1:0.5 {i + 2}:0.25 47236:1" for i in range(60)]
    (tmp_path / "rcv1_subsets_train.svm").write_text("\n".join(rows) + "\n")
    (tmp_path / "rcv1_subsets_test.svm").write_text("\n".join(rows[:10]) + "\n")
    (x, y), (test_x, test_y), note = rcv1.read_rcv1(tmp_path)
    assert isinstance(x, csr_matrix) and x.shape == (60, 47_236) and test_x.shape == (10, 47_236)
    assert y.shape == (60, 34) and test_y.shape == (10, 34)
    assert y[:, :3].sum() == 60 and "sample" in note
    assert x[0, 0] == 0.5 and x[0, 47_235] == 1


@pytest.mark.parametrize("text", ["0,200 1:1\n", "nonsense\n", "1 99999:1\n"])
def test_a_broken_topic_file_is_refused(tmp_path, text):
    (tmp_path / "f.svm").write_text(text)
    with pytest.raises(DataError):
        rcv1.read_topics(tmp_path / "f.svm")


def test_digits_need_no_files():
    drawn = builtin.load_builtin_dataset("digits", BuiltinFiles(), PartitionSpec(20, Partition.LABEL, 0.5), 0)
    assert drawn.x.shape == (1437, 64) and drawn.test_x.shape == (360, 64)
    assert drawn.counts.sum() == 1437


@pytest.mark.parametrize(("task", "size"), [("mnist", 784), ("emnist", 784), ("rcv1", 47_236), ("mnist-cnn", 784)])
def test_stand_ins_have_the_shape_of_the_real_thing_and_say_so(task, size):
    drawn = builtin.load_builtin_dataset(
        task, BuiltinFiles(source=Source.SYNTHETIC, num_examples=300), PartitionSpec(10, Partition.IID, 0.5), 0
    )
    assert np.prod(drawn.x.shape[1:]) == size
    assert "stand-in" in drawn.note


def test_server_rows_are_taken_from_the_clients():
    drawn = builtin.load_builtin_dataset("digits", BuiltinFiles(), PartitionSpec(20, Partition.LABEL, 0.5), 0, num_server_examples=100)
    assert drawn.counts.sum() == 1337 and len(drawn.server_y) == 100


@pytest.fixture
def homepage(tmp_path):
    """A server on loopback in the place of a data set's home."""
    root = tmp_path / "home"
    root.mkdir()

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args):
            super().__init__(*args, directory=root)

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Quiet)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield root, f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


def test_fetching_checks_the_sum_and_puts_the_file_in_place(tmp_path, homepage):
    root, address = homepage
    data = gzip.compress(b"hello")
    (root / "a.gz").write_bytes(data)
    known = DataFile("a", "mnist", ("", "mnist"), hashlib.sha256(data).hexdigest(), address + "a.gz")
    seen = []
    place = downloads.fetch(known, tmp_path, lambda done, total: seen.append((done, total)))
    assert place.read_bytes() == data and seen[-1] == (len(data), len(data))
    assert downloads.find_file(tmp_path, known) == place and downloads.checksum_ok(place, known)
    with pytest.raises(DataError, match="nothing was kept"):
        downloads.fetch(known._replace(name="b", sha256="0" * 64), tmp_path, lambda *_: None)
    assert not (tmp_path / "mnist" / "b.gz").exists()


def test_a_member_of_an_archive_is_fetched(tmp_path, homepage):
    root, address = homepage
    with zipfile.ZipFile(root / "all.zip", "w") as archive:
        archive.writestr("gzip/a.gz", b"payload")
    digest = hashlib.sha256(b"payload").hexdigest()
    known = DataFile("a", "emnist", ("", "emnist"), f"{digest[:8]}...{digest[-7:]}", address + "all.zip", "gzip/a.gz")
    assert downloads.fetch(known, tmp_path, lambda *_: None).read_bytes() == b"payload"


def test_a_home_that_cannot_be_reached_is_one_clear_error(tmp_path):
    known = DataFile("a", "mnist", ("",), "", "http://127.0.0.1:9/a.gz")
    with pytest.raises(DataError, match="cannot be reached"):
        downloads.fetch(known, tmp_path, lambda *_: None)


def test_data_list_and_check_tell_what_is_there(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("FEDSIEVE_DATA", str(tmp_path))
    put_mnist(tmp_path)
    assert main(["data", "list"]) == 0
    said = capsys.readouterr().out
    assert "found" in said and "missing; fedsieve data fetch rcv1" in said
    assert main(["data", "check", str(tmp_path)]) == 1  # not the originals
    assert "DAMAGED" in capsys.readouterr().out
    (tmp_path / "empty").mkdir()
    assert main(["data", "check", str(tmp_path / "empty")]) == 2


def test_data_show_draws_a_picture(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["data", "show", "digits", "--clients", "10"]) == 0
    assert "1437 rows on 10 clients" in capsys.readouterr().out
    assert (tmp_path / "digits-clients.png").read_bytes().startswith(b"\x89PNG")


def test_a_path_wins_over_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDSIEVE_DATA", str(tmp_path / "nowhere"))
    put_mnist(tmp_path / "here")
    assert builtin.load_builtin_dataset("mnist", BuiltinFiles(path=tmp_path / "here"), PartitionSpec(3, Partition.IID, 1.0), 0).x.shape == (
        30,
        784,
    )
    assert data.availability("mnist", None).startswith("missing")


def test_labels_are_counted_for_each_client():
    counts = data.label_counts(np.array([0, 1, 1, 2]), np.array([3, 0, 1]))
    assert counts.tolist() == [[1, 2, 0], [0, 0, 0], [0, 0, 1]]
