"""Count the functions of the package that one round calls: how much code a reader meets on the way through a round.

python tools/profile_round.py                    the counts of flops-pa and fed-avg
python tools/profile_round.py fed-avg --list     and the functions, file by file

The second round of task lr is profiled; the first one only warms up caches. Functions count if the generator `train` calls them, directly
or not, so measuring and storing, which its caller does, are left out. Named functions count: a lambda or a comprehension is part of the
function that contains it. The round runs in double precision, so that the formulas run and not their compiled forms.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import fedsieve
from fedsieve import RunConfig, run_rounds
from fedsieve.experiments.config import Precision
from fedsieve.experiments.resolve import resolve
from fedsieve.runtime import rounds

PACKAGE = Path(fedsieve.__file__).parent
FOLDERS = ("kernels", "core", "objectives", "algorithms", "wire", "runtime")
MAX_FUNCTIONS = {"flops-pa": 120, "fed-avg": 84}
"""The most functions of a round."""


class Function(NamedTuple):
    """A function of the package."""

    file: str
    line: int
    name: str


def profile_round(algorithm_name: str) -> Counter[Function]:
    """The number of calls of each function in one round."""
    calls: Counter[Function] = Counter()
    train_code, is_inside = rounds.train.__code__, False

    def count_call(frame: FrameType, event: str, _: object) -> None:
        nonlocal is_inside
        if frame.f_code is train_code and event in ("call", "return"):  # a generator is called when it resumes, and returns when it yields
            is_inside = event == "call"
        if is_inside and event == "call" and "<" not in frame.f_code.co_name and (function := package_function(frame)):
            calls[function] += 1

    steps = run_rounds(resolve(RunConfig(task="lr", algorithm_name=algorithm_name, rounds=3, precision=Precision.DOUBLE)))
    next(steps)
    sys.setprofile(count_call)
    try:
        next(steps)
    finally:
        sys.setprofile(None)
    steps.close()
    return calls


def package_function(frame: FrameType) -> Function | None:
    """The function of a frame; None if it is not in one of the folders."""
    code = frame.f_code
    path = Path(code.co_filename)
    if not path.is_relative_to(PACKAGE) or path.relative_to(PACKAGE).parts[0] not in FOLDERS:
        return None
    return Function(str(path.relative_to(PACKAGE)), code.co_firstlineno, code.co_qualname)


def describe(calls: Counter[Function], *, list_functions: bool) -> Iterator[str]:
    """The lines to print."""
    files = sorted({function.file for function in calls})
    yield f"{len(calls)} functions in {len(files)} files"
    if list_functions:
        for file in files:
            yield file
            yield from (f"  {calls[function]:>6}  {function.name}" for function in sorted(calls) if function.file == file)


def main() -> None:
    """Profile the algorithms named on the command line."""
    parser = argparse.ArgumentParser(description="Count the functions of the package that one round calls.")
    parser.add_argument("algorithm", nargs="*", default=list(MAX_FUNCTIONS), help="names of algorithms (default: flops-pa fed-avg)")
    parser.add_argument("--list", action="store_true", help="also list the functions with their numbers of calls")
    arguments = parser.parse_args()
    for name in arguments.algorithm:
        lines = describe(profile_round(name), list_functions=arguments.list)
        print(f"{name}: {next(lines)}", *lines, sep="\n")


if __name__ == "__main__":
    main()
