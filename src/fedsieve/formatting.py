"""How numbers and progress look, everywhere the same."""

import sys
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


def number(value: float) -> str:
    """Four decimals."""
    return f"{value:.4f}"


def amount(value: float) -> str:
    """Two significant digits, without an exponent."""
    return f"{value:.1f}" if value < 10 else f"{value:.0f}"


def size(count: float) -> str:
    """Bytes in decimal units."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count:.0f} B"


class Counted:
    """Progress over rounds or runs on standard error, with the time left: a bar on a terminal, ten plain lines elsewhere, or quiet."""

    def __init__(self, total: int, title: str, what: str, *, quiet: bool, finished: int = 0) -> None:
        self.total, self.title, self.what, self.finished = total, title, what, finished
        self.console = Console(stderr=True, quiet=quiet, highlight=False, soft_wrap=True)
        self.bar: Progress | None = None
        if self.console.is_terminal and not quiet and total:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[said]}"),
            )
            self.bar = Progress(*columns, console=self.console, transient=True)
            self.task = self.bar.add_task(title, total=total, completed=finished, said="")

    def __enter__(self) -> Self:
        if self.bar:
            self.bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.bar:
            self.bar.stop()
        sys.stderr.flush()

    def advance(self, said: str) -> None:
        """One more is done."""
        self.finished += 1
        if self.bar:
            self.bar.update(self.task, advance=1, said=said)
        elif self.finished == self.total or self.finished % max(self.total // 10, 1) == 0:
            self.console.print(f"{self.title}: {self.what} {self.finished} of {self.total}, {said}", markup=False)
