"""A reader of one round meets a limited number of functions."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CODE = "import sys; from profile_round import MAX_FUNCTIONS, profile_round as p; n = sys.argv[1]; print(len(p(n)), MAX_FUNCTIONS[n])"


@pytest.mark.parametrize("algorithm", ["flops-pa", "fed-avg"])
def test_a_round_calls_at_most_the_target_number_of_functions(algorithm):
    """In a process without the type checks of the suite, which would wrap every function."""
    done = subprocess.run([sys.executable, "-c", CODE, algorithm], cwd=ROOT / "tools", capture_output=True, text=True, check=True)
    num_functions, target = map(int, done.stdout.split())
    assert num_functions <= target
