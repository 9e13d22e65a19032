"""Certificates, keys, federations, and what one process says a deployment must give."""

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
from safetensors.numpy import load_file

from fedsieve.deployment.config import deployment_config
from fedsieve.deployment.flower import FLOWER_ERRORS
from fedsieve.deployment.local_cluster import CONNECTION, LocalCluster
from fedsieve.deployment.server import model_of
from fedsieve.models.sparse_model import to_safetensors
from fedsieve.runtime.batched import BatchedEngine
from fedsieve.runtime.client_data import ClientData
from fedsieve.runtime.context import RunContext
from fedsieve.runtime.rounds import Population, initial_server, train

APP = Path(__file__).parents[1] / "deployment" / "federated"
sys.path.insert(0, str(APP))
from trial import task  # noqa: E402
from trial.faults import REASONS  # noqa: E402

CLIENTS = 3
COMPLETED = "finished:completed"
CONFIG = {"clients": CLIENTS, "seed": 11, "density": 0.1, "precision": "double", "algorithm.local-steps": 4, "algorithm.batch-size": 8}


def once(factory, name, run):
    """The folder `run(folder)` filled, the same for all workers of the suite: the first runs it, the others wait and read."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        begun, ended = folder / "begun", folder / "ended"
        if not begun.exists():
            begun.touch()
            run(folder)
            ended.touch()
    assert ended.exists(), "the run did not come to its end; the first test that needed it says why"
    return folder


def batched(plan, path, replied=None):
    """A plan on the batched engine in this process: its model as it would stand on disk, its packets and rounds.

    `replied` says whose replies counted, {round: clients}; the others crossed and were not averaged.
    """
    x, y = (torch.from_numpy(np.concatenate(parts)).to(plan.dtype) for parts in zip(*map(task.rows, range(CLIENTS)), strict=True))
    rows = ClientData(x, y, [len(task.rows(client)[1]) for client in range(CLIENTS)], plan.objective, plan.algorithm.examples_per_step)
    engine = BatchedEngine(**{name: getattr(plan, name) for name in RunContext.__dataclass_fields__}, data=rows)

    def exchange(clock, packet, clients):
        came = engine(clock, packet, clients)
        return came._replace(replies=[reply for reply in came.replies if replied is None or reply.client in replied[clock.round + 1]])

    server = initial_server(plan.algorithm, plan.objective, plan.seed, plan.dtype)
    with task.recorded(path) as packets:
        population = Population(CLIENTS, range(CLIENTS))
        rounds = list(train(plan.algorithm, server, population, 1.0, exchange, plan.rounds, plan.seed, dtype=plan.dtype))
    return to_safetensors(model_of(plan, plan.algorithm.parameters(rounds[-1].server), (40,))), packets, rounds


def left(folder):
    """What a server left of one method: its model, its packets, its rounds and its result."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    packets = json.loads((folder / "packets.json").read_text())
    return (folder / "model.safetensors").read_bytes(), packets, rows, json.loads((folder / "result.json").read_text())


def weights(model, path):
    """The weights of a model file's bytes, at full length."""
    path.write_bytes(model)
    tensors = load_file(path)
    theta = np.zeros(task.OBJECTIVE.layout.size)
    theta[tensors["index"]] = tensors["value"]
    return theta


@contextmanager
def federation(logs, connection=None):
    """A federation with a short home: sockets have short names."""
    with tempfile.TemporaryDirectory(prefix="fs-") as home, LocalCluster(Path(home), logs, connection) as made:
        yield made
    assert made.leftover_processes() == [], "no process survives"


@contextmanager
def secured(folder):
    """A superlink over TLS with node authentication, and the keys of three registered nodes."""
    certificates(folder / "tls")
    with federation(folder / "logs", {"root-certificates": str(folder / "tls" / "ca.crt")}) as made:
        tls = folder / "tls"
        made.tls = ("--ssl-ca-certfile", f"{tls}/ca.crt", "--ssl-certfile", f"{tls}/server.pem", "--ssl-keyfile", f"{tls}/server.key")
        made.start_superlink((*made.tls, "--enable-supernode-auth", "--database", str(folder / "superlink.db")))
        pairs = [node_key(folder, f"node-{client}") for client in range(CLIENTS)]
        with ThreadPoolExecutor() as several:
            list(several.map(lambda pair: made.run_flwr("supernode", "register", str(pair[1]), CONNECTION), pairs))
        made.keys = [("--root-certificates", f"{tls}/ca.crt", "--auth-supernode-private-key", str(private)) for private, _ in pairs]
        yield made


