"""Kill a run at random points and at every system call of its writes, go on, and hold what came out against an undisturbed run.

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


def run_of(engine, rounds):
    place = FederationConfig(clients=8, participation=0.5)
    return resolve(
        RunConfig(engine=engine, rounds=rounds, density=0.1, seed=1, data=DATA, federation=place, algorithm=Sieve(local_steps=3))
    )


def live(run, folder):
    """Begin, or go on with what there is."""
    if not (folder / run_directory.CONFIG).exists():
        return folders.start_run(run, Simulation(run), folder, EVERY_ROUND, quiet=True)
    if (result := folders.finished_result(run, folder)) is not None:
        return result
    return folders.resume_run(run, folder, EVERY_ROUND, quiet=True)


def forked(run, folder, before=lambda: None):
    """A life of its own, still going; it leaves with 0 when finished, with 3 when the disk would not take something."""
    folder.mkdir(exist_ok=True)
    if child := os.fork():
        return child
    try:
        before()
        live(run, folder)
        os._exit(0)
    except (run_directory.WriteError, run_directory.RunDirectoryError) as problem:
        os._exit(3 if "cannot write" in str(problem) else 4)
    except BaseException as problem:
        print(f"{type(problem).__name__}: {problem}", file=sys.stderr, flush=True)
        os._exit(4)


def ended(child):
    """How a life ended: its exit code, or minus the signal."""
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code != 4, "a life ended in an error nobody foresaw"
    return code


def left(folder):
    """All that a run leaves but clocks: model, checkpoint (all of the server's bits), metrics, trace."""
    rows = [{k: v for k, v in row.items() if k != "seconds"} for row in run_directory.read_metrics(folder)]
    with np.load(folder / run_directory.SUPPORTS_NPZ) as trace:
        arrays = {name: trace[name].tolist() for name in trace.files}
    newest = sorted(path.name for path in (folder / run_directory.CHECKPOINTS).iterdir())[-1]
    return (folder / run_directory.MODEL).read_bytes(), newest, rows, arrays


def undisturbed(run, folder):
    """What the run leaves when nothing happens; computed here, so that every fork finds all warm."""
    folder.mkdir()
    live(run, folder)
    return left(folder)


def random_kills(count, place):
    """Kill at random moments, often several times a run; returns what happened."""
    chance = random.Random(count)
    happened = {"kills": 0, "runs": 0, "finished_in_time": 0}
    for engine in (Engine.BATCHED, Engine.LOOP):
        run = run_of(engine, rounds=8)
        wanted = undisturbed(run, place / f"calm-{engine}")
        began = time.monotonic()
        assert ended(forked(run, place / f"timed-{engine}")) == 0
        whole = time.monotonic() - began
        target = count // 2 if engine is Engine.BATCHED else count
        while happened["kills"] < target:
            folder = place / "storm"
            for _ in range(chance.randint(1, 3)):
                child = forked(run, folder)
                time.sleep(chance.uniform(0, 1.2 * whole))
                os.kill(child, signal.SIGKILL)
                happened["kills" if ended(child) == -signal.SIGKILL else "finished_in_time"] += 1
            assert ended(forked(run, folder)) == 0
            assert left(folder) == wanted
            happened["runs"] += 1
            shutil.rmtree(folder)
    return happened


def strike(target, action):
    """Let the action happen in the place of the target-th system call of a write; returns the names of all calls seen.

    What the kernel was given outlives the process, flushed or not: flushes are counted, and waiting for the disk is left out.
    """
    seen = []
    for name in CALLS:
        real = getattr(os, name)

        def struck(*words, real=real, name=name, **named):
            seen.append(name)
            if len(seen) == target:
                action(name, real, words)
            return None if name == "fsync" else real(*words, **named)

        setattr(os, name, struck)
    return seen


def kill(name, real, words):
    """Before a call, which is also after the one before it."""
    os.kill(os.getpid(), signal.SIGKILL)


def kill_amid(name, real, words):
    """Half of what is written gets through."""
    real(words[0], bytes(words[1])[: len(words[1]) // 2])
    os.kill(os.getpid(), signal.SIGKILL)


def refuse(name, real, words):
    """The disk is full, and half of what is written gets through; or it takes nothing."""
    if name == "write":
        real(words[0], bytes(words[1])[: len(words[1]) // 2])
    code = errno.EROFS if name in ("mkdir", "replace", "unlink") else errno.ENOSPC
    raise OSError(code, os.strerror(code))


def every_call(rounds, place):
    """Strike at every system call of the writes of a run; returns what happened."""
    run = run_of(Engine.BATCHED, rounds)
    wanted = undisturbed(run, place / "calm")
    counted = place / "counted"
    counted.mkdir()
    reader, writer = os.pipe()
    if not os.fork():
        seen = strike(0, kill)
        live(run, counted)
        os.write(writer, json.dumps(seen).encode())
        os._exit(0)
    os.wait()
    calls = json.loads(os.read(reader, 65536))
    happened = {"calls": len(calls), "writes": calls.count("write")}
    for action in (kill, kill_amid, refuse):
        happened[action.__name__] = 0
        for target, name in enumerate(calls, 1):
            if action is kill_amid and name != "write":
                continue
            folder = place / f"{action.__name__}-{target}"
            code = ended(forked(run, folder, lambda target=target, action=action: strike(target, action)))
            assert code in ((3, 0) if action is refuse else (-signal.SIGKILL,)), (action.__name__, target, code)
            assert ended(forked(run, folder, lambda: strike(0, kill))) == 0
            assert left(folder) == wanted, (action.__name__, target)
            happened[action.__name__] += code != 0
            shutil.rmtree(folder)
    return happened


if __name__ == "__main__":
    torch.set_num_threads(1)
    how, count, place = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    print(json.dumps(random_kills(count, place) if how == "random" else every_call(count, place)))
