"""A superlink and its nodes as processes on this machine. This file does not import flwr.

Other processes of the machine reach the ports too. A token in a file of the owner, new in every run, keeps them from submitting runs and
from taking over the tasks of server and clients.
"""

import base64
import ctypes
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from fedsieve.storage.atomic import open_own_file

LOOPBACK = "127.0.0.1"
FLOWER_COMMANDS = ("flower-superlink", "flower-supernode", "flwr")
CONNECTION = "here"
"""Name of the superlink in Flower's configuration."""
RUN_MODULE = ("-P", "-m")
"""Run a module with Python, which looks for nothing in the working directory."""
TOKEN_FILE_VARIABLE = "FEDSIEVE_TOKEN_FILE"
"""Environment variable with the path of the token."""
ACCOUNT_KEYS = {"authn-type": "oidc", "oidc-access-token": "", "oidc-refresh-token": "none"}
"""What Flower stores of an account; the access token is filled in."""
NO_TELEMETRY = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0"}
START_SECONDS = 120.0
MAX_RAY_HOME_LENGTH = 38
"""Longest path to use as Ray's directory: Ray adds 68 characters to it, and a socket's path has at most 107."""
STOP_SECONDS = 10.0
LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
PR_SET_PDEATHSIG = 1


class LocalClusterError(RuntimeError):
    """A process of the cluster failed."""


