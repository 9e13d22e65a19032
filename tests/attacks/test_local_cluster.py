"""Another process of this machine, at the ports of `fedsieve flower run`."""

import http.client
import os
import signal
import stat
import subprocess
import sys
import time
from contextlib import closing, suppress
from pathlib import Path

import pytest
from flwr.proto.runtime_pb2 import AcquireTaskRequest
from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE

from fedsieve.cli.main import main
from fedsieve.deployment.local_cluster import CONNECTION, find_executable, parse_json
from helpers.flower import APP, local_cluster, node_key

pytestmark = [pytest.mark.long, pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="the system has no /proc")]


@pytest.fixture(scope="module")
def cluster_and_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("local")
    with local_cluster(folder / "logs") as cluster:
        cluster.start_superlink()
        cluster.start_node(0, 1)
        yield cluster, folder


def run_flwr_with(cluster, home, *arguments):
    home.mkdir(exist_ok=True)
    (home / "config.toml").write_text(f'[superlink.{CONNECTION}]\naddress = "127.0.0.1:{cluster.port}"\ninsecure = true\n')
    environment = {**cluster.environment, "FLWR_HOME": str(home)}
    done = subprocess.run([find_executable("flwr"), *arguments], capture_output=True, text=True, env=environment, check=False)
    return done.stdout + done.stderr


def test_a_process_without_the_token_submits_no_run_and_registers_no_node(cluster_and_folder):
    cluster, folder = cluster_and_folder
    _, public_key = node_key(folder, "stranger")
    for arguments in (("run", str(APP), CONNECTION, "--format", "json"), ("supernode", "register", str(public_key), CONNECTION)):
        assert "Authentication failed" in run_flwr_with(cluster, folder / "stranger-home", *arguments)
    account = folder / "account-home"
    account.mkdir()
    (account / "credentials.yaml").write_text((cluster.home / "credentials.yaml").read_text())
    assert parse_json(run_flwr_with(cluster, account, "run", str(APP), CONNECTION, "--format", "json"))["success"], "the token is the key"
    assert len(parse_json(cluster.run_flwr("list", CONNECTION, "--format", "json"))["runs"]) == 1


def test_a_process_without_the_token_takes_no_task_of_server_or_client(cluster_and_folder):
    cluster, _ = cluster_and_folder
    (node,) = [words[words.index("--port") + 1] for words in command_lines(cluster) if "--node-config" in words]
    for port in (cluster.port, int(node)):
        body = AcquireTaskRequest(supported_task_types=["serverapp", "clientapp"]).SerializeToString()
        with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as connection:
            connection.request("POST", "/v1/runtime/acquire-task", body, {"content-type": PROTOBUF_MEDIA_TYPE})
            response = connection.getresponse()
            assert response.status == 401, (port, response.read())


def command_lines(cluster):
    """The command lines of all processes of the cluster, which every user of the machine can read."""
    lines = []
    for pid in cluster.leftover_processes():
        with suppress(OSError):
            lines.append(Path(f"/proc/{pid}/cmdline").read_text().split("\0"))
    return lines


def test_the_token_is_new_in_every_run_and_only_its_owner_can_read_it(cluster_and_folder, tmp_path):
    cluster, _ = cluster_and_folder
    token = cluster.token_file.read_text()
    with local_cluster(tmp_path / "logs") as other:
        assert len(token) > 40 and token != other.token_file.read_text()
    for name in ("token", "credentials.yaml"):
        assert stat.S_IMODE((cluster.home / name).stat().st_mode) == 0o600
    assert token not in str(command_lines(cluster)), "command lines are public"
    assert all(token not in log.read_text() for log in cluster.logs.iterdir())


def test_the_token_of_a_task_is_on_no_command_line(cluster_and_folder):
    """With the token of a server app one may submit runs."""
    cluster, _ = cluster_and_folder
    cluster.submit(APP, {"start-seconds": 60.0})
    deadline = time.monotonic() + 120
    while not (apps := [words for words in command_lines(cluster) if any(word.endswith("flwr-serverapp") for word in words)]):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    for words in apps:
        assert "--token" not in words
        path = Path(words[words.index("--token-file") + 1])
        assert len(path.read_text()) > 20 and stat.S_IMODE(path.stat().st_mode) == 0o600


def test_the_superlink_imports_nothing_from_the_working_directory(cluster_and_folder):
    cluster, _ = cluster_and_folder
    (superlink,) = [arguments for arguments in command_lines(cluster) if "fedsieve.deployment.superlink" in arguments]
    assert superlink[1] == "-P"


def test_a_killed_superlink_is_one_line_with_the_way_to_resume(tmp_path):
    assert main(["flower", "new", str(tmp_path / "app")]) == 0
    command = [sys.executable, "-m", "fedsieve", "flower", "run", "app", "--nodes", "1", "--run-config", "rounds=500", "--out", "run"]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
        metrics = tmp_path / "run" / "metrics.jsonl"
        while not (metrics.exists() and metrics.read_text()):
            assert process.poll() is None
            time.sleep(0.2)
        (superlink,) = [
            int(path.parent.name)
            for path in Path("/proc").glob("[0-9]*/cmdline")
            if b"fedsieve.deployment.superlink" in path.read_bytes() and parent_of(path.parent) == process.pid
        ]
        os.kill(superlink, signal.SIGKILL)
        error = process.communicate(timeout=120)[1]
    assert process.returncode == 1 and "Traceback" not in error
    assert "the superlink has ended with exit code -9" in error.splitlines()[-1]
    assert error.endswith("resume with: fedsieve flower run app --resume run\n")


def parent_of(folder):
    return int((folder / "stat").read_text().rpartition(")")[2].split()[1])
