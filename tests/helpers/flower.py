"""Certificates, keys, local clusters, and the reference run on the batched engine."""

import datetime
import fcntl
import ipaddress
import json
import os
import re
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fedsieve.deployment.deployment_config import deployment_config
from fedsieve.deployment.flower_messages import FLOWER_ERRORS
from fedsieve.deployment.local_cluster import CONNECTION, LocalCluster
from fedsieve.deployment.server import deployed_model
from fedsieve.models.sparse_model import to_safetensors
from fedsieve.runtime.batched import BatchedEngine
from fedsieve.runtime.client_data import ClientData
from fedsieve.runtime.rounds import Population, initial_server, train
from fedsieve.storage.run_directory import read_metrics

APP = Path(__file__).parents[1] / "deployment" / "federated"
sys.path.insert(0, str(APP))
from trial import task  # noqa: E402
from trial.faults import REASONS  # noqa: E402

CLIENTS = 3
COMPLETED = "finished:completed"
CONFIG = {"clients": CLIENTS, "seed": 11, "density": 0.1, "precision": "double", "algorithm.local-steps": 4, "algorithm.batch-size": 8}


def run_once_across_workers(factory, name, run):
    """The folder that `run(folder)` filled, shared by all pytest workers: the first one runs it, the others wait."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        started, ended = folder / "started", folder / "ended"
        if not started.exists():
            started.touch()
            run(folder)
            ended.touch()
    assert ended.exists(), "the run failed; see the first test that needed it"
    return folder


def run_batched(deployment, path, replied=None):
    """Run a deployment on the batched engine in this process; return its model file, its packets and its rounds.

    `replied` is {round: clients whose replies are aggregated}; None aggregates all.
    """
    examples = [task.load_examples(client) for client in range(CLIENTS)]
    x, y = (torch.from_numpy(np.concatenate(arrays)).to(deployment.dtype) for arrays in zip(*examples, strict=True))
    data = ClientData(x, y, [len(y) for _, y in examples], deployment.objective, deployment.algorithm.workload.batch_size)
    engine = BatchedEngine(context=deployment, data=data)

    def exchange(clock, packet, clients):
        result = engine(clock, packet, clients)
        return result._replace(replies=[reply for reply in result.replies if replied is None or reply.client in replied[clock.round + 1]])

    algorithm, seed, dtype = deployment.algorithm, deployment.seed, deployment.dtype
    server = initial_server(algorithm, deployment.objective, seed, dtype)
    with task.record_packets(path) as packets:
        population = Population(CLIENTS, range(CLIENTS))
        rounds = list(train(algorithm, server, population, 1.0, exchange, deployment.rounds, seed, dtype=dtype))
    return to_safetensors(deployed_model(deployment, algorithm.parameters(rounds[-1].server), (40,))), packets, rounds


def read_server_output(folder):
    """The model, the packets, the rows of metrics and the result that a server wrote for one algorithm."""
    rows = read_metrics(folder)
    packets = json.loads((folder / "packets.json").read_text())
    return (folder / "model.safetensors").read_bytes(), packets, rows, json.loads((folder / "result.json").read_text())


@contextmanager
def local_cluster(logs, connection=None):
    """A LocalCluster with a short home directory, because socket names have a maximum length."""
    with tempfile.TemporaryDirectory(prefix="fs-") as home, LocalCluster(Path(home), logs, connection) as cluster:
        yield cluster
    assert cluster.leftover_processes() == [], "no process survives"


@contextmanager
def secure_cluster(folder, start_superlink=None):
    """A superlink over TLS with node authentication, and the keys of three registered nodes.

    `start_superlink(cluster)` starts another superlink than that of the cluster, which asks for a token.
    """
    write_certificates(folder / "tls")
    with local_cluster(folder / "logs", {"root-certificates": str(folder / "tls" / "ca.crt")}) as cluster:
        tls = folder / "tls"
        cluster.tls = ("--ssl-ca-certfile", f"{tls}/ca.crt", "--ssl-certfile", f"{tls}/server.pem", "--ssl-keyfile", f"{tls}/server.key")
        if start_superlink is None:
            cluster.start_superlink((*cluster.tls, "--enable-supernode-auth", "--database", str(folder / "superlink.db")))
        else:
            start_superlink(cluster)
        pairs = [node_key(folder, f"node-{client}") for client in range(CLIENTS)]
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda client: register_node(cluster, pairs[client][1], f"client-{client}"), range(CLIENTS)))
        cluster.keys = [("--root-certificates", f"{tls}/ca.crt", "--auth-supernode-private-key", str(private)) for private, _ in pairs]
        yield cluster


def register_node(cluster, public_key, name):
    cluster.run_flwr("supernode", "register", str(public_key), CONNECTION, "--name", name)


def wait_for_run(cluster, run, seconds=600):
    """Wait for the end of a run; return its status."""
    deadline = time.monotonic() + seconds
    follower = cluster.stream_log(run)
    while follower.poll() is None:
        assert time.monotonic() < deadline, cluster.log_tail(f"server-{run}")
        time.sleep(0.2)
    return cluster.status(run)


def run_to_completion(cluster, settings, simulated=None, tries=3):
    """Run the app to its end. Ray gives its daemon 30 seconds to start, which a busy machine may miss; then the run is repeated."""
    run = cluster.submit(APP, settings, simulated)
    if wait_for_run(cluster, run)[0] != COMPLETED:
        log = (cluster.logs / f"server-{run}.log").read_text()
        assert tries > 1 and "timed out during startup" in log, cluster.log_tail(f"server-{run}")
        run_to_completion(cluster, settings, simulated, tries - 1)


def server_settings(folder, rounds_by_algorithm, faults):
    """The run config for several algorithms, one after the other.

    If all clients are honest the quorum is 1: a reply that is lost on a busy machine is requested again, and is the same.
    """
    settings = {name: {"rounds": rounds, "quorum": 0.3 if name in faults else 1.0} for name, rounds in rounds_by_algorithm.items()}
    waiting = {"retries": 3, "round-seconds": 150.0}
    return {"run-dir": str(folder), **waiting, "test.algorithms": json.dumps(settings), "test.faults": json.dumps(faults)}


def faults_by_round(kinds, first=1):
    """Two bad replies a round, of clients 1 and 2; client 0 is honest."""
    return {str(first + i): {"1": one, "2": other} for i, (one, other) in enumerate(zip(kinds[::2], kinds[1::2], strict=True))}


def build_deployment(algorithm, rounds):
    return deployment_config({**CONFIG, "algorithm.name": algorithm, "rounds": rounds}, task.OBJECTIVE)


def assert_parity(folder, algorithm, rounds, tmp_path):
    """Packets, bytes and model equal those of the batched engine with the same replies; return the rows of metrics."""
    deployed_model, deployed_packets, rows, result = read_server_output(folder)
    replied = {row["round"]: row["replied"] for row in rows}
    model, packets, batched_rounds = run_batched(build_deployment(algorithm, rounds), tmp_path / "packets.json", replied)
    assert deployed_model == model
    unique_broadcasts = [list(dict.fromkeys(each["broadcasts"])) for each in (deployed_packets, packets)]
    assert unique_broadcasts[0] == unique_broadcasts[1]  # on a busy machine a broadcast may be sent again
    aggregated = [packets["replies"][CLIENTS * i + client] for i in range(rounds) for client in replied[i + 1]]
    assert sorted(deployed_packets["replies"]) == sorted(aggregated) and set(aggregated) <= set(deployed_packets["decoded"])
    for row, each in zip(rows, batched_rounds, strict=True):
        if not row["rejected"]:
            assert (row["bytes_up"], row["bytes_down"]) == (each.uplink.total, each.downlink.total)
    undecoded = sum(int(number) for row in rows for number in re.findall(r"oversized: (\d+) bytes", str(row["rejected"])))
    assert result["bytes_up"] == undecoded + sum(len(packet) // 2 for packet in deployed_packets["decoded"])
    assert result["flower_overhead_up"] > 0 and result["flower_overhead_down"] > 0
    return rows


def assert_faults_named(rows, faults):
    """Every bad reply is rejected with its reason; on a busy machine an honest reply may be missing."""
    for row in rows:
        expected = faults.get(str(row["round"]), {})
        reasons = {str(client): reason for client, reason in row["rejected"]}
        assert row["replied"] == [client for client in range(CLIENTS) if str(client) not in reasons]
        for client, kind in expected.items():
            assert REASONS[kind] in reasons[client]
        assert all(reason in FLOWER_ERRORS.values() or "no reply" in reason for client, reason in reasons.items() if client not in expected)


# Keys and certificates


def generate_key():
    return ec.generate_private_key(ec.SECP384R1())


def write_private(path, private, form):
    path.write_bytes(private.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()))


def node_key(folder, name):
    """Write a node's key pair in OpenSSH's format; return both paths."""
    private = generate_key()
    write_private(folder / name, private, serialization.PrivateFormat.OpenSSH)
    public = private.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    (folder / f"{name}.pub").write_bytes(public)
    return folder / name, folder / f"{name}.pub"


def write_certificates(folder):
    """Write a certificate authority and its certificate for loopback."""
    now, authority, server = datetime.datetime.now(datetime.UTC), generate_key(), generate_key()
    day = datetime.timedelta(days=1)
    issuer = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "authority")])

    def certificate(name, public, ca):
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        builder = x509.CertificateBuilder(issuer, subject, public, x509.random_serial_number(), now - day, now + day)
        builder = builder.add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
        builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        return builder.add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()), critical=False)

    usage = dict.fromkeys(("content_commitment", "key_encipherment", "data_encipherment", "key_agreement"), False)
    usage |= {"digital_signature": True, "key_cert_sign": True, "crl_sign": True, "encipher_only": False, "decipher_only": False}
    names = x509.SubjectAlternativeName([x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    builders = {
        "ca.crt": certificate("authority", authority.public_key(), ca=True).add_extension(x509.KeyUsage(**usage), critical=True),
        "server.pem": certificate("localhost", server.public_key(), ca=False).add_extension(names, critical=False),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, builder in builders.items():
        (folder / name).write_bytes(builder.sign(authority, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
    write_private(folder / "server.key", server, serialization.PrivateFormat.PKCS8)
