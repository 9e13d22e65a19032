"""A small regression on three clients, one site for several methods, and a record of the packets that were passed."""

import json
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from fedsieve import wire
from fedsieve.deployment.config import deployment_config
from fedsieve.objectives.linear import Linear, Loss

OBJECTIVE = Linear(loss=Loss.SQUARED, num_features=40)
OURS = "test."


def rows(client):
    draw = np.random.default_rng(client)
    x = draw.normal(size=(60 + 10 * client, 40))
    return x, x[:, :4].sum(1) + 0.1 * draw.normal(size=len(x))


def plans(config):
    """One plan a method, each with settings and a folder of its own."""
    settings = {name: value for name, value in config.items() if not name.startswith(OURS)}
    for method, own in json.loads(config[OURS + "plans"]).items():
        folder = str(Path(str(config["run-dir"])) / method) if config["run-dir"] else ""
        yield method, deployment_config({**settings, **own, "algorithm.name": method, "run-dir": folder}, OBJECTIVE)


@contextmanager
def recorded(path):
    """Write down the packets sent, those replies are made of and those heard, as hexadecimal text."""
    packets = {"sent": [], "made": [], "heard": []}
    encode, encode_stack, decode = wire.encode, wire.encode_stack, wire.decode

    def encoding(packet, address, *reference):  # a reply refers to the support of the broadcast, if that has one
        (encoded,) = encode_stack(packet, 1, address, *reference)
        packets["made" if reference else "sent"].append(encoded.to_bytes().hex())
        return encoded

    def encoding_stack(stack, *rest):
        encoded = encode_stack(stack, *rest)
        packets["made"] += [each.to_bytes().hex() for each in encoded]
        return encoded

    def decoding(data, *rest):
        packets["heard"].append(data.hex())
        return decode(data, *rest)

    wire.encode, wire.encode_stack, wire.decode = encoding, encoding_stack, decoding
    try:
        yield packets
    finally:
        wire.encode, wire.encode_stack, wire.decode = encode, encode_stack, decode
        Path(path).write_text(json.dumps(packets))
