"""Format numbers, print text safely, and show progress."""

import sys
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console
from rich.text import Text

if TYPE_CHECKING:
    from rich.progress import Progress


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


def escape_controls(text: str) -> str:
    """The text with characters that a terminal would act on (escape sequences, reversed direction) as `\\x1b` and the like."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def spreadsheet_cell(text: str) -> str:
    """A name as a cell of a .csv file. One that a spreadsheet would compute as a formula gets a leading apostrophe; numbers stay."""
    if not text.startswith(("=", "+", "-", "@", "\t", "\r")):
        return text
    try:
        float(text)
    except ValueError:
        return f"'{text}"
    return text


class PlainConsole(Console):
    """A console that prints text as it is: names from files are neither markup nor emoji, nor commands to the terminal."""

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Return text to print; rich calls this for all strings, also for the cells of tables."""
        return super().render_str(escape_controls(text), **options)


class ProgressBar:
    """Progress and remaining time on standard error: a bar on a terminal, otherwise ten lines; nothing if `quiet`."""

    def __init__(self, total: int, title: str, unit: str, *, quiet: bool, num_done: int = 0) -> None:
        self.total, self.title, self.unit, self.num_done = total, title, unit, num_done
        self.console = PlainConsole(stderr=True, quiet=quiet, soft_wrap=True)
        self.bar: Progress | None = None
        if self.console.is_terminal and not quiet and total:
            from rich import progress  # only a terminal needs it

            columns = (
                progress.TextColumn("{task.description}", markup=False),
                progress.BarColumn(),
                progress.MofNCompleteColumn(),
                progress.TimeRemainingColumn(),
                progress.TextColumn("{task.fields[status]}", markup=False),
            )
            self.bar = progress.Progress(*columns, console=self.console, transient=True)
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
            self.console.print(f"{self.title}: {self.unit} {self.num_done} of {self.total}, {status}")
