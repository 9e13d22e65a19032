"""A command as one of the processes that torchrun started: rank 0 trains, prints and writes, the others train what it sends them."""

import os
import traceback
from collections.abc import Callable
from typing import Any


def is_rank() -> bool:
    """Return whether torchrun started this process as one of several."""
    return "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


def run_rank(run_command: Callable[..., Any], words: list[str]) -> int:
    """Run the command with the connections of this rank. Only rank 0 fails visibly, or rank 1 if rank 0 is gone."""
    from fedsieve.runtime.ranks import ClusterError, close_ranks, open_ranks

    ranks = open_ranks()
    try:
        if ranks.number == 0:
            try:
                return run_command(words, ranks)
            finally:
                ranks.end()
        try:
            return run_command(words, ranks)
        except Exception as error:
            if not isinstance(error, (ValueError, RuntimeError)):
                traceback.print_exc()
            ranks.report(error)
        return 1
    except ClusterError:
        if ranks.number > 1:
            return 1
        raise
    finally:
        close_ranks()
