"""Model files, traces and data of a stranger: damaged, absurd or much larger than they look."""

import io
import json
import resource
import subprocess
import sys
import zipfile
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load, save

from fedsieve.cli.main import main
from fedsieve.models import export, sparse_model
from fedsieve.models.export import Format
from fedsieve.models.sparse_model import ModelError, read_model
from fedsieve.objectives.losses import Loss
from helpers.models import MODELS, linear_model

MODEL = linear_model(features=10, density=0.5)


@pytest.mark.parametrize("format", [Format.SAFETENSORS, Format.NPZ, Format.ONNX])
def test_every_flipped_bit_is_noticed_or_changes_nothing(format, write_model):
    if format is Format.ONNX:
        pytest.importorskip("onnx")
    path = write_model(MODEL, format)
    content, x = path.read_bytes(), np.eye(10, dtype=np.float32)
    expected = MODEL.predict(x)
    num_noticed = 0
    for bit in range(0, 8 * len(content), 7 if format is Format.SAFETENSORS else 41):
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        try:
            if format is Format.ONNX:
                export.read_onnx_metadata(path)
                outputs = expected - 1  # the digest is of all bytes, so that no change may pass
            else:
                outputs = read_model(path).predict(x)
        except ModelError:
            num_noticed += 1
            continue
        np.testing.assert_array_equal(outputs, expected)
    assert num_noticed > 100


def rewritten(model, **changes):
    """A safetensors file with other metadata, and with a digest that fits, as a stranger would write it."""
    content = sparse_model.to_safetensors(model)
    length = int.from_bytes(content[:8], "little")
    parts = json.loads(json.loads(content[8 : 8 + length])["__metadata__"]["model"])
    for key, value in changes.items():
        target = parts if key in parts else parts["metadata"]
        target[key] = value
    return save(load(content), {"model": json.dumps(parts)})


ABSURD = [
    {"num_ungated": 10**400},
    {"num_ungated": -1},
    {"num_ungated": True},
    {"num_ungated": 2},
    {"num_ungated": None},
    {"tensors": {}},
    {"tensors": {"weights": [3, 10**30]}},
    {"tensors": {"weights": [-3, -10], "intercept": [3]}},
    {"tensors": {"weights": [3, 10], "intercept": [3], "more": [0]}},
    {"tensors": {"weights": [1 << 20, 1 << 20]}},
    {"tensors": {"weights": "ab"}},
    {"tensors": [3]},
    {"input_shape": [10**18]},
    {"input_shape": "ab"},
    {"input_shape": [[1]]},
    {"input_shape": [10] + [1] * 100},
    {"input_shape": []},
    {"classes": 5},
    {"classes": [1, 2, 3]},
    {"classes": None},
    {"classes": ["a"]},
    {"features": ["a"]},
    {"features": [{"a": 1}] * 10},
    {"feature_std": [1e400] * 10},
    {"feature_std": ["1"] * 10},
    {"feature_std": [0.0] * 10},
    {"first_feature_id": 1e400},
    {"first_feature_id": -5},
    {"factory": 3},
    {"factory": "os:system('x')"},
    {"task": ["x"]},
    {"algorithm": None},
    {"loss": "other"},
    {"loss": []},
    {"unknown": 1},
]


