"""A rival that owns its own loop, stopped after every round so that rounds can be interleaved and timed."""

import os
import threading
import traceback
from collections.abc import Callable


def paced(run: Callable[[Callable[[], None]], None]) -> Callable[[], None]:
    """One round a call of `run(tick)`, which trains in a thread and calls `tick` after each of its rounds."""
    go, done = threading.Semaphore(0), threading.Semaphore(0)

    def tick() -> None:
        done.release()
        go.acquire()

    def work() -> None:
        go.acquire()
        try:
            run(tick)
        except BaseException:  # the coordinator reads the last line and reports the rival as missing
            traceback.print_exc()
        os._exit(1)

    def play() -> None:
        go.release()
        done.acquire()

    threading.Thread(target=work, daemon=True).start()
    return play
