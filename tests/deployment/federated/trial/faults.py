"""Every fault a client can commit, by name."""

import time

import torch

from fedsieve import wire


class RawReply:
    """A reply that consists of the given bytes."""

    def __init__(self, data):
        self.data = data

    def to_bytes(self):
        return self.data


class FaultyEngine:
    """A client engine that commits the faults {"round": {"client": kind}}."""

    def __init__(self, engine, faults):
        self.engine, self.data, self.faults = engine, engine.data, faults

    def run_client(self, clock, message, client, memory=None):
        kind = self.faults.get(str(clock.round + 1), {}).get(str(client))
        honest, kept = self.engine.run_client(clock, message, client, memory)
        return honest if kind is None else FAULTS[kind](honest, clock), kept


def raise_error(honest, clock):
    raise RuntimeError("the disk is on fire")


def reply_slowly(honest, clock):
    time.sleep(30)
    return honest


def with_scale(number):
    """The honest packet with another scale of its values. The scale is the first four bytes of a field."""

    def corrupt(honest, clock):
        scale = torch.tensor(number, dtype=torch.float32).numpy().tobytes()
        fields = {name: scale + values[4:] for name, values in honest.fields.items()}
        return honest._replace(fields=fields)

    return corrupt


def with_header(change):
    """The honest packet with a changed header, which has the fingerprint at bytes 4 to 8, then the round."""

    def corrupt(honest, clock):
        return honest._replace(header=change(honest.header))

    return corrupt


FAULTS = {
    "raises": raise_error,
    "slow": reply_slowly,
    "not a number": with_scale(float("nan")),
    "infinity": with_scale(float("inf")),
    "malformed": lambda honest, clock: RawReply(b"nothing of the kind"),
    "truncated": lambda honest, clock: RawReply(honest.to_bytes()[:-5]),
    "oversized": lambda honest, clock: RawReply(honest.to_bytes() + bytes(10_000_000)),
    "wrong model": with_header(lambda header: header[:4] + bytes(4) + header[8:]),
    "stale": with_header(lambda header: header[:8] + bytes([header[8] - 1]) + header[9:]),
}
REASONS = {
    "raises": "the disk is on fire",
    "not a number": "not finite",
    "infinity": "not finite",
    "malformed": "not a packet",
    "truncated": "checksum",
    "oversized": "oversized: 10",
    "wrong model": "for another model",
    "stale": "for round",
}
"""A part of the server's error message for each fault."""
assert wire.MAGIC == b"fS" and wire.VERSION == 1
