"""No process that a local cluster started outlives it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fedsieve.deployment.local_cluster import LocalCluster

PARENT = "import subprocess, time; subprocess.Popen(['sleep', '60'], env={}, process_group=0); print('started', flush=True); time.sleep(60)"
pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="the system has no /proc")


def ends_soon(pid):
    """Whether a process ends within 30 seconds. A zombie has an empty command line."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            if not Path(f"/proc/{pid}/cmdline").read_bytes():
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.05)
    return False


def test_a_process_with_another_environment_and_group_is_stopped(tmp_path):
    with LocalCluster(tmp_path / "home", tmp_path / "logs") as cluster:
        cluster.start_process("parent", "python3", "-c", PARENT)
        while "started" not in (tmp_path / "logs" / "parent.log").read_text():
            time.sleep(0.05)
        running = cluster.leftover_processes()
        assert len(running) == 2 and os.getpid() not in running
    assert cluster.leftover_processes() == []


def test_nodes_end_when_their_parent_is_killed(tmp_path):
    code = (
        "import sys; from pathlib import Path; from fedsieve.deployment.local_cluster import LocalCluster; "
        "print(LocalCluster(Path(sys.argv[1]), Path(sys.argv[1])).start_process('node', 'sleep', '60').pid, flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as starter:
        node = int(starter.stdout.readline())
        os.kill(node, 0)
        starter.send_signal(signal.SIGKILL)
    assert ends_soon(node)
