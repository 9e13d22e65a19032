"""The processes of a cluster, called ranks: tensors between any two of them over torch.distributed (gloo), started by torchrun.

Rank 0 is the server of a run, and the only one that prints and writes files. A rank that fails sends rank 0 the reason in place of its next
message. A rank that ends without a word closes its connections, which the others notice at once.
"""

import os
import signal
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from enum import IntEnum
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.numpy import save
from safetensors.torch import load
from torch import Tensor

DEFAULT_SECONDS = 600.0
"""How long a rank waits for another. It includes local training of the other, and evaluation and checkpoints at rank 0."""
PREFIX_BYTES, HEAD_BYTES = 16, 16_384
"""A message has its kind and its length in front, and goes in one piece of this size, or in two: a piece costs more than its bytes."""
LOOPBACK = ("localhost", "127.0.0.1", "::1")
Tensors = Mapping[str, Tensor]
Sending = list[tuple[int, Any]]
"""Messages under way: rank and work."""


class Kind(IntEnum):
    """What a message is."""

    TENSORS = 0
    ERROR = 1
    """the text of an error, to rank 0"""
    END = 2
    """the run is over, from rank 0"""


class ClusterError(RuntimeError):
    """Another rank failed, ended or does not answer."""


class RunEnded(Exception):  # noqa: N818  # not an error
    """Rank 0 ended the run."""


@dataclass
class Ranks:
    """The connections of one rank."""

    group: Any
    """a process group of torch.distributed"""
    seconds: float = DEFAULT_SECONDS
    """how long to wait for another rank"""
    answers: Sending = field(default_factory=list, repr=False)
    """the last message to rank 0, while it is under way"""
    expected: dict[int, tuple[Tensor, Any]] = field(default_factory=dict, repr=False)
    """where the next message of a rank will be: its sender need not ask first"""

    @property
    def number(self) -> int:
        """The number of this rank."""
        return self.group.rank()

    @property
    def count(self) -> int:
        """The number of ranks."""
        return self.group.size()

    @property
    def others(self) -> list[int]:
        """The numbers of all other ranks."""
        return [rank for rank in range(self.count) if rank != self.number]

    def start(self, messages: Mapping[int, Tensors]) -> Sending:
        """Begin to send a message to each of some ranks; `finish` waits until they have arrived."""
        encoded = {
            id(message): save({name: np.ascontiguousarray(value.numpy(force=True)) for name, value in message.items()})
            for message in messages.values()
        }
        return [(rank, work) for rank, message in messages.items() for work in self._start(rank, Kind.TENSORS, encoded[id(message)])]

    def finish(self, sending: Sending) -> None:
        """Wait until messages have arrived."""
        for rank, work in sending:
            self._wait(work, rank)

    def answer(self, message: Tensors) -> None:
        """Send a message to rank 0 without waiting for its arrival, because rank 0 may end the run instead of receiving it."""
        self.finish(self.answers)
        self.answers = self.start({0: message})

    def receive(self, rank: int) -> dict[str, Tensor]:
        """Return the next message of a rank. Raise ClusterError if it failed, ended or does not answer, RunEnded if the run is over."""
        head, work = self.expected.pop(rank, None) or self._expect(rank)
        self._wait(work, rank)
        kind, length = head[:PREFIX_BYTES].view(torch.int64).tolist()
        data = head[PREFIX_BYTES : PREFIX_BYTES + length].numpy().tobytes()
        if length > len(data):
            rest = torch.empty(length - len(data), dtype=torch.uint8)
            self._wait(self._start_receiving(rest, rank), rank)
            data += rest.numpy().tobytes()
        if kind == Kind.END:
            raise RunEnded
        if kind == Kind.ERROR:
            raise ClusterError(f"rank {rank}: {data.decode()}")
        self.expected[rank] = self._expect(rank)
        return load(data)

    def report(self, error: BaseException) -> None:
        """Send rank 0 the reason why this rank cannot go on, then wait until the run ends."""
        self.answers += [(0, work) for work in self._start(0, Kind.ERROR, str(error).encode())]
        self.wait_for_end()

    def wait_for_end(self) -> None:
        """Return when rank 0 has ended the run."""
        try:
            while True:
                self.receive(0)
        except RunEnded:
            return

    def end(self) -> None:
        """End the run at all other ranks; those that are gone are left out."""
        works = []
        for rank in self.others:
            try:
                works += self._start(rank, Kind.END, b"")
            except RuntimeError:
                continue
        for work in works:
            try:
                work.wait(timedelta(seconds=min(self.seconds, 5.0)))
            except RuntimeError:
                continue

    def _expect(self, rank: int) -> tuple[Tensor, Any]:
        head = torch.empty(HEAD_BYTES, dtype=torch.uint8)
        return head, self._start_receiving(head, rank)

    def _start_receiving(self, data: Tensor, rank: int) -> Any:
        with _detect_loss(rank, self.seconds):
            return self.group.recv([data], rank, 0)

    def _start(self, rank: int, kind: Kind, data: bytes) -> list[Any]:
        whole = torch.tensor([kind, len(data)], dtype=torch.int64).numpy().tobytes() + data
        parts = [whole[:HEAD_BYTES].ljust(HEAD_BYTES, b"\0"), *filter(None, [whole[HEAD_BYTES:]])]
        with _detect_loss(rank, self.seconds):
            return [self.group.send([torch.frombuffer(bytearray(part), dtype=torch.uint8)], rank, 0) for part in parts]

    def _wait(self, work: Any, rank: int) -> None:
        with _detect_loss(rank, self.seconds):
            work.wait(timedelta(seconds=self.seconds))


@contextmanager
def _detect_loss(rank: int, seconds: float) -> Iterator[None]:
    """Raise ClusterError if the connection to a rank is closed, or if it does not answer."""
    try:
        yield
    except RuntimeError as error:
        what = f"did not answer for {seconds:g} seconds" if "imed out" in str(error) else "has ended"
        raise ClusterError(f"rank {rank} {what}") from None


def open_ranks() -> Ranks:
    """Connect this process with all others of its cluster, or raise ClusterError.

    Ctrl-C is handled by rank 0. Rank 0 ignores the signal with which torchrun ends the others of a rank that failed: it notices that by
    its connections, and says so.
    """
    if os.environ.get("MASTER_ADDR") in LOOPBACK:  # else gloo may bind to an address that this machine does not know
        names = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
        os.environ.setdefault("GLOO_SOCKET_IFNAME", names[0])
    is_first = os.environ["RANK"] == "0"
    signal.signal(signal.SIGTERM if is_first else signal.SIGINT, signal.SIG_IGN)
    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=DEFAULT_SECONDS))
    except (RuntimeError, ValueError) as error:
        raise ClusterError(f"the ranks cannot connect: {str(error).splitlines()[0]}; start them with torchrun") from None
    return Ranks(dist.group.WORLD)


def close_ranks() -> None:
    """Close the connections of this process."""
    dist.destroy_process_group()


def join_bytes(parts: Sequence[bytes]) -> dict[str, Tensor]:
    """Return encoded packets as tensors."""
    return {
        "bytes": torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8),
        "lengths": torch.tensor([len(part) for part in parts]),
    }


def split_bytes(message: Tensors) -> list[bytes]:
    """Return the encoded packets of a message."""
    data, ends = message["bytes"].numpy().tobytes(), message["lengths"].cumsum(0).tolist()
    return [data[start:end] for start, end in zip([0, *ends], ends, strict=False)]