def finished(made, run, seconds=600):
    """Wait for the end of a run; its status."""
    deadline = time.monotonic() + seconds
    follower = made.stream_log(run)
    while follower.poll() is None:
        assert time.monotonic() < deadline, made.log_tail(f"server-{run}")
        time.sleep(0.2)
    return made.status(run)


def complete(made, settings, simulated=None, tries=3):
    """A run to its end. Ray gives its daemon 30 seconds to start, which a busy machine may not have: then once more."""
    run = made.submit(APP, settings, simulated)
    if finished(made, run)[0] != COMPLETED:
        assert tries > 1 and "timed out during startup" in (made.logs / f"server-{run}.log").read_text(), made.log_tail(f"server-{run}")
        complete(made, settings, simulated, tries - 1)


def led(folder, methods, faults):
    """The settings of one run of several methods with their rounds, one after the other.

    Where all are honest every reply is waited for: one that is lost on a busy machine is asked for again, and is the same.
    """
    plans = {method: {"rounds": rounds, "quorum": 0.3 if method in faults else 1.0} for method, rounds in methods.items()}
    patient = {"retries": 3, "round-seconds": 150.0}
    return {"run-dir": str(folder), **patient, "test.plans": json.dumps(plans), "test.faults": json.dumps(faults)}


def faults_by_round(kinds, first=1):
    """Two bad replies a round, of clients 1 and 2; client 0 is honest."""
    return {str(first + i): {"1": one, "2": other} for i, (one, other) in enumerate(zip(kinds[::2], kinds[1::2], strict=True))}


def plan_of(method, rounds):
    return deployment_config({**CONFIG, "algorithm.name": method, "rounds": rounds}, task.OBJECTIVE)


def assert_parity(folder, method, rounds, tmp_path):
    """Packets, bytes and the model are those of the batched engine with the same replies; gives the rounds the server wrote."""
    got, passed, rows, result = left(folder)
    replied = {row["round"]: row["replied"] for row in rows}
    model, packets, done = batched(plan_of(method, rounds), tmp_path / "packets.json", replied)
    assert got == model
    assert list(dict.fromkeys(passed["sent"])) == list(dict.fromkeys(packets["sent"]))  # on a busy machine a client may be asked again
    averaged = [packets["made"][CLIENTS * i + client] for i in range(rounds) for client in replied[i + 1]]
    assert sorted(passed["made"]) == sorted(averaged) and set(averaged) <= set(passed["heard"])
    for row, each in zip(rows, done, strict=True):
        if not row["rejected"]:
            assert (row["bytes_up"], row["bytes_down"]) == (each.uplink.total, each.downlink.total)
    unread = sum(int(number) for row in rows for number in re.findall(r"oversized: (\d+) bytes", str(row["rejected"])))
    assert result["bytes_up"] == unread + sum(len(packet) // 2 for packet in passed["heard"])
    assert result["flower_overhead_up"] > 0 and result["flower_overhead_down"] > 0
    return rows


def assert_faults_named(rows, faults):
    """Every bad reply is refused with its reason, and nobody else's; on a busy machine an honest one may be missing."""
    for row in rows:
        expected = faults.get(str(row["round"]), {})
        reasons = {str(client): reason for client, reason in row["rejected"]}
        assert row["replied"] == [client for client in range(CLIENTS) if str(client) not in reasons]
        for client, kind in expected.items():
            assert REASONS[kind] in reasons[client]
        assert all(reason in FLOWER_ERRORS.values() or "no reply" in reason for client, reason in reasons.items() if client not in expected)


# Keys and certificates


def key():
    return ec.generate_private_key(ec.SECP384R1())


def write_private(path, private, form):
    path.write_bytes(private.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()))


def node_key(folder, name):
    """A node's key pair as OpenSSH writes it."""
    private = key()
    write_private(folder / name, private, serialization.PrivateFormat.OpenSSH)
    public = private.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    (folder / f"{name}.pub").write_bytes(public)
    return folder / name, folder / f"{name}.pub"


def certificates(folder):
    """An authority of our own, and its certificate for loopback."""
    now, authority, server = datetime.datetime.now(datetime.UTC), key(), key()
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
    made = {
        "ca.crt": certificate("authority", authority.public_key(), ca=True).add_extension(x509.KeyUsage(**usage), critical=True),
        "server.pem": certificate("localhost", server.public_key(), ca=False).add_extension(names, critical=False),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, builder in made.items():
        (folder / name).write_bytes(builder.sign(authority, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
    write_private(folder / "server.key", server, serialization.PrivateFormat.PKCS8)
