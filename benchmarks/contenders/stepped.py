"""Interrupt a rival with its own training loop after every round, so that rounds can be interleaved and timed."""

import os
import threading
import traceback
from collections.abc import Callable


def run_stepwise(run_training: Callable[[Callable[[], None]], None]) -> Callable[[], None]:
    """Return a function that runs one round. `run_training(on_round_end)` trains in a thread and calls its argument after each round."""
    go, done = threading.Semaphore(0), threading.Semaphore(0)

    def on_round_end() -> None:
        done.release()
        go.acquire()

    def run_in_thread() -> None:
        go.acquire()
        try:
            run_training(on_round_end)
        except BaseException:  # the coordinator reads the last line and reports the rival as missing
            traceback.print_exc()
        os._exit(1)

    def run_round() -> None:
        go.release()
        done.acquire()

    threading.Thread(target=run_in_thread, daemon=True).start()
    return run_round
