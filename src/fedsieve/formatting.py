"""Format numbers, and show progress."""

import sys
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


def format_number(value: float) -> str:
    """A number with four decimals."""
    return f"{value:.4f}"


def format_seconds(value: float) -> str:
    """Seconds with one decimal below 10, else none."""
    return f"{value:.1f}" if value < 10 else f"{value:.0f}"


def format_bytes(num_bytes: float) -> str:
    """A number of bytes in decimal units."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.3g} {unit}"
    return f"{num_bytes:.0f} B"


class ProgressBar:
    """Progress and remaining time on standard error: a bar on a terminal, otherwise ten lines; nothing if `quiet`."""

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
        """Count one more round or run as done."""
        self.num_done += 1
        if self.bar:
            self.bar.update(self.task, advance=1, status=status)
        elif self.num_done == self.total or self.num_done % max(self.total // 10, 1) == 0:
            self.console.print(f"{self.title}: {self.unit} {self.num_done} of {self.total}, {status}", markup=False)
