"""`python -m benchmarks.flower_overhead`: bytes between a node and the superlink besides our packets.

A relay on loopback counts the bytes of each node's connections, without TLS. Packets and Flower's objects are counted by the server;
the rest is HTTP and the polling of nodes. A busy machine changes only the time and the number of polls.
"""

import json
import socket
import tempfile
import threading
import time
from pathlib import Path

from fedsieve.cli import flower
from fedsieve.deployment.local_cluster import LOOPBACK, LocalCluster

NUM_NODES, NUM_ROUNDS, IDLE_SECONDS = 3, 3, 30.0


class Relay:
    """Forwards connections to a port and counts the bytes of both directions."""

    def __init__(self, port: int) -> None:
        self.port, self.up, self.down = port, 0, 0
        self.listener = socket.create_server((LOOPBACK, 0))
        self.address = f"{LOOPBACK}:{self.listener.getsockname()[1]}"
        threading.Thread(target=self.accept_connections, daemon=True).start()

    def accept_connections(self) -> None:
        """Accept connections and start two threads for each."""
        while True:
            client, _ = self.listener.accept()
            try:
                server = socket.create_connection((LOOPBACK, self.port))
            except OSError:  # the superlink has been stopped
                client.close()
                continue
            threading.Thread(target=self.forward, args=(client, server, "up"), daemon=True).start()
            threading.Thread(target=self.forward, args=(server, client, "down"), daemon=True).start()

    def forward(self, source: socket.socket, target: socket.socket, direction: str) -> None:
        """Forward and count bytes until the connection is closed."""
        try:
            while data := source.recv(65536):
                setattr(self, direction, getattr(self, direction) + len(data))
                target.sendall(data)
        except OSError:
            pass
        finally:
            for end in (source, target):
                end.close()


def main() -> None:
    """Measure three nodes: first idle, then in three rounds of the template's app."""
    with tempfile.TemporaryDirectory(prefix="fs-") as home, LocalCluster(Path(home) / "flwr", Path(home) / "logs") as federation:
        app, run_dir = Path(home) / "app", Path(home) / "run"
        flower.new(app)
        federation.start_superlink()
        relay = Relay(federation.port)
        for client in range(NUM_NODES):
            federation.start_node(client, NUM_NODES, ("--insecure", "--superlink", relay.address))
        time.sleep(IDLE_SECONDS)
        idle, began = (relay.up, relay.down), time.monotonic()
        time.sleep(IDLE_SECONDS)
        idle_rate = tuple(
            (now - then) / (time.monotonic() - began) / NUM_NODES for now, then in zip((relay.up, relay.down), idle, strict=True)
        )
        before, began = (relay.up, relay.down), time.monotonic()
        run = federation.submit(app, {"rounds": NUM_ROUNDS, "run-dir": str(run_dir)})
        federation.stream_log(run).wait()
        seconds = time.monotonic() - began
        totals = (relay.up - before[0], relay.down - before[1])
        result = json.loads((run_dir / "result.json").read_text())
    for direction, total, rate in zip(("up", "down"), totals, idle_rate, strict=True):
        print(
            f"{direction}: packets {result[f'bytes_{direction}']} B, Flower's objects {result[f'flower_overhead_{direction}']} B, "
            f"in total {total} B ({NUM_NODES} nodes, {NUM_ROUNDS} rounds, {seconds:.0f} s); an idle node {rate:.0f} B/s"
        )


if __name__ == "__main__":
    main()
