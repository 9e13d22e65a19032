"""Everything a client can do wrong, by name."""

import time

import torch

from fedsieve import wire


class Bytes:
    """A reply that is these bytes."""

    def __init__(self, data):
        self.data = data

    def join(self):
        return self.data


class Faulty:
    """A site that does in some rounds what `faults` names: {"round": {"client": kind}}."""

    def __init__(self, site, faults):
        self.site, self.rows, self.faults = site, site.rows, faults

    def visit(self, clock, message, client):
        kind = self.faults.get(str(clock.round + 1), {}).get(str(client))
        honest = self.site.visit(clock, message, client)
        return honest if kind is None else FAULTS[kind](honest, clock)


def raises(honest, clock):
    raise RuntimeError("the disk is on fire")


def slow(honest, clock):
    time.sleep(30)
    return honest


def with_scale(number):
    """The honest packet, but the scale of its values is no number. The scale is the first four bytes of a field."""

    def broken(honest, clock):
        scale = torch.tensor(number, dtype=torch.float32).numpy().tobytes()
        fields = {name: scale + values[4:] for name, values in honest.fields.items()}
        return honest._replace(fields=fields)

    return broken


def readdressed(change):
    """The honest packet under another address: the header holds the fingerprint at 4 to 8, then the round."""

    def broken(honest, clock):
        return honest._replace(header=change(honest.header))

    return broken


FAULTS = {
    "raises": raises,
    "slow": slow,
    "not a number": with_scale(float("nan")),
    "infinity": with_scale(float("inf")),
    "malformed": lambda honest, clock: Bytes(b"nothing of the kind"),
    "truncated": lambda honest, clock: Bytes(honest.to_bytes()[:-5]),
    "oversized": lambda honest, clock: Bytes(honest.to_bytes() + bytes(10_000_000)),
    "wrong model": readdressed(lambda header: header[:4] + bytes(4) + header[8:]),
    "stale": readdressed(lambda header: header[:8] + bytes([header[8] - 1]) + header[9:]),
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
"""What the server says of each."""
assert wire.MAGIC == b"fS" and wire.VERSION == 1
