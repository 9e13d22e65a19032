"""Contenders side by side: each in its own process, rounds interleaved, so that a busy machine slows all of them alike."""

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
    """What one contender needed, a repeat after another: seconds a round."""

    cpu: list[float]
    wall: list[float]
    peak_mb: float


class ContenderProcess:
    """A contender's process, ready to train."""

    def __init__(self, contender: str, workload: Workload, threads: int) -> None:
        path = os.pathsep.join((str(ROOT), str(ROOT / "src")))
        environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
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
        """Train some rounds, and what they cost each."""
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
            told = self._log.read().strip().splitlines()
            raise UnavailableError(f"stopped: {told[-1] if told else 'no answer'}"[:200])
        return json.loads(line)

    def close(self) -> None:
        """End the process."""
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._log.close()


def time_interleaved(workload: Workload, contenders: list[str], repeats: int, threads: int) -> tuple[dict[str, Timing], dict[str, str]]:
    """The timings of all that could take part, and why the others could not."""
    (ROOT / ".bench").mkdir(exist_ok=True)
    racers: dict[str, ContenderProcess] = {}
    answers: dict[str, list[dict[str, float]]] = {}
    missing: dict[str, str] = {}
    for contender in contenders:
        try:
            racers[contender] = ContenderProcess(contender, workload, threads)
            answers[contender] = []
        except UnavailableError as problem:
            missing[contender] = str(problem)
    for _ in range(repeats):
        for contender in list(racers):
            try:
                answers[contender].append(racers[contender].run_rounds(workload.timed_rounds))
            except UnavailableError as problem:
                missing[contender] = str(problem)
                del racers[contender], answers[contender]
    for racer in racers.values():
        racer.close()
    timings = {
        contender: Timing([a["cpu"] for a in given], [a["wall"] for a in given], given[-1]["peak_mb"])
        for contender, given in answers.items()
    }
    return timings, missing


def speedup(ours: Timing, theirs: Timing) -> float:
    """How often we finish while they finish once: the median over repeats of the ratio of CPU times."""
    return median(there / here for here, there in zip(ours.cpu, theirs.cpu, strict=True))
