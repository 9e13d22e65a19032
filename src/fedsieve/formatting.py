"""How numbers and progress look, everywhere the same."""

import sys
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


def format_number(value: float) -> str:
    """Four decimals."""
    return f"{value:.4f}"


def format_seconds(value: float) -> str:
    """Two significant digits, without an exponent."""
    return f"{value:.1f}" if value < 10 else f"{value:.0f}"


def format_bytes(num_bytes: float) -> str:
    """Bytes in decimal units."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.3g} {unit}"
    return f"{num_bytes:.0f} B"


class ProgressBar:
    """Progress over rounds or runs on standard error, with the time left: a bar on a terminal, ten plain lines elsewhere, or quiet."""

    def __init__(self, total: int, title: str, unit: str, *, quiet: bool, num_done: int = 0) -> None:
        self.total, self.title, self.unit, self.num_done = total, title, unit, num_done
        self.console = Console(stderr=True, quiet=quiet, highlight=False, soft_wrap=True)
        self.bar: Progress | None = None
        if self.console.is_terminal and not quiet and total:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[status]}"),
            )
            self.bar = Progress(*columns, console=self.console, transient=True)
            self.task = self.bar.add_task(title, total=total, completed=num_done, status="")

    def __enter__(self) -> Self:
        if self.bar:
            self.bar.start()
        return self

    def __exit__(self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self.bar:
            self.bar.stop()
        sys.stderr.flush()

    def advance(self, status: str) -> None:
        """One more is done."""
        self.num_done += 1
        if self.bar:
            self.bar.update(self.task, advance=1, status=status)
        elif self.num_done == self.total or self.num_done % max(self.total // 10, 1) == 0:
            self.console.print(f"{self.title}: {self.unit} {self.num_done} of {self.total}, {status}", markup=False)
