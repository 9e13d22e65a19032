"""Nothing that a federation started outlives it, whatever ends it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fedsieve.deployment.local_cluster import LocalCluster

PARENT = "import subprocess, time; subprocess.Popen(['sleep', '60'], env={}, process_group=0); print('started', flush=True); time.sleep(60)"
pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="the system does not tell which processes there are")


def gone(number):
    """Whether a process ends soon; of one that waits for its parent to hear of it no command is left."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            if not Path(f"/proc/{number}/cmdline").read_bytes():
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.05)
    return False


def test_a_process_without_its_environment_in_a_group_of_its_own_is_stopped_too(tmp_path):
    with LocalCluster(tmp_path / "home", tmp_path / "logs") as made:
        made.start_process("parent", "python3", "-c", PARENT)
        while "started" not in (tmp_path / "logs" / "parent.log").read_text():
            time.sleep(0.05)
        running = made.leftover_processes()
        assert len(running) == 2 and os.getpid() not in running
    assert made.leftover_processes() == []


def test_what_was_started_ends_when_the_command_is_killed_by_force(tmp_path):
    code = (
        "import sys; from pathlib import Path; from fedsieve.deployment.local_cluster import LocalCluster; "
        "print(Federation(Path(sys.argv[1]), Path(sys.argv[1])).start('node', 'sleep', '60').pid, flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as starter:
        node = int(starter.stdout.readline())
        os.kill(node, 0)
        starter.send_signal(signal.SIGKILL)
    assert gone(node)
