"""Run contenders in processes of their own, with interleaved rounds, so that other work on the machine slows all of them."""

import json
import os
import subprocess
import threading
from statistics import median
from typing import NamedTuple

from benchmarks.environments import ROOT, UnavailableError, find_interpreter
from benchmarks.workloads import Workload

TIMEOUT_SECONDS = 300


class Timing(NamedTuple):
    """Seconds per round of one contender in each repeat, and its memory."""

    cpu: list[float]
    wall: list[float]
    peak_mb: float


class ContenderProcess:
    """A contender's process, ready to train."""

    def __init__(self, contender: str, workload: Workload) -> None:
        path = os.pathsep.join((str(ROOT), str(ROOT / "src")))
        environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        self._log = (ROOT / ".bench" / f"{contender}-{workload.name}.log").open("w+")
        self._process = subprocess.Popen(
            [find_interpreter(contender), "-W", "ignore", "-m", "benchmarks.worker", contender, workload.name],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self._read_answer(TIMEOUT_SECONDS)

    def run_rounds(self, num_rounds: int) -> dict[str, float]:
        """Train some rounds and return the mean cost of one."""
        self._process.stdin.write(f"{num_rounds}\n")
        self._process.stdin.flush()
        return self._read_answer(TIMEOUT_SECONDS)

    def _read_answer(self, timeout_seconds: float) -> dict[str, float]:
        timer = threading.Timer(timeout_seconds, self._process.kill)
        timer.start()
        line = self._process.stdout.readline()
        timer.cancel()
        if not line:
            self._process.wait()
            self._log.seek(0)
            lines = self._log.read().strip().splitlines()
            raise UnavailableError(f"stopped: {lines[-1] if lines else 'no answer'}"[:200])
        return json.loads(line)

    def close(self) -> None:
        """End the process."""
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._log.close()


def time_interleaved(workload: Workload, contenders: list[str], repeats: int) -> tuple[dict[str, Timing], dict[str, str]]:
    """Return the timings of the contenders, and the reasons why others are missing."""
    (ROOT / ".bench").mkdir(exist_ok=True)
    processes: dict[str, ContenderProcess] = {}
    answers: dict[str, list[dict[str, float]]] = {}
    missing: dict[str, str] = {}
    for contender in contenders:
        try:
            processes[contender] = ContenderProcess(contender, workload)
            answers[contender] = []
        except UnavailableError as error:
            missing[contender] = str(error)
    for _ in range(repeats):
        for contender in list(processes):
            try:
                answers[contender].append(processes[contender].run_rounds(workload.timed_rounds))
            except UnavailableError as error:
                missing[contender] = str(error)
                del processes[contender], answers[contender]
    for process in processes.values():
        process.close()
    timings = {
        contender: Timing([a["cpu"] for a in costs], [a["wall"] for a in costs], costs[-1]["peak_mb"])
        for contender, costs in answers.items()
    }
    return timings, missing


def speedup(ours: Timing, theirs: Timing) -> float:
    """Return the median over repeats of their CPU time divided by ours."""
    return median(their_time / our_time for our_time, their_time in zip(ours.cpu, theirs.cpu, strict=True))


def wall_speedup(ours: Timing, theirs: Timing) -> float:
    """Return the median over repeats of their wall time divided by ours."""
    return median(their_time / our_time for our_time, their_time in zip(ours.wall, theirs.wall, strict=True))
