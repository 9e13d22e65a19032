"""Writers of MNIST's digits, patients of four hospitals, and every layout of CIFAR-10, with small generated files."""

import gzip
import json
import pickle
import struct
import zlib

import numpy as np
import pytest

from fedsieve.data import builtin, cifar10, heart, mnist, png_decoder
from fedsieve.data.builtin import BuiltinFiles, FeatureScaling, HeartFiles
from fedsieve.data.downloads import DataError
from fedsieve.data.federated_dataset import PartitionSpec
from fedsieve.data.partition import Partition, partition_by_owner
from fedsieve.experiments.config import RunConfig
from fedsieve.experiments.resolve import resolve
from fedsieve.experiments.simulation import Simulation

RNG = np.random.default_rng(0)
NATURAL = PartitionSpec(3, Partition.NATURAL, 0.5)


@pytest.fixture(autouse=True)
def clear_caches():
    yield
    for loader in builtin.LOADERS.values():
        loader.cache_clear()


def write_idx(path, magic, array, kind=np.uint8):
    path.write_bytes(gzip.compress(np.array([magic, *array.shape], ">i4").tobytes() + array.astype(kind).tobytes()))


def write_digits(folder, writers, test_writers, labels=None):
    """MNIST with one digit per writer entry, and the tables of QMNIST beside it."""
    for prefix, table, owners in (("train", "train", writers), ("t10k", "test", test_writers)):
        count = len(owners)
        digits = np.arange(count) % 10
        write_idx(folder / f"{prefix}-images-idx3-ubyte.gz", mnist.IMAGES_MAGIC, np.tile(digits[:, None, None], (1, 28, 28)))
        write_idx(folder / f"{prefix}-labels-idx1-ubyte.gz", mnist.LABELS_MAGIC, digits)
        rows = np.zeros((count + 3, 8), dtype=np.int64)  # the test table of QMNIST goes on after MNIST's digits
        rows[:count, 0], rows[:count, 2] = digits if labels is None else labels, owners
        write_idx(folder / f"qmnist-{table}-labels-idx2-int.gz", mnist.TABLE_MAGIC, rows, ">i4")


def test_each_writer_is_a_client_and_the_test_has_other_writers(tmp_path):
    writers = np.array([7, 3, 7, 9, 3, 7])
    write_digits(tmp_path, writers, [1, 1, 2])
    dataset = builtin.load_builtin_dataset("mnist-writers", BuiltinFiles(path=tmp_path), NATURAL, 0)
    assert dataset.counts.tolist() == [2, 3, 1]
    by_writer = [sorted(np.flatnonzero(writers == writer)) for writer in (3, 7, 9)]
    assert [sorted(part) for part in np.split(dataset.y, [2, 5])] == by_writer
    assert dataset.description == (
        "MNIST, its training digits by their 3 writers (QMNIST) and its test digits by 2 others: 6 training and 3 test examples"
    )


def test_a_test_writer_among_the_training_writers_is_refused(tmp_path):
    write_digits(tmp_path, [7, 3, 7], [3, 2])
    with pytest.raises(DataError, match="1 writers have training and test digits"):
        builtin.load_mnist_writers(tmp_path)


def test_writers_in_another_order_than_the_digits_are_refused(tmp_path):
    write_digits(tmp_path, [7, 3, 7], [1, 2, 2], labels=[0, 1, 1])
    with pytest.raises(DataError, match="not in the same order"):
        builtin.load_mnist_writers(tmp_path)


@pytest.mark.parametrize(("cut", "text"), [(slice(0, -4), "truncated or damaged"), (slice(4, None), "not an IDX table")])
def test_a_damaged_table_of_writers_raises_an_error(tmp_path, cut, text):
    write_digits(tmp_path, [7, 3], [1, 2])
    path = tmp_path / "qmnist-train-labels-idx2-int.gz"
    path.write_bytes(gzip.decompress(path.read_bytes())[cut])
    with pytest.raises(DataError, match=text):
        builtin.load_mnist_writers(tmp_path)


def test_owners_keep_their_examples_in_an_order_from_the_seed():
    owners = RNG.integers(0, 4, 50)
    parts = partition_by_owner(owners, np.random.default_rng(1))
    assert [sorted(part) for part in parts] == [np.flatnonzero(owners == owner).tolist() for owner in range(4)]
    assert any((np.diff(part) < 0).any() for part in parts)


def patient_rows(count, seed):
    """Rows of one hospital; the first lacks cholesterol, all lack the columns slope, ca and thal."""
    rng = np.random.default_rng(seed)
    rows = []
    for i in range(count):
        cells = [40 + i, i % 2, 1 + i % 4, 120, 200 + i, 0, i % 3, 150, 0, round(rng.random(), 2), "?", "?", "?", i % 5 % 3]
        if i == 0:
            cells[4] = "?"
        rows.append(",".join(map(str, cells)))
    return rows


