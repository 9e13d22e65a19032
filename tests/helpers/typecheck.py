"""Checks of annotations while the suite runs: types and shapes of what functions take and return.

A check takes longer than most functions. The normal suite therefore checks the first calls of each function in each test and then a share
of its calls; every other run of pytest, such as the one with the long tests, checks all calls.
"""

import inspect
from functools import partial, wraps

import jaxtyping
from beartype import BeartypeConf, beartype

FIRST_CALLS, THEN_ONE_OF = 2, 100
checks_all_calls = True
current_test = 0

check = beartype(conf=BeartypeConf(is_pep484_tower=True))
"""The checker. It accepts an int if a float is declared."""
check_all_calls = jaxtyping.jaxtyped


def start_test():
    """Count the calls of each function from 1 again."""
    global current_test
    current_test += 1


def check_some_calls(function=None, *, typechecker):
    """Return a function that is the given one, with some of its calls checked; a decorator in place of `jaxtyping.jaxtyped`."""
    if function is None:
        return partial(check_some_calls, typechecker=typechecker)
    if inspect.isclass(function):
        is_checked = getattr(function.__init__, "__globals__", None) is globals()  # its own code replaces its constructor
        return function if is_checked else check_all_calls(function, typechecker=typechecker)
    checked = check_all_calls(function, typechecker=typechecker)
    num_calls = last_test = 0

    @wraps(function)
    def call(*args, **kwargs):
        nonlocal num_calls, last_test
        if last_test != current_test:
            num_calls, last_test = 0, current_test
        num_calls += 1
        is_checked = checks_all_calls or num_calls <= FIRST_CALLS or num_calls % THEN_ONE_OF == 0
        return (checked if is_checked else function)(*args, **kwargs)

    return call


jaxtyping.jaxtyped = check_some_calls  # the import hook looks it up by this name
