"""`make mutation`: change one operator, constant or call at a time; fail if the tests notice less than 90 % of a sample of the changes.

python tools/mutation.py                                   300 mutants, the same ones every time, on two cores
python tools/mutation.py --only core/gates.py --mutants 0  every mutant of one module

The sample is ordered by a hash of the changed line, so that an edit elsewhere leaves it alone. Each mutant runs in a fork of a process
that has imported torch and pytest, on a copy of the tree, with the fastest tests first and without slow ones. Survivors are printed
with their reason from tools/mutation_survivors.toml; all results are stored in .cache/mutation.json.
"""

import argparse
import gc
import hashlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import tomllib
import traceback
from collections.abc import Iterator
from importlib import import_module
from math import inf
from pathlib import Path
from typing import Any

import pytest
from mutants import SOURCES, Mutant, mutants_of

ROOT = SOURCES.parents[1]
MIN_KILLED = 0.9
MAX_TEST_SECONDS = 2.0
"""Tests that take longer are not run on mutants: they train, and a fast test should state the law."""
MAX_MUTANT_SECONDS = 120.0
"""A mutant that takes longer, mostly in an endless loop, is killed."""
NO_REASON = "no reason given"
TESTS = {
    "core/gates.py": ["core/test_gates.py"],
    "core/constraint.py": ["core/test_constraint.py"],
    "core/aggregation.py": ["core/test_aggregation.py"],
    "core/robust_aggregation.py": ["core/test_aggregation.py"],
    "core/budgets.py": ["core/test_budgets.py", "core/test_topk.py"],
    "core/topk.py": ["core/test_topk.py"],
    "core/schedules.py": ["core/test_schedules.py"],
    "data/synthetic.py": ["data/test_synthetic.py"],
    "runtime/metrics.py": ["runtime/test_metrics.py"],
    "algorithms/gated.py": [
        "algorithms/test_gated.py",
        "algorithms/test_flops.py",
        "algorithms/test_flops_pa.py",
    ],
    "algorithms/flops.py": ["algorithms/test_gated.py", "algorithms/test_flops.py"],
    "algorithms/flops_pa.py": ["algorithms/test_gated.py", "algorithms/test_flops_pa.py"],
    "studies/gate_trace.py": ["studies/test_gate_trace.py"],
    "report/claims.py": ["report/test_claims.py"],
}
"""The tests that hold each module; a mutant that only other tests notice counts as a survivor."""