@pytest.mark.parametrize("changes", ABSURD, ids=str)
@pytest.mark.parametrize("command", ["inspect", "predict"])
def test_absurd_metadata_is_one_line(changes, command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(rewritten(MODEL, **changes))
    np.savez(tmp_path / "rows.npz", x=np.ones((2, 10), np.float32))
    assert main([command, "model.safetensors", *(["rows.npz"] if command == "predict" else [])]) == 2
    assert capsys.readouterr().err.startswith("fedsieve: model.safetensors is not a model written by fedsieve: ")


def test_a_model_without_a_digest_is_refused(tmp_path):
    content = sparse_model.to_safetensors(MODEL)
    text = json.dumps({k: v for k, v in json.loads(sparse_model.metadata_json(MODEL)).items() if k != "digest"})
    (tmp_path / "model.safetensors").write_bytes(save(load(content), {"model": text}))
    with pytest.raises(ModelError, match="has no digest"):
        read_model(tmp_path / "model.safetensors")


def test_deeply_nested_metadata_is_refused(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(save(load(sparse_model.to_safetensors(MODEL)), {"model": "[" * 100_000}))
    with pytest.raises(ModelError, match="damaged"):
        read_model(tmp_path / "model.safetensors")


def test_the_digest_is_the_same_in_every_format(tmp_path):
    for name, model in MODELS.items():
        for format in (Format.SAFETENSORS, Format.NPZ):
            path = tmp_path / f"{name}{export.SUFFIXES[format]}"
            path.write_bytes(export.export(model, format))
            assert sparse_model.model_digest(read_model(path)) == sparse_model.model_digest(model)
    scaled = replace(MODEL, values=np.nextafter(MODEL.values, np.float32(9)))
    assert sparse_model.model_digest(scaled) != sparse_model.model_digest(MODEL)


def bomb(path, num_bytes, **small):
    """An .npz archive whose array x unpacks to so many zeros."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, array in small.items():
            buffer = io.BytesIO()
            np.save(buffer, array)
            archive.writestr(f"{name}.npy", buffer.getvalue())
        header = io.BytesIO()
        np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": (num_bytes // 4000, 1000)})
        with archive.open("x.npy", "w", force_zip64=True) as member:
            member.write(header.getvalue())
            for _ in range(num_bytes // 4_000_000):
                member.write(bytes(4_000_000))


@pytest.fixture(scope="module")
def bomb_path(tmp_path_factory):
    """An archive of 1 MB with an array of 1 GB."""
    path = tmp_path_factory.mktemp("bomb") / "bomb.npz"
    bomb(path, 1_000_000_000, y=np.zeros(250_000))
    return path


PROBE = """
import re, sys
from pathlib import Path
from fedsieve.cli.main import main
code = main(sys.argv[1:])
print(int(re.search(r"VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text())[1]) // 1024)  # ru_maxrss would include the parent's
sys.exit(code)
"""


@pytest.mark.parametrize(
    "words",
    [["predict", "model.safetensors", "bomb.npz"], ["inspect", "bomb.npz"], ["train", "--task", "file", "--data.path", "bomb.npz"]],
    ids=lambda words: words[0],
)
def test_an_archive_that_unpacks_to_a_gigabyte_is_refused_before_it_is_unpacked(words, bomb_path, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(sparse_model.to_safetensors(linear_model(Loss.SQUARED, 1000)))
    (tmp_path / "bomb.npz").hardlink_to(bomb_path)
    done = subprocess.run([sys.executable, "-c", PROBE, *words], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert "more than the limit" in done.stderr
    assert int(done.stdout.split()[-1]) < 700  # megabytes; the interpreter with torch has about 300


def test_an_array_that_claims_another_size_than_it_has_is_refused(tmp_path):
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": (1 << 40,)})
    with zipfile.ZipFile(tmp_path / "model.npz", "w") as archive:
        archive.writestr("model.npy", header.getvalue())
    with pytest.raises(ModelError, match="does not fit its"):
        read_model(tmp_path / "model.npz")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 4 << 20


def test_a_gzip_file_that_unpacks_without_end_is_refused(tmp_path, monkeypatch):
    import gzip

    from fedsieve.data import mnist
    from fedsieve.data.downloads import DataError

    monkeypatch.setattr(mnist, "MAX_IDX_BYTES", 1000)
    (tmp_path / "images.gz").write_bytes(gzip.compress(bytes(1_000_000)))
    with pytest.raises(DataError, match="unpacks to more than 1000 bytes"):
        mnist.read_idx(tmp_path / "images.gz")
