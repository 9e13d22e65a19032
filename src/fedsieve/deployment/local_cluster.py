"""A Flower federation on this machine: a superlink and its nodes as processes, on loopback, stopped together. No flwr imported here."""

import ctypes
import json
import os
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

LOOPBACK = "127.0.0.1"
FLOWER_COMMANDS = ("flower-superlink", "flower-supernode", "flwr")
CONNECTION = "here"
"""What the superlink is called in Flower's configuration."""
NO_TELEMETRY = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0"}
START_SECONDS = 120.0
MAX_RAY_HOME_LENGTH = 38
"""Ray puts sockets 68 letters below its folder, and their names may have 107; in a deeper one it keeps its own."""
STOP_SECONDS = 10.0
LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
PR_SET_PDEATHSIG = 1


class LocalClusterError(RuntimeError):
    """A process of the federation did not do what it was started for."""


class LocalCluster:
    """Processes with one `FLWR_HOME` and one folder of logs. Leaving the context ends all of them, and what they started."""

    def __init__(self, home: Path, logs: Path, connection: Mapping[str, Any] | None = None) -> None:
        self.home = home
        self.logs = logs
        self.port = find_free_port()
        self.processes: dict[str, subprocess.Popen] = {}
        self.sessions: set[int] = set()
        settings = {"address": f"{LOOPBACK}:{self.port}", **(connection or {"insecure": True})}
        lines = [f"[superlink.{CONNECTION}]", *(f"{name} = {json.dumps(value)}" for name, value in settings.items())]
        home.mkdir(parents=True, exist_ok=True)
        logs.mkdir(parents=True, exist_ok=True)
        (home / "config.toml").write_text("\n".join(lines) + "\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def start_superlink(self, arguments: Sequence[str] = ("--insecure",)) -> None:
        """Start the superlink and wait until it listens."""
        where = ("--host", LOOPBACK, "--port", str(self.port), "--disable-runtime-dependency-installation")
        process = self.start_process("superlink", "flower-superlink", *where, *arguments)
        deadline = time.monotonic() + START_SECONDS
        while not is_listening(self.port):
            if process.poll() is not None or time.monotonic() > deadline:
                raise LocalClusterError(f"the superlink does not listen on port {self.port}; its last words: {self.log_tail('superlink')}")
            time.sleep(0.1)

    def start_node(
        self, client: int, num_clients: int, arguments: Sequence[str] = ("--insecure",), name: str | None = None
    ) -> subprocess.Popen:
        """Start the node of one client."""
        where = ("--superlink", f"{LOOPBACK}:{self.port}", "--host", LOOPBACK, "--port", str(find_free_port()))
        config = ("--node-config", f"partition-id={client} num-partitions={num_clients}")
        return self.start_process(name or f"node-{client}", "flower-supernode", *where, *config, *arguments)

    def start_process(self, name: str, command: str, *arguments: str) -> subprocess.Popen:
        """Start a process in a group of its own, so that what it starts ends with it."""
        with (self.logs / f"{name}.log").open("ab") as log:
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
        return process

    def run_flwr(self, *arguments: str) -> str:
        """What a command of Flower's says."""
        command = [find_executable("flwr"), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, env=self.environment, check=False)
        if done.returncode != 0:
            raise LocalClusterError(f"flwr {' '.join(arguments)} failed: {' '.join((done.stderr or done.stdout).split())}")
        return done.stdout

    def submit(self, app: Path, settings: Mapping[str, Any], num_simulated: int | None = None) -> str:
        """Start a run of an app, and give its number; `simulated` is how many nodes the superlink is to simulate."""
        chosen = self.home / "run.toml"  # in a file any text survives; on the command line Flower splits at blanks
        chosen.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in settings.items()))
        words = ["run", str(app), CONNECTION, "--format", "json", "--run-config", str(chosen)]
        if num_simulated is not None:
            words += ["--federation-config", f"num-supernodes={num_simulated} client-resources-num-cpus=1"]
        started = parse_json(self.run_flwr(*words))
        if not started.get("success"):
            raise LocalClusterError(f"Flower does not start the run: {started.get('error-message', started)}")
        return str(started["run-id"])

    def stream_log(self, run_id: str) -> subprocess.Popen:
        """A process that writes the log of a run's server and ends with the run."""
        return self.start_process(f"server-{run_id}", "flwr", "log", run_id, CONNECTION, "--stream")

    def status(self, run_id: str) -> tuple[str, str]:
        """How a run stands, and why: Flower's own exit codes do not say that a run failed."""
        found = parse_json(self.run_flwr("list", CONNECTION, "--run-id", run_id, "--format", "json"))["runs"][0]
        return found["status"], found["status-details"]

    def log_tail(self, name: str) -> str:
        """The end of a process's log, in one line."""
        return " ".join((self.logs / f"{name}.log").read_text(errors="replace").split())[-500:]

    def kill(self, name: str) -> None:
        """End a process and all it started at once, without a chance to tidy up."""
        process = self.processes.pop(name)
        signal_group(process, signal.SIGKILL)
        process.wait()

    def stop(self) -> None:
        """End everything, politely first."""
        self.leftover_processes()  # while all are there to say to which session they belong
        for process in self.processes.values():
            signal_group(process, signal.SIGTERM)
        deadline = time.monotonic() + STOP_SECONDS
        while any(is_alive(process) for process in self.processes.values()) and time.monotonic() < deadline:
            time.sleep(0.1)
        for name in list(self.processes):
            self.kill(name)
        while (
            left := self.leftover_processes()
        ) and time.monotonic() < deadline + STOP_SECONDS:  # Ray's daemons leave the group they were started in
            for number in left:
                with suppress(ProcessLookupError):
                    os.kill(number, signal.SIGKILL)
            time.sleep(0.05)

    def leftover_processes(self) -> list[int]:
        """Processes of this federation that are still there, where the system tells: those with its `FLWR_HOME`, and all of their sessions.

        Ray's agents write a title over the environment they were started with; their session still tells.
        """
        mark = f"FLWR_HOME={self.home}".encode()
        sessions: dict[int, int] = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                number = int(folder.name)
                if not (folder / "cmdline").read_bytes():  # it has ended, and waits for its parent to hear of it
                    continue
                sessions[number] = os.getsid(number)
                if mark in (folder / "environ").read_bytes().split(b"\0"):
                    self.sessions.add(sessions[number])
        self.sessions.discard(os.getsid(0))  # `flwr` commands run in that of this process
        return [number for number, session in sessions.items() if session in self.sessions]

    @property
    def environment(self) -> dict[str, str]:
        """That of this process, with this Python's commands first, Flower's own folder, and no word to anybody outside."""
        path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
        own = {"PATH": path, "FLWR_HOME": str(self.home), "PYTHONUNBUFFERED": "1"}
        if len(str(self.home)) < MAX_RAY_HOME_LENGTH:
            own["RAY_TMPDIR"] = str(self.home)
        return {**os.environ, **NO_TELEMETRY, **own}


def end_with_parent() -> None:
    """In a process that begins: ask the system to end it when this one is killed, even by force."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def find_executable(command: str) -> str:
    """Flower's command beside this Python."""
    found = shutil.which(command, path=str(Path(sys.executable).parent)) or shutil.which(command)
    if found is None:
        raise LocalClusterError(f"{command} is not installed; install Flower with: pip install 'fedsieve[flower]'")
    return found


def parse_json(text: str) -> dict[str, Any]:
    """The JSON object in what Flower prints, which may begin with other lines."""
    return json.loads(text[text.index("{") :])


def find_free_port() -> int:
    """A port nobody listens on."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return probe.getsockname()[1]


def is_listening(port: int) -> bool:
    """Whether somebody listens on a port of this machine."""
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex((LOOPBACK, port)) == 0


def is_alive(process: subprocess.Popen) -> bool:
    """Whether anything is left of a process's group."""
    process.poll()
    try:
        os.killpg(process.pid, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def signal_group(process: subprocess.Popen, signal_number: signal.Signals) -> None:
    """Send a signal to a process and all it started."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal_number)
