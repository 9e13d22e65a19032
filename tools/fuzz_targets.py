"""All readers of files and messages as fuzz targets: they may raise only documented errors.

fuzz.py runs them for minutes, tests/wire/test_fuzz.py for seconds.
"""

import contextlib
import gzip
import io
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple
from unittest import mock
from zlib import crc32

import numpy as np
import torch

from fedsieve import wire
from fedsieve.core.optimizers import initial_moments
from fedsieve.core.packets import Packet, sparse_packet
from fedsieve.core.quantization import Coding, QuantizedField
from fedsieve.core.types import ClientMemory
from fedsieve.data import mnist, prediction_files, rcv1, user_files
from fedsieve.data.downloads import DataError
from fedsieve.experiments.config import RunConfig
from fedsieve.experiments.resolve import resolve
from fedsieve.storage import checkpoint, run_directory, run_log

MESSAGE_ID = wire.MessageId(7, 1, 0)
SIZE = 40
SCRATCH_FILE = Path(tempfile.gettempdir()) / f"fuzz-{os.getpid()}"


class Target(NamedTuple):
    """A reader: valid inputs to start from, the function that reads bytes, and the errors it may raise."""

    seeds: list[bytes]
    feed: Callable[[bytes], object]
    expected_errors: tuple[type[Exception], ...]

    def accepts(self, data: bytes) -> bool:
        """Return whether the input is accepted; undocumented errors are raised."""
        try:
            self.feed(data)
        except self.expected_errors:
            return False
        return True


def feed_as_file(read: Callable[[Path], object], suffix: str = "") -> Callable[[bytes], object]:
    """Return a function that writes bytes to a file and reads it."""

    def feed(data: bytes) -> object:
        path = SCRATCH_FILE.with_suffix(suffix)
        path.write_bytes(data)
        try:
            return read(path)
        finally:
            path.unlink()

    return feed


# Settings: everything from a file to the start of training


def parse_config(path: Path) -> int:
    """Parse a config file as `fedsieve train` does; anything but exit code 2 and one line is an error."""
    from fedsieve.cli import main, train

    no_training = mock.Mock(side_effect=ValueError("nothing is trained while fuzzing"))
    with (
        mock.patch.multiple(train, Simulation=no_training, tune_run=no_training),
        contextlib.redirect_stderr(io.StringIO()) as errors,
    ):
        code = main.main(["train", "--config", str(path)])
    if code != main.EXIT_USAGE or errors.getvalue().count("\n") != 1:
        raise AssertionError(f"exit code {code}, error output {errors.getvalue()!r}")
    raise run_directory.RunDirectoryError(errors.getvalue())


def encode_packet(reference: torch.Tensor | None = None) -> bytes:
    """Return a sparse message without its checksum."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(SIZE, generator=generator)
    packet = sparse_packet(torch.arange(0, SIZE, 3), {"theta": values}, 8, lambda _, *shape: torch.rand(*shape, generator=generator))
    return wire.encode(packet, MESSAGE_ID, reference).to_bytes()[:-4]


def encode_list() -> bytes:
    """Return a list of three ternary vectors without its checksum."""
    support = torch.arange(0, SIZE - 1).view(3, -1)
    field = QuantizedField(torch.ones_like(support, dtype=torch.int8), torch.ones(3), Coding.SIGNS)
    return wire.encode(Packet(SIZE, support, {"update": field}, {}), MESSAGE_ID).to_bytes()[:-4]


def decode_packet(data: bytes) -> object:
    """Decode a message with a correct checksum, so that the content itself is validated."""
    reference = torch.arange(0, SIZE, 4)
    return wire.decode(data + crc32(data).to_bytes(4, "little"), MESSAGE_ID, SIZE, reference, accept_lists=True)


STATE = initial_moments(torch.zeros(3))


def npz_bytes(*, num_features: int = 4, compressed: bool = False) -> bytes:
    """Return a small .npz file."""
    file = io.BytesIO()
    save = np.savez_compressed if compressed else np.savez
    save(file, x=np.eye(4, num_features, dtype=np.float32), y=np.arange(4), site=np.array(["a", "b", "a", "b"]))
    return file.getvalue()


def read_prediction_examples(path: Path) -> prediction_files.PredictionData:
    """Read examples for a model of three features, as `fedsieve predict` does."""
    return prediction_files.read_examples(path, prediction_files.ModelInput(input_shape=(3,), features=None, first_feature_id=1), "y")


IMAGES = np.array([mnist.IMAGES_MAGIC, 1, 28, 28], ">i4").tobytes() + bytes(784)
LABELS = np.array([mnist.LABELS_MAGIC, 3], ">i4").tobytes() + bytes((1, 2, 3))
TOPICS = b"0,3 1:0.5 7:0.25 47236:1\n5 2:1\n"
TABLE = b"a,site,y\n1,s,2\n-3e2,t,4.5\n"
ROUNDS = 2 * run_log.encode_round(np.arange(3), np.zeros(20))
METRICS = b"".join(run_directory.encode_metrics({"round": n, "bytes_up": 7, "bytes_down": 9, "seconds": n / 4}) for n in (1, 2))
TARGETS = {
    "config": Target(
        [run_directory.to_toml(resolve(RunConfig(rounds=2)).settings_dict).encode(), b'task = "mc"\n[data]\nnum-examples = 5\n'],
        feed_as_file(parse_config),
        (run_directory.RunDirectoryError,),
    ),
    "packet": Target([encode_packet(), encode_packet(torch.arange(0, SIZE, 4)), encode_list()], decode_packet, (wire.PacketError,)),
    "checkpoint": Target(
        [
            checkpoint.encode(3, STATE, {"density": 0.05}),
            checkpoint.encode(3, STATE, {}, {7: ClientMemory(2, {"residual": torch.ones(3)})}),
        ],
        lambda data: checkpoint.decode(data).restore(STATE),
        (checkpoint.CheckpointError, checkpoint.SettingsChangedError),
    ),
    "metrics": Target([METRICS], feed_as_file(lambda path: run_log.read_metrics_rows(path, 2)), (run_directory.RunDirectoryError,)),
    "rounds": Target([ROUNDS], feed_as_file(lambda path: run_log.read_supports(path, 2)), (run_directory.RunDirectoryError,)),
    "idx": Target([IMAGES, LABELS, gzip.compress(LABELS, mtime=0)], feed_as_file(mnist.read_idx), (DataError,)),
    "topics": Target([TOPICS], feed_as_file(rcv1.read_topics, ".svm"), (DataError,)),
    "svmlight": Target(
        [b"1 1:0.5 3:2\n-1 2:1\n", b"0,2 1:1\n1 2:-1e3\n"],
        feed_as_file(lambda path: user_files.read_table(path, "y", None), ".svm"),
        (DataError,),
    ),
    "predict-csv": Target([b"a,b,c,y\n1,2,3,4\n"], feed_as_file(read_prediction_examples, ".csv"), (DataError,)),
    "predict-svm": Target([b"1 1:0.5 3:2\n"], feed_as_file(read_prediction_examples, ".svm"), (DataError,)),
    "predict-npz": Target([npz_bytes(num_features=3)], feed_as_file(read_prediction_examples, ".npz"), (DataError,)),
    "csv": Target([TABLE], feed_as_file(lambda path: user_files.read_table(path, "y", "site"), ".csv"), (DataError,)),
    "npz": Target(
        [npz_bytes(), npz_bytes(compressed=True)], feed_as_file(lambda path: user_files.read_table(path, "y", "site"), ".npz"), (DataError,)
    ),
}