class FastestFirst:
    """A pytest plugin: it measures the tests in a first run; later runs take the fast ones, the fastest first."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.seconds: dict[str, float] = json.loads(path.read_text()) if path.exists() else {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Select and sort the tests."""
        items[:] = [item for item in items if self.seconds.get(item.nodeid, 0.0) < MAX_TEST_SECONDS]
        items.sort(key=lambda item: self.seconds.get(item.nodeid, 0.0))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Measure the processor time of a test."""
        began = time.process_time()
        result = yield
        self.seconds[item.nodeid] = time.process_time() - began
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Iterator[None]:
        """In the first run, skip the rest of a slow test."""
        if not self.path.exists():
            signal.signal(signal.SIGVTALRM, lambda *_: pytest.skip("takes too long for mutants"))
            signal.setitimer(signal.ITIMER_VIRTUAL, MAX_TEST_SECONDS)
        try:
            return (yield)
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """Store the times of the first run."""
        if exitstatus == 0 and not self.path.exists():
            self.path.write_text(json.dumps(self.seconds))


def warm_up() -> None:
    """Import what all tests need, and nothing of the package."""
    for module in ("beartype", "hypothesis", "jaxtyping", "scipy.optimize", "scipy.stats", "sklearn.metrics", "torch"):
        import_module(module)
    torch = sys.modules["torch"]
    torch.set_num_threads(1)
    torch.testing.assert_close(torch.zeros(1), torch.zeros(1))
    gc.freeze()


def start(copy: Path, mutant: Mutant, files: list[str]) -> int:
    """Put a mutant into a copy of the tree and start the tests in a fork; return the process id."""
    path = copy / "src" / "fedsieve" / mutant.module
    path.write_bytes(mutant.source)
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
        compiled.unlink()
    if child := os.fork():
        return child
    code = 1
    try:
        code = run_tests(copy, files)
    except BaseException:
        traceback.print_exc()
    finally:  # nothing of the parent runs in the child
        os._exit(code)


def run_tests(copy: Path, files: list[str]) -> int:
    """Run tests in this process; return pytest's exit code."""
    os.setpgid(0, 0)
    os.chdir(copy)
    log = os.open(copy / "pytest.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ |= {"PYTHONPATH": str(copy / "src"), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    sys.path.insert(0, str(copy / "src"))
    options = ["-x", "-m", "not long", "-p", "no:cacheprovider", "-p", "_hypothesis_pytestplugin", "--hypothesis-seed=0"]
    return int(pytest.main([*options, *(f"tests/{file}" for file in files)], plugins=[FastestFirst(copy.parent / "seconds.json")]))


def run_all(
    mutants: list[Mutant], copies: list[Path], tests: dict[str, list[str]], max_seconds: float
) -> Iterator[tuple[Mutant, str, float]]:
    """Run the tests on each mutant, as many at a time as there are copies; yield how each ended and how long it took."""
    free, running, waiting = list(copies), {}, mutants[::-1]
    while waiting or running:
        while waiting and free:
            mutant, copy = waiting.pop(), free.pop()
            original = (copy / "src" / "fedsieve" / mutant.module).read_bytes()
            running[start(copy, mutant, tests[mutant.module])] = mutant, copy, original, time.monotonic()
        time.sleep(0.02)
        for child, (mutant, copy, original, began) in list(running.items()):
            took = time.monotonic() - began
            is_late = took > max_seconds
            if is_late:
                os.killpg(child, signal.SIGKILL)
            ended, status = os.waitpid(child, 0 if is_late else os.WNOHANG)
            if ended:
                del running[child]
                (copy / "src" / "fedsieve" / mutant.module).write_bytes(original)
                free.append(copy)
                yield mutant, "timeout" if is_late else "killed" if status else "survived", took


def copy_tree(folder: Path, jobs: int) -> list[Path]:
    """Return copies of what the tests need."""
    copies = [folder / str(i) for i in range(jobs)]
    for copy in copies:
        for part in ("src", "tests", "docs"):
            shutil.copytree(ROOT / part, copy / part, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", copy)
    return copies


def find_reason(mutant: Mutant) -> str:
    """Return why a survivor survives, from the first entry whose fields are those of the mutant."""
    entries = tomllib.loads((ROOT / "tools" / "mutation_survivors.toml").read_text())["survivor"]
    fields = mutant._asdict()
    return next((entry["reason"] for entry in entries if entry.items() - {"reason": entry["reason"]}.items() <= fields.items()), NO_REASON)


def run_sample(sample: list[Mutant], jobs: int) -> list[dict[str, Any]] | None:
    """Return one row per mutant; None if the tests fail without a change."""
    rows, began = [], time.monotonic()
    warm_up()
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        copies = copy_tree(Path(folder), jobs)
        first = sample[0].module
        unchanged = Mutant(first, "", "", "", (SOURCES / first).read_bytes())
        files = sorted({file for mutant in sample for file in TESTS[mutant.module]})
        if [end for _, end, _ in run_all([unchanged], copies[:1], {first: files}, inf)] != ["survived"]:
            print((copies[0] / "pytest.log").read_text(), "the tests fail without a change", sep="\n")
            return None
        print(f"the tests pass without a change; {time.monotonic() - began:.0f} s", flush=True)
        for mutant, end, took in run_all(sample, copies, TESTS, MAX_MUTANT_SECONDS):
            reason = find_reason(mutant) if end == "survived" else None
            rows.append(mutant._asdict() | {"source": None, "end": end, "seconds": round(took, 2), "reason": reason})
            if end == "survived":
                print(f"survived: {mutant.module} {mutant.function}\n- {mutant.before}\n+ {mutant.after}\n  {reason}", flush=True)
            if len(rows) % 50 == 0:
                print(f"{len(rows)} of {len(sample)} mutants in {time.monotonic() - began:.0f} s", flush=True)
    return rows


def main() -> int:
    """Run the sample; return 1 if too many mutants survive."""
    parser = argparse.ArgumentParser(description="Run the tests on a sample of changed sources.")
    parser.add_argument("--mutants", type=int, default=300, help="size of the sample; 0 for all mutants")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample")
    parser.add_argument("--jobs", type=int, default=2, help="number of processes")
    parser.add_argument("--only", nargs="+", choices=TESTS, default=list(TESTS), metavar="MODULE", help="modules to change")
    options = parser.parse_args()
    began = time.monotonic()
    every = [mutant for module in options.only for mutant in mutants_of(module)]
    every.sort(key=lambda mutant: hashlib.sha256(repr((options.seed, mutant.key)).encode()).digest())
    sample = every[: options.mutants or None]
    print(f"{len(sample)} of {len(every)} mutants of {len(options.only)} modules", flush=True)
    if (rows := run_sample(sample, options.jobs)) is None:
        return 1
    store = ROOT / ".cache" / "mutation.json"
    store.parent.mkdir(exist_ok=True)
    store.write_text(json.dumps(rows, indent=1))
    for module in options.only:
        ends = [row["end"] != "survived" for row in rows if row["module"] == module]
        print(f"{module}: killed {sum(ends)} of {len(ends)}")
    killed = sum(row["end"] != "survived" for row in rows)
    print(
        f"killed {killed} of {len(rows)} ({killed / len(rows):.1%}, at least {MIN_KILLED:.0%} needed) in {time.monotonic() - began:.0f} s"
    )
    return int(killed < MIN_KILLED * len(rows))


if __name__ == "__main__":
    sys.exit(main())
