"""A small regression on three clients, one deployment per algorithm, and a record of all packets."""

import json
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from fedsieve import wire
from fedsieve.deployment.deployment_config import deployment_config
from fedsieve.objectives.linear import Linear, Loss

OBJECTIVE = Linear(loss=Loss.SQUARED, num_features=40)
TEST_PREFIX = "test."


def load_examples(client):
    rng = np.random.default_rng(client)
    x = rng.normal(size=(60 + 10 * client, 40))
    return x, x[:, :4].sum(1) + 0.1 * rng.normal(size=len(x))


def deployments(run_config):
    """The name and the DeploymentConfig of each algorithm, each with its own settings and run directory."""
    shared = {name: value for name, value in run_config.items() if not name.startswith(TEST_PREFIX)}
    for name, settings in json.loads(run_config[TEST_PREFIX + "algorithms"]).items():
        run_dir = str(Path(str(run_config["run-dir"])) / name) if run_config["run-dir"] else ""
        yield name, deployment_config({**shared, **settings, "algorithm.name": name, "run-dir": run_dir}, OBJECTIVE)


@contextmanager
def record_packets(path):
    """Write the broadcasts, the encoded replies and the decoded messages to a JSON file, as hexadecimal text."""
    packets = {"broadcasts": [], "replies": [], "decoded": []}
    encode, encode_stack, decode = wire.encode, wire.encode_stack, wire.decode

    def recording_encode(packet, message_id, *reference):  # a reply refers to the support of the broadcast, if it has one
        (encoded,) = encode_stack(packet, 1, message_id, *reference)
        packets["replies" if reference else "broadcasts"].append(encoded.to_bytes().hex())
        return encoded

    def recording_encode_stack(stack, num_packets, message_id, *reference):
        encoded = encode_stack(stack, num_packets, message_id, *reference)
        packets["replies" if reference else "broadcasts"] += [each.to_bytes().hex() for each in encoded]
        return encoded

    def recording_decode(data, *rest):
        packets["decoded"].append(data.hex())
        return decode(data, *rest)

    wire.encode, wire.encode_stack, wire.decode = recording_encode, recording_encode_stack, recording_decode
    try:
        yield packets
    finally:
        wire.encode, wire.encode_stack, wire.decode = encode, encode_stack, decode
        Path(path).write_text(json.dumps(packets))