def write_hospitals(folder):
    for seed, hospital in enumerate(heart.HOSPITALS):
        (folder / f"processed.{hospital}.data").write_text("\n".join(patient_rows(21 + 10 * seed, seed)) + "\n")


def test_each_hospital_is_a_client_without_patients_who_lack_a_value(tmp_path):
    write_hospitals(tmp_path)
    dataset = builtin.load_heart_dataset(HeartFiles(path=tmp_path), NATURAL._replace(num_clients=4), 0)
    assert len(dataset.y) + len(dataset.test_y) == 20 + 30 + 40 + 50
    assert dataset.x.shape[1] == heart.NUM_FEATURES and set(np.unique(dataset.y)) == {0, 1}
    for part in np.split(dataset.x, np.cumsum(dataset.counts)[:-1]):
        changing = part.std(0) > 0
        assert np.allclose(part.mean(0), 0, atol=1e-5) and np.allclose(part.std(0, ddof=1)[changing], 1, atol=1e-5)
        assert (part[:, ~changing] == 0).all()


def test_pooled_scaling_changes_test_patients_only(tmp_path):
    write_hospitals(tmp_path)
    own, pooled = builtin.load_heart(tmp_path), builtin.load_heart_pooled(tmp_path)
    assert np.array_equal(own.train[0], pooled.train[0]) and np.array_equal(own.test[1], pooled.test[1])
    assert not np.allclose(own.test[0], pooled.test[0]) and "all hospitals" in pooled.source
    spec = NATURAL._replace(num_clients=4)
    chosen = builtin.load_heart_dataset(HeartFiles(path=tmp_path, test_scaling=FeatureScaling.POOLED), spec, 0)
    assert np.array_equal(chosen.test_x, pooled.test[0])


@pytest.mark.parametrize(("text", "error"), [("1,2,3\n", "must have 14 columns"), ("a,b\n", "table of numbers"), ("1,2\n1\n", "table of")])
def test_a_damaged_table_of_patients_raises_an_error(tmp_path, text, error):
    (tmp_path / "f.data").write_text(text)
    with pytest.raises(DataError, match=error):
        heart.read_hospital(tmp_path / "f.data")


def test_the_real_hospitals_have_flambys_numbers_of_patients():
    try:
        dataset = Simulation(resolve(RunConfig(task="heart"))).dataset
    except DataError:
        pytest.skip("the files are not here")
    assert dataset.counts.tolist() == [199, 172, 30, 85] and len(dataset.test_y) == 254  # FLamby, table 1 of arXiv 2210.04620


PIXELS = RNG.integers(0, 256, (6, 4, 3072), dtype=np.uint8)
LABELS = RNG.integers(0, 10, (6, 4))