class LocalCluster:
    """Flower processes with one `FLWR_HOME` and one folder of logs. Leaving the context ends them and their child processes."""

    def __init__(self, home: Path, logs: Path, connection: Mapping[str, Any] | None = None) -> None:
        self.home = home
        self.logs = logs
        self.port = find_free_port()
        self.processes: dict[str, subprocess.Popen] = {}
        self.sessions: set[int] = set()
        address = f"{LOOPBACK}:{self.port}"
        settings = {"address": address, **(connection or {"insecure": True})}
        self.client_tls = ("--root-certificates", settings["root-certificates"]) if "root-certificates" in settings else ("--insecure",)
        lines = [f"[superlink.{CONNECTION}]", *(f"{name} = {json.dumps(value)}" for name, value in settings.items())]
        home.mkdir(parents=True, exist_ok=True)
        logs.mkdir(parents=True, exist_ok=True)
        (home / "config.toml").write_text("\n".join(lines) + "\n")
        self.token_file = home / "token"
        token = secrets.token_urlsafe(32)
        account = {
            f"flower.account-auth.{address}.{key}": base64.b64encode((value or token).encode()).decode()
            for key, value in ACCOUNT_KEYS.items()
        }
        for path, text in ((self.token_file, token), (home / "credentials.yaml", json.dumps(account))):
            with os.fdopen(open_own_file(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
                file.write(text)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def start_superlink(self, arguments: Sequence[str] = ("--insecure",)) -> None:
        """Start the superlink and wait until it listens."""
        address = ("--host", LOOPBACK, "--port", str(self.port), "--disable-runtime-dependency-installation")
        process = self.start_process(
            "superlink", sys.executable, *RUN_MODULE, "fedsieve.deployment.superlink", *address, *self.own_apps, *arguments
        )
        deadline = time.monotonic() + START_SECONDS
        while not is_listening(self.port):
            if process.poll() is not None or time.monotonic() > deadline:
                raise LocalClusterError(
                    f"the superlink does not listen on port {self.port}; the end of its log: {self.log_tail('superlink')}"
                )
            time.sleep(0.1)
        self.start_app_starter("superlink", self.port, self.client_tls)

    @property
    def own_apps(self) -> tuple[str, ...]:
        """Options of superlink and nodes that leave server and client apps to those who know the token."""
        return ("--isolation", "process", "--superexec-auth-secret-file", str(self.token_file))

    def start_app_starter(self, name: str, port: int, tls: Sequence[str]) -> None:
        """Start the process that starts the apps of the superlink or of a node, and ends with it."""
        address = ("--runtime-api-address", f"{LOOPBACK}:{port}", "--parent-pid", str(self.processes[name].pid))
        secret = ("--superexec-auth-secret-file", str(self.token_file))
        self.start_process(f"{name}-apps", sys.executable, *RUN_MODULE, "fedsieve.deployment.superexec", *address, *tls, *secret)

    def start_node(
        self, client: int, num_clients: int, arguments: Sequence[str] = ("--insecure",), name: str | None = None
    ) -> subprocess.Popen:
        """Start the node of one client."""
        name, port = name or f"node-{client}", find_free_port()
        addresses = ("--superlink", f"{LOOPBACK}:{self.port}", "--host", LOOPBACK, "--port", str(port))
        config = ("--node-config", f"partition-id={client} num-partitions={num_clients}")
        process = self.start_process(name, "flower-supernode", *addresses, *config, *self.own_apps, *arguments)
        self.start_app_starter(name, port, ("--insecure",))
        return process

    def start_process(self, name: str, command: str, *arguments: str) -> subprocess.Popen:
        """Start a process in its own process group, so that its child processes can be ended with it."""
        if name in self.processes:
            self.kill(name)
        with os.fdopen(open_own_file(self.logs / f"{name}.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab") as log:
            process = subprocess.Popen(
                [find_executable(command), *arguments],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env=self.environment,
                start_new_session=True,
                preexec_fn=end_with_parent if LIBC else None,
            )
        self.processes[name] = process
        self.sessions.add(process.pid)
        return process

    def run_flwr(self, *arguments: str) -> str:
        """Run a `flwr` command and return its output."""
        command = [find_executable("flwr"), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, env=self.environment, check=False)
        if done.returncode != 0:
            raise LocalClusterError(f"flwr {' '.join(arguments)} failed: {' '.join((done.stderr or done.stdout).split())}")
        return done.stdout

    def submit(self, app: Path, settings: Mapping[str, Any], num_simulated: int | None = None) -> str:
        """Start a run of an app and return its id; `num_simulated` is the number of nodes in a simulation."""
        run_config = self.home / "run.toml"  # on the command line Flower would split text at blanks
        run_config.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in settings.items()))
        arguments = ["run", str(app), CONNECTION, "--format", "json", "--run-config", str(run_config)]
        if num_simulated is not None:
            arguments += ["--federation-config", f"num-supernodes={num_simulated} client-resources-num-cpus=1"]
        reply = parse_json(self.run_flwr(*arguments))
        if not reply.get("success"):
            raise LocalClusterError(f"Flower does not start the run: {reply.get('error-message', reply)}")
        return str(reply["run-id"])

    def stream_log(self, run_id: str) -> subprocess.Popen:
        """Start a process that writes the server's log and ends with the run."""
        return self.start_process(f"server-{run_id}", "flwr", "log", run_id, CONNECTION, "--stream")

    def status(self, run_id: str) -> tuple[str, str]:
        """Return the status of a run and its details; Flower's exit codes do not tell whether a run failed."""
        if (exit_code := self.processes["superlink"].poll()) is not None:
            return "unknown", f"the superlink has ended with exit code {exit_code}"
        reply = parse_json(self.run_flwr("list", CONNECTION, "--run-id", run_id, "--format", "json"))
        if not reply.get("runs"):
            return "unknown", f"the superlink does not list it: {reply.get('error-message', reply)}"
        return reply["runs"][0]["status"], reply["runs"][0]["status-details"]

    def log_tail(self, name: str) -> str:
        """Return the end of a process's log, in one line."""
        return " ".join((self.logs / f"{name}.log").read_text(errors="replace").split())[-500:]

    def kill(self, name: str) -> None:
        """Kill a process and the apps that it started, with SIGKILL."""
        for each in (name, f"{name}-apps"):
            if (process := self.processes.pop(each, None)) is not None:
                signal_group(process, signal.SIGKILL)
                process.wait()

    def stop(self) -> None:
        """Stop all processes: SIGTERM first, then SIGKILL."""
        self.leftover_processes()  # records the sessions while all processes still run
        for process in self.processes.values():
            signal_group(process, signal.SIGTERM)
        deadline = time.monotonic() + STOP_SECONDS
        while any(is_alive(process) for process in self.processes.values()) and time.monotonic() < deadline:
            time.sleep(0.1)
        for name in list(self.processes):
            self.kill(name)
        # Ray's daemons leave the process group in which they were started.
        while (leftover := self.leftover_processes()) and time.monotonic() < deadline + STOP_SECONDS:
            for pid in leftover:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)

    def leftover_processes(self) -> list[int]:
        """Return the ids of this cluster's running processes: those with its `FLWR_HOME`, and all others of their sessions.

        Ray's agents overwrite their environment, so only their session identifies them. Without /proc the list is empty.
        """
        mark = f"FLWR_HOME={self.home}".encode()
        sessions: dict[int, int] = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                pid = int(folder.name)
                if not (folder / "cmdline").read_bytes():  # a zombie
                    continue
                sessions[pid] = os.getsid(pid)
                if mark in (folder / "environ").read_bytes().split(b"\0"):
                    self.sessions.add(sessions[pid])
        self.sessions.discard(os.getsid(0))  # `flwr` commands run in the session of this process
        return [pid for pid, session in sessions.items() if session in self.sessions]

    @property
    def environment(self) -> dict[str, str]:
        """The environment of this process, with this Python's commands first in PATH, Flower's directory, the token, and no telemetry."""
        path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
        changes = {"PATH": path, "FLWR_HOME": str(self.home), "PYTHONUNBUFFERED": "1"}
        if len(str(self.home)) < MAX_RAY_HOME_LENGTH:
            changes["RAY_TMPDIR"] = str(self.home)
        changes[TOKEN_FILE_VARIABLE] = str(self.token_file)
        return {**os.environ, **NO_TELEMETRY, **changes}


def end_with_parent() -> None:
    """Ask Linux to end the calling process when its parent ends. Runs in the child before its program starts."""
    assert LIBC is not None
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def find_executable(command: str) -> str:
    """Return the path of a command, first in this Python's environment."""
    path = shutil.which(command, path=str(Path(sys.executable).parent)) or shutil.which(command)
    if path is None:
        raise LocalClusterError(f"{command} is not installed; install Flower with: pip install 'fedsieve[flower]'")
    return path


def parse_json(text: str) -> dict[str, Any]:
    """Parse the JSON object in Flower's output, which may start with other lines."""
    return json.loads(text[text.index("{") :])


def find_free_port() -> int:
    """Return a free port."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return probe.getsockname()[1]


def is_listening(port: int) -> bool:
    """Return whether a process listens on a port of this machine."""
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex((LOOPBACK, port)) == 0


def is_alive(process: subprocess.Popen) -> bool:
    """Return whether a process of the group still exists."""
    process.poll()
    try:
        os.killpg(process.pid, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def signal_group(process: subprocess.Popen, signal_number: signal.Signals) -> None:
    """Send a signal to the group of a process."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal_number)
