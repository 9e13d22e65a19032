"""`make mutation`: change one operator, constant or call at a time; fail if the tests notice less than 90 % of a sample of the changes.

python tools/mutation.py                                   300 mutants, the same ones every time, on two cores
python tools/mutation.py --only core/gates.py --mutants 0  every mutant of one module
python tools/mutation.py --max-minutes 10 --jobs 1         the next ten minutes of the sample, on one core

The sample is ordered by a hash of the changed line, so that an edit elsewhere leaves it alone. Each mutant runs in a fork of a process
that has imported torch and pytest, on a copy of the tree, with the fastest tests first and without slow ones. Survivors are printed
with their reason from tools/mutation_survivors.toml.

Each result is appended to .cache/mutation.jsonl at once, and the next run continues there: it skips mutants that tests killed, unless
their module changed, and runs new mutants before survivors. Delete the file after tests were removed or weakened.
"""

import argparse
import gc
import hashlib
import json
import os
import resource
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

import pytest
from mutants import SOURCES, Mutant, mutants_of

ROOT = SOURCES.parents[1]
RESULTS = ROOT / ".cache" / "mutation.jsonl"
MIN_KILLED = 0.9
MAX_TEST_SECONDS = 2.0
"""Tests that take longer are not run on mutants: they train, and a fast test should state the law."""
MAX_MUTANT_SECONDS = 60
"""A mutant that needs more processor time, mostly in an endless loop, is killed."""
MAX_WAIT = 30 * MAX_MUTANT_SECONDS
"""So is one that takes longer than this in all, because it waits; a busy machine alone should not."""
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
        "algorithms/test_recipes.py",
    ],
    "algorithms/flops.py": ["algorithms/test_gated.py", "algorithms/test_flops.py", "algorithms/test_recipes.py"],
    "algorithms/flops_pa.py": ["algorithms/test_gated.py", "algorithms/test_flops_pa.py", "algorithms/test_recipes.py"],
    "studies/gate_trace.py": ["studies/test_gate_trace.py"],
    "report/claims.py": ["report/test_claims.py"],
    "algorithms/log_alpha.py": ["algorithms/test_gated.py"],
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


def start(copy: Path, mutant: Mutant, files: list[str], limit: int | None) -> int:
    """Put a mutant into a copy of the tree and start the tests in a fork with a limit of seconds; return the process id."""
    path = copy / "src" / "fedsieve" / mutant.module
    path.write_bytes(mutant.source)
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
        compiled.unlink()
    if child := os.fork():
        return child
    code = 1
    try:
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 1))
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
    mutants: list[Mutant], copies: list[Path], tests: dict[str, list[str]], limit: int | None, stop_at: float = inf
) -> Iterator[tuple[Mutant, str, float]]:
    """Run the tests on each mutant, as many at a time as there are copies; yield how each ended and how long it took.

    No mutant is started after `stop_at`.
    """
    free, running, waiting = list(copies), {}, mutants[::-1]
    while running or (waiting and time.monotonic() < stop_at):
        while waiting and free and time.monotonic() < stop_at:
            mutant, copy = waiting.pop(), free.pop()
            original = (copy / "src" / "fedsieve" / mutant.module).read_bytes()
            running[start(copy, mutant, tests[mutant.module], limit)] = mutant, copy, original, time.monotonic()
        time.sleep(0.02)
        for child, (mutant, copy, original, began) in list(running.items()):
            took = time.monotonic() - began
            is_late = limit is not None and took > MAX_WAIT
            if is_late:
                os.killpg(child, signal.SIGKILL)
            ended, status = os.waitpid(child, 0 if is_late else os.WNOHANG)
            if ended:
                del running[child]
                (copy / "src" / "fedsieve" / mutant.module).write_bytes(original)
                free.append(copy)
                is_late |= os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU
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


