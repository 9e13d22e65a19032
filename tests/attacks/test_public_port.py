"""A stranger with nothing but the CA certificate, at the ports of docs/deploy.md: nginx in front of a superlink, over TLS on loopback."""

import http.client
import os
import re
import shlex
import shutil
import ssl
import subprocess
import time
from contextlib import closing
from pathlib import Path

import pytest
from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE

from fedsieve.deployment.local_cluster import CONNECTION, find_executable, find_free_port, is_listening, parse_json
from helpers.flower import APP, CLIENTS, node_key, run_to_completion, secure_cluster, server_settings

PAGE = (Path(__file__).parents[2] / "docs" / "deploy.md").read_text()
NGINX = shutil.which("nginx", path=os.pathsep.join([os.environ["PATH"], "/usr/sbin", "/usr/local/sbin"]))
BUFFERS = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(NGINX is None, reason="nginx is not installed; the workflow of the long tests installs it"),
]


@pytest.fixture(scope="module")
def deployment(tmp_path_factory):
    """The superlink, three registered nodes that connect to nginx, and nginx with the configuration of the page; yields both ports."""
    folder = tmp_path_factory.mktemp("public")
    with secure_cluster(folder, lambda cluster: start_documented_superlink(cluster, folder)) as cluster:
        cluster.public_port = start_nginx(cluster, folder)
        for client in range(CLIENTS):
            cluster.start_node(client, CLIENTS, ("--superlink", f"127.0.0.1:{cluster.public_port}", *cluster.keys[client]))
        yield cluster, folder


def start_documented_superlink(cluster, folder):
    (command,) = re.findall(r"    (flower-superlink .*?)\n\n", PAGE, flags=re.DOTALL)
    here = {"8000": str(cluster.port), "/var/lib/flower/superlink.db": str(folder / "superlink.db")}
    here |= {name: str(folder / "tls" / name) for name in ("ca.crt", "server.pem", "server.key")}
    words = shlex.split(command.replace("\\\n", " "))
    assert here.keys() <= set(words) and "127.0.0.1" in words
    process = cluster.start_process("superlink", *(here.get(word, word) for word in words))
    while not is_listening(cluster.port):
        assert process.poll() is None, cluster.log_tail("superlink")
        time.sleep(0.1)


def start_nginx(cluster, folder):
    (server,) = re.findall(r"```nginx\n(.*?)```", PAGE, flags=re.DOTALL)
    port = find_free_port()
    for documented, here in (
        ("8443", f"127.0.0.1:{port}"),
        ("127.0.0.1:8000", f"127.0.0.1:{cluster.port}"),
        ("/etc/fedsieve", f"{folder}/tls"),
    ):
        assert documented in server
        server = server.replace(documented, here)
    paths = " ".join(f"{name}_temp_path {folder}/{name};" for name in BUFFERS)
    (folder / "nginx.conf").write_text(f"daemon off; pid {folder}/pid; events {{}} http {{ access_log off; {paths} {server} }}")
    assert NGINX is not None
    process = cluster.start_process("nginx", NGINX, "-e", str(folder / "nginx.log"), "-c", str(folder / "nginx.conf"))
    while not is_listening(port):
        assert process.poll() is None, (folder / "nginx.log").read_text()
        time.sleep(0.1)
    return port


def run_as_stranger(cluster, folder, port, *arguments):
    """The output of a `flwr` command of somebody who has the CA certificate."""
    home = folder / f"stranger-{port}"
    home.mkdir(exist_ok=True)
    (home / "config.toml").write_text(f'[superlink.target]\naddress = "127.0.0.1:{port}"\nroot-certificates = "{folder}/tls/ca.crt"\n')
    environment = {**cluster.environment, "FLWR_HOME": str(home)}
    done = subprocess.run([find_executable("flwr"), *arguments], capture_output=True, text=True, env=environment, check=False)
    return done.stdout + done.stderr


def nodes_and_runs(cluster):
    nodes = parse_json(cluster.run_flwr("supernode", "list", CONNECTION, "--format", "json"))["nodes"]
    return len(nodes), len(parse_json(cluster.run_flwr("list", CONNECTION, "--format", "json"))["runs"])


def request(port, folder, path, method="POST"):
    """The status of a request whose path is sent as it is."""
    context = ssl.create_default_context(cafile=folder / "tls" / "ca.crt")
    with closing(http.client.HTTPSConnection("127.0.0.1", port, context=context, timeout=30)) as connection:
        connection.putrequest(method, path)
        connection.putheader("content-type", PROTOBUF_MEDIA_TYPE)
        connection.putheader("content-length", "0")
        connection.endheaders()
        return connection.getresponse().status


@pytest.mark.parametrize("attack", ["register", "run"])
def test_a_stranger_with_the_certificate_registers_no_node_and_submits_no_run(deployment, attack):
    cluster, folder = deployment
    _, public_key = node_key(folder, f"stranger-{attack}")
    arguments = {"register": ("supernode", "register", str(public_key), "target"), "run": ("run", str(APP), "target", "--format", "json")}
    before = nodes_and_runs(cluster)
    assert "403 Forbidden" in run_as_stranger(cluster, folder, cluster.public_port, *arguments[attack])
    assert nodes_and_runs(cluster) == before
    run_as_stranger(cluster, folder, cluster.port, *arguments[attack])
    assert nodes_and_runs(cluster) != before, "on the port that only the server's machine reaches, the same attack succeeds"


def test_nothing_but_the_calls_of_nodes_passes_nginx(deployment):
    cluster, folder = deployment
    documented = subprocess.run(
        [find_executable("python"), "-c", "from flwr.superlink.main import create_app; print(*create_app().openapi()['paths'])"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    others = [path for path in documented if not path.startswith("/v1/fleet/")]
    assert len(others) > 30 and "/v1/control/start-run" in others and "/v1/runtime/acquire-task" in others
    tricks = [
        "/v1/fleet/../control/start-run",
        "/v1/fleet/..%2fcontrol/start-run",
        "/v1/fleet/%2e%2e/control/start-run",
        "/v1/control/start-run/../../fleet/get-run/../../control/start-run",
        "/v1/fleet//../control/start-run",
        "//v1/control/start-run",
        "/v1/control/start-run?/v1/fleet/get-run",
        "/V1/control/start-run",
        "https://localhost/v1/control/start-run",
    ]
    for path in [*others, *tricks, "/docs", "/openapi.json", "/"]:
        for method in ("GET", "POST"):
            assert request(cluster.public_port, folder, path, method) in {400, 403}, path
    assert request(cluster.port, folder, "/v1/control/list-runs") == 200  # what is refused above


def test_a_key_that_is_not_registered_is_refused_through_nginx(deployment):
    cluster, folder = deployment
    private, _ = node_key(folder, "unregistered")
    keys = ("--root-certificates", f"{folder}/tls/ca.crt", "--auth-supernode-private-key", str(private))
    node = cluster.start_node(0, CLIENTS, ("--superlink", f"127.0.0.1:{cluster.public_port}", *keys), name="unregistered")
    assert node.wait(60) != 0
    assert "SuperNode ID" not in cluster.log_tail("unregistered")


def test_a_run_through_nginx_completes(deployment):
    cluster, folder = deployment
    run_to_completion(cluster, server_settings(folder / "run", {"flops-pa": 1}, {}))
    assert (folder / "run" / "flops-pa" / "model.safetensors").exists()