def png_bytes(pixels, filters):
    """A PNG file of RGB pixels with the given filter in each line, encoded byte by byte from the specification."""
    height, width, _ = pixels.shape
    flat = pixels.reshape(height, -1).astype(int)
    lines = b""
    for row, kind in enumerate(filters):
        above = flat[row - 1] if row else np.zeros(3 * width, dtype=int)
        coded = []
        for at, value in enumerate(flat[row]):
            left, up, corner = (flat[row][at - 3], above[at], above[at - 3]) if at >= 3 else (0, above[at], 0)
            distances = [abs(left + up - corner - other) for other in (left, up, corner)]
            paeth = (left, up, corner)[distances.index(min(distances))]
            coded.append((value - (0, left, up, (left + up) // 2, paeth)[kind]) % 256)
        lines += bytes([kind, *coded])
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    compressed = zlib.compress(lines)
    chunks = [(b"IHDR", header), (b"IDAT", compressed[:20]), (b"IDAT", compressed[20:]), (b"IEND", b"")]
    return png_decoder.SIGNATURE + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in chunks
    )


def write_cifar10(folder, layout):
    folder.mkdir(parents=True, exist_ok=True)
    for name, pixels, labels in zip(cifar10.BATCHES, PIXELS, LABELS, strict=True):
        if layout == "python":
            content = {b"data": pixels, b"labels": labels.tolist(), b"batch_label": b"a batch"}
            (folder / name).write_bytes(pickle.dumps(content, protocol=2))
        elif layout == "binary":
            (folder / f"{name}.bin").write_bytes(np.column_stack([labels.astype(np.uint8), pixels]).tobytes())
        else:
            sheet = pixels.reshape(4, 3, 1024).transpose(0, 2, 1)
            (folder / f"{name}.png").write_bytes(png_bytes(sheet, (1, 1, 4, 2)))
    if layout == "sheets":
        (folder / "train_lables.json").write_text(json.dumps(LABELS[:5].reshape(-1).tolist()))
        (folder / "test_lables.json").write_text(json.dumps(LABELS[5].tolist()))


@pytest.mark.parametrize(
    ("layout", "inner"),
    [
        ("python", "cifar-10-batches-py"),
        ("python", "cifar10"),
        ("binary", "cifar-10-batches-bin"),
        ("sheets", "package"),
        ("sheets", "cifar10"),
    ],
)
def test_cifar10_is_read_from_every_layout(tmp_path, layout, inner):
    write_cifar10(tmp_path / inner, layout)
    (x, y), (test_x, test_y), source = cifar10.read_cifar10(tmp_path)
    assert np.array_equal(x.reshape(20, -1), PIXELS[:5].reshape(20, -1)) and np.array_equal(y, LABELS[:5].reshape(-1))
    assert np.array_equal(test_x.reshape(4, -1), PIXELS[5]) and np.array_equal(test_y, LABELS[5])
    assert source == "CIFAR-10, its training and test files"


def test_images_and_vectors_of_cifar10_hold_the_same_standardized_pixels(tmp_path):
    write_cifar10(tmp_path, "binary")
    images, vectors = builtin.load_cifar10_images(tmp_path), builtin.load_cifar10(tmp_path)
    assert images.train[0].shape == (20, 3, 32, 32) and np.array_equal(images.train[0].reshape(20, -1), vectors.train[0])
    expected = (PIXELS[0, 0, 1024] / 255 - builtin.CIFAR10_MEAN[1]) / builtin.CIFAR10_STD[1]
    assert images.train[0][0, 1, 0, 0] == pytest.approx(expected, abs=1e-5)


def test_a_missing_cifar10_names_the_command_to_fetch_it(tmp_path):
    with pytest.raises(DataError, match="fedsieve data fetch cifar10"):
        cifar10.read_cifar10(tmp_path)


class Intruder:
    def __reduce__(self):
        return print, ("executed",)


def test_a_pickle_with_code_is_not_executed(tmp_path, capsys):
    (tmp_path / "data_batch_1").write_bytes(pickle.dumps({b"data": Intruder(), b"labels": []}))
    with pytest.raises(DataError, match=r"contains .*print"):
        cifar10.read_python_batch(tmp_path / "data_batch_1")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ({b"data": np.zeros((2, 3071), np.uint8), b"labels": [0, 1]}, "one label and 3072 bytes"),
        ({b"data": np.zeros((2, 3072), np.uint8), b"labels": [0]}, "one label and 3072 bytes"),
        ({b"data": np.zeros((2, 3072), np.uint8), b"labels": [0, 10]}, "has a label 10"),
        ({b"data": np.zeros((2, 3072), np.uint8)}, "is not a batch"),
        ([1, 2], "is not a batch"),
    ],
)
def test_a_damaged_batch_raises_an_error(tmp_path, content, text):
    (tmp_path / "b").write_bytes(pickle.dumps(content, protocol=2))
    with pytest.raises(DataError, match=text):
        cifar10.read_python_batch(tmp_path / "b")
    (tmp_path / "b.bin").write_bytes(bytes(3072))
    with pytest.raises(DataError, match="is not a binary file"):
        cifar10.read_binary_batch(tmp_path / "b.bin")


def test_every_png_filter_is_undone(tmp_path):
    pixels = RNG.integers(0, 256, (12, 9, 3), dtype=np.uint8)
    (tmp_path / "a.png").write_bytes(png_bytes(pixels, [0, 1, 2, 3, 4, 4, 3, 2, 1, 0, 4, 1]))
    assert np.array_equal(png_decoder.read_png(tmp_path / "a.png"), pixels)
    (tmp_path / "first.png").write_bytes(png_bytes(pixels[:1], [4]))
    assert np.array_equal(png_decoder.read_png(tmp_path / "first.png"), pixels[:1])


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda data: data[:-20], "complete PNG"),
        (lambda data: b"GIF89a" + data, "complete PNG"),
        (lambda data: data[:50] + bytes([data[50] ^ 1]) + data[51:], "checksum of chunk IDAT"),
        (lambda _: b"", "complete PNG"),
    ],
)
def test_a_damaged_png_raises_an_error(tmp_path, change, text):
    pixels = RNG.integers(0, 256, (3, 5, 3), dtype=np.uint8)
    (tmp_path / "a.png").write_bytes(change(png_bytes(pixels, [0, 1, 2])))
    with pytest.raises(DataError, match=text):
        png_decoder.read_png(tmp_path / "a.png")