def run_sample(sample: list[Mutant], jobs: int, stop_at: float) -> bool:
    """Run and store mutants until a time; return whether the tests pass without a change."""
    began = time.monotonic()
    warm_up()
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        copies = copy_tree(Path(folder), jobs)
        first = sample[0].module
        unchanged = Mutant(first, "", "", "", (SOURCES / first).read_bytes())
        files = sorted({file for mutant in sample for file in TESTS[mutant.module]})
        if [end for _, end, _ in run_all([unchanged], copies[:1], {first: files}, None)] != ["survived"]:
            print((copies[0] / "pytest.log").read_text(), "the tests fail without a change", sep="\n")
            return False
        print(f"the tests pass without a change; {time.monotonic() - began:.0f} s", flush=True)
        for count, (mutant, end, took) in enumerate(run_all(sample, copies, TESTS, MAX_MUTANT_SECONDS, stop_at), 1):
            store(mutant, end, took)
            if count % 50 == 0:
                print(f"{count} of {len(sample)} mutants in {time.monotonic() - began:.0f} s", flush=True)
    return True


def identify(mutant: Mutant) -> str:
    """Return a hash of the change and of the module that contains it."""
    return hashlib.sha256(repr(mutant).encode()).hexdigest()


def load_ends() -> dict[str, str]:
    """Return how each stored mutant ended, by its hash."""
    return {row["id"]: row["end"] for row in map(json.loads, RESULTS.read_text().splitlines())} if RESULTS.exists() else {}


def store(mutant: Mutant, end: str, took: float) -> None:
    """Append a result to the stored ones."""
    RESULTS.parent.mkdir(exist_ok=True)
    with RESULTS.open("a") as file:
        row = {"id": identify(mutant), "end": end, "seconds": round(took, 2), **mutant._asdict(), "source": None}
        file.write(json.dumps(row) + "\n")


def report(sample: list[Mutant]) -> int:
    """Print survivors and counts from the stored results; return 1 if too many survived or some are not scored."""
    ends = load_ends()
    scored = [(mutant, ends[identify(mutant)]) for mutant in sample if identify(mutant) in ends]
    for mutant, end in scored:
        if end == "survived":
            print(f"survived: {mutant.module} {mutant.function}\n- {mutant.before}\n+ {mutant.after}\n  {find_reason(mutant)}")
    for module in sorted({mutant.module for mutant in sample}):
        kills = [end != "survived" for mutant, end in scored if mutant.module == module]
        print(f"{module}: killed {sum(kills)} of {len(kills)}")
    killed = sum(end != "survived" for _, end in scored)
    print(f"killed {killed} of {len(scored)} ({killed / max(len(scored), 1):.1%}, at least {MIN_KILLED:.0%} needed)")
    if len(scored) < len(sample):
        print(f"{len(sample) - len(scored)} of {len(sample)} mutants are not scored yet; the next run continues with them")
    return int(killed < MIN_KILLED * len(scored) or len(scored) < len(sample))


def main() -> int:
    """Run the sample; return 1 if too many mutants survive."""
    parser = argparse.ArgumentParser(description="Run the tests on a sample of changed sources.")
    parser.add_argument("--mutants", type=int, default=300, help="size of the sample; 0 for all mutants")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample")
    parser.add_argument("--jobs", type=int, default=2, help="number of processes")
    parser.add_argument("--only", nargs="+", choices=TESTS, default=list(TESTS), metavar="MODULE", help="modules to change")
    parser.add_argument("--max-minutes", type=float, default=60.0, help="start no mutant after this time; the next run continues")
    options = parser.parse_args()
    stop_at = time.monotonic() + 60 * options.max_minutes
    every = [mutant for module in options.only for mutant in mutants_of(module)]
    every.sort(key=lambda mutant: hashlib.sha256(repr((options.seed, mutant.key)).encode()).digest())
    sample = every[: options.mutants or None]
    ends = load_ends()
    to_run = sorted((m for m in sample if ends.get(identify(m)) in (None, "survived")), key=lambda m: identify(m) in ends)
    print(f"{len(sample)} of {len(every)} mutants of {len(options.only)} modules, {len(to_run)} to run", flush=True)
    if to_run and not run_sample(to_run, options.jobs, stop_at):
        return 1
    return report(sample)


if __name__ == "__main__":
    sys.exit(main())
