"""Kill a run at random points and at every system call of its writes, go on, and hold what came out against an run_without_crash run.

A program of its own, `python crashes.py random|calls COUNT FOLDER`: everything is loaded and warmed once, every life is a fork.
"""

import errno
import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import numpy as np
import torch

from fedsieve.algorithms.sieve import Sieve
from fedsieve.data import synthetic
from fedsieve.data.synthetic import Synthetic
from fedsieve.experiments import runner as folders
from fedsieve.experiments.config import Engine, FederationConfig, RunConfig
from fedsieve.experiments.resolve import resolve
from fedsieve.experiments.simulation import Simulation
from fedsieve.storage import run_directory
from fedsieve.storage.run_log import CheckpointInterval

synthetic.NUM_TEST_EXAMPLES = 200
DATA = Synthetic(num_examples=200, num_features=30, true_density=0.1)
CALLS = ("open", "write", "fsync", "replace", "unlink", "mkdir")
EVERY_ROUND = CheckpointInterval(seconds=0)
KILLED, REFUSED = "killed", "refused"


def make_run(engine, rounds):
    place = FederationConfig(clients=8, participation=0.5)
    return resolve(
        RunConfig(engine=engine, rounds=rounds, density=0.1, seed=1, data=DATA, federation=place, algorithm=Sieve(local_steps=3))
    )


def start_or_resume(run, folder):
    """Start the run, or resume it from its folder."""
    if not (folder / run_directory.CONFIG).exists():
        return folders.start_run(run, Simulation(run), folder, EVERY_ROUND, quiet=True)
    if (result := folders.finished_result(run, folder)) is not None:
        return result
    return folders.resume_run(run, folder, EVERY_ROUND, quiet=True)


def fork_run(run, folder, before=lambda: None):
    """Fork a process that runs, and return its id. Its exit code is 0 if it finished, 3 if a write failed."""
    folder.mkdir(exist_ok=True)
    if child := os.fork():
        return child
    try:
        before()
        start_or_resume(run, folder)
        os._exit(0)
    except (run_directory.WriteError, run_directory.RunDirectoryError) as problem:
        os._exit(3 if "cannot write" in str(problem) else 4)
    except BaseException as problem:
        print(f"{type(problem).__name__}: {problem}", file=sys.stderr, flush=True)
        os._exit(4)


def wait_for(child):
    """Return the exit code of a process, or minus the signal that ended it."""
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code != 4, "a run ended in an unexpected error"
    return code


def read_results(folder):
    """Return all results of a run except times: model, checkpoint, metrics, trace."""
    rows = [{k: v for k, v in row.items() if k != "seconds"} for row in run_directory.read_metrics(folder)]
    with np.load(folder / run_directory.SUPPORTS_NPZ) as trace:
        arrays = {name: trace[name].tolist() for name in trace.files}
    newest = sorted(path.name for path in (folder / run_directory.CHECKPOINTS).iterdir())[-1]
    return (folder / run_directory.MODEL).read_bytes(), newest, rows, arrays


def run_without_crash(run, folder):
    """Return the results of a run that nothing interrupts; computed in this process, so that every fork finds compiled kernels."""
    folder.mkdir()
    start_or_resume(run, folder)
    return read_results(folder)


def kill_at_random(count, place):
    """Kill runs at random moments, some several times, and return how often."""
    generator = random.Random(count)
    counts = {"kills": 0, "runs": 0, "finished_in_time": 0}
    for engine in (Engine.BATCHED, Engine.LOOP):
        run = make_run(engine, rounds=8)
        expected = run_without_crash(run, place / f"uninterrupted-{engine}")
        began = time.monotonic()
        assert wait_for(fork_run(run, place / f"timed-{engine}")) == 0
        duration = time.monotonic() - began
        target = count // 2 if engine is Engine.BATCHED else count
        while counts["kills"] < target:
            folder = place / "killed"
            for _ in range(generator.randint(1, 3)):
                child = fork_run(run, folder)
                time.sleep(generator.uniform(0, 1.2 * duration))
                os.kill(child, signal.SIGKILL)
                counts["kills" if wait_for(child) == -signal.SIGKILL else "finished_in_time"] += 1
            assert wait_for(fork_run(run, folder)) == 0
            assert read_results(folder) == expected
            counts["runs"] += 1
            shutil.rmtree(folder)
    return counts


def intercept_calls(target, action):
    """Perform the action instead of the target-th system call of a write, and return the list of calls seen.

    Data survive the process once the kernel has them, so fsync is counted but not performed.
    """
    seen = []
    for name in CALLS:
        real = getattr(os, name)

        def intercepted(*arguments, real=real, name=name, **options):
            seen.append(name)
            if len(seen) == target:
                action(name, real, arguments)
            return None if name == "fsync" else real(*arguments, **options)

        setattr(os, name, intercepted)
    return seen


def kill(name, real, arguments):
    """Kill the process before a call, which is also after the previous one."""
    os.kill(os.getpid(), signal.SIGKILL)


def kill_during_write(name, real, arguments):
    """Write half of the data, then kill the process."""
    real(arguments[0], bytes(arguments[1])[: len(arguments[1]) // 2])
    os.kill(os.getpid(), signal.SIGKILL)


def fail_write(name, real, arguments):
    """Fail as a full or read-only disk does; half of a write succeeds."""
    if name == "write":
        real(arguments[0], bytes(arguments[1])[: len(arguments[1]) // 2])
    code = errno.EROFS if name in ("mkdir", "replace", "unlink") else errno.ENOSPC
    raise OSError(code, os.strerror(code))


def kill_at_every_call(rounds, place):
    """Kill a run, or fail its write, at every system call of its writes, and return how often."""
    run = make_run(Engine.BATCHED, rounds)
    expected = run_without_crash(run, place / "uninterrupted")
    counted = place / "counted"
    counted.mkdir()
    reader, writer = os.pipe()
    if not os.fork():
        seen = intercept_calls(0, kill)
        start_or_resume(run, counted)
        os.write(writer, json.dumps(seen).encode())
        os._exit(0)
    os.wait()
    calls = json.loads(os.read(reader, 65536))
    counts = {"calls": len(calls), "writes": calls.count("write")}
    for action in (kill, kill_during_write, fail_write):
        counts[action.__name__] = 0
        for target, name in enumerate(calls, 1):
            if action is kill_during_write and name != "write":
                continue
            folder = place / f"{action.__name__}-{target}"
            code = wait_for(fork_run(run, folder, lambda target=target, action=action: intercept_calls(target, action)))
            assert code in ((3, 0) if action is fail_write else (-signal.SIGKILL,)), (action.__name__, target, code)
            assert wait_for(fork_run(run, folder, lambda: intercept_calls(0, kill))) == 0
            assert read_results(folder) == expected, (action.__name__, target)
            counts[action.__name__] += code != 0
            shutil.rmtree(folder)
    return counts


if __name__ == "__main__":
    torch.set_num_threads(1)
    how, count, place = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    print(json.dumps(kill_at_random(count, place) if how == "random" else kill_at_every_call(count, place)))
