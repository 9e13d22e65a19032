"""W5: CPU time of the default `fedsieve train`, and of starting the command line."""

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from benchmarks.environments import ROOT

MAX_RUNS = 3
"""Complete runs take long and differ little."""


def measure_command(command: list[str], folder: str) -> tuple[float, float]:
    """Return CPU and wall seconds of a command."""
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    before, wall = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, time.perf_counter() - wall


def round_seconds(folder: str) -> list[float]:
    """Return the seconds of each round of the run in a folder."""
    (rows,) = Path(folder).glob("**/metrics.jsonl")
    ends = [json.loads(line)["seconds"] for line in rows.read_text().splitlines()]
    return [end - start for start, end in zip([0.0, *ends], ends, strict=False)]


def measure_cli(repeats: int) -> dict[str, float | None]:
    """Measure the default run, `--help` and `import torch`, interleaved."""
    python = sys.executable
    train, help_text, torch, first = [], [], [], []
    for _ in range(min(repeats, MAX_RUNS)):
        with tempfile.TemporaryDirectory() as folder:
            train.append(measure_command([python, "-m", "fedsieve", "train", "--quiet"], folder)[0])
            rounds = round_seconds(folder)
            first.append(rounds[0] / median(rounds[1:]))
            help_text.append(measure_command([python, "-m", "fedsieve", "--help"], folder)[0])
            torch.append(measure_command([python, "-c", "import torch"], folder)[0])
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    share = median(a / b for a, b in zip(help_text, torch, strict=True))
    print("\nW5  fedsieve train without options")
    print(f"CPU {median(train):.1f} s, of which importing torch {median(torch):.1f} s; peak {peak:.0f} MB")
    print(f"first round over a later one {median(first):.2f}x; --help takes {100 * share:.0f} % of importing torch")
    sys.stdout.flush()
    names = dict.fromkeys(("naive_loop", "flower", "pfl", "fedjax", "as_module", "roofline"))
    return {**names, "peak_mb": round(peak), "cpu_seconds": round(median(train), 2),
            "first_round": round(median(first), 2), "help_over_import": round(share, 3)}  # fmt: skip
