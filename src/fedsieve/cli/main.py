"""The command line: a thin skin. Nothing here imports torch until a command needs it."""

import os
import sys
import tomllib
from collections import ChainMap
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Literal

from cyclopts import App, CycloptsError
from cyclopts.config import Toml
from rich.console import Console

from fedsieve import __version__
from fedsieve.cli.welcome import welcome

ABOUT = """Federated learning that keeps only the weights that matter.

Name the density, the fraction of weights that may be non-zero; the model handed back has exactly that many.

Begin with `fedsieve train`, which needs no option at all, then `fedsieve train --help`.
"""
COMMANDS = {
    "train": "Train one model with one method; writes a run folder.",
    "compare": "Train several methods on the same data and seeds; one table.",
    "reproduce": "Compute a table or figure of the paper and hold it against the paper's numbers and claims.",
}
PLAIN = {
    "report": ("fedsieve.cli.report", "Write one HTML page about one or several runs."),
    "watch": ("fedsieve.cli.report", "Serve a run's page on this machine while it trains."),
    "inspect": ("fedsieve.cli.model", "What a model kept: density per layer, bytes on disk, strongest features, a picture."),
    "export": ("fedsieve.cli.model", "Write a run's model as a file that other programs read."),
    "predict": ("fedsieve.cli.model", "Predict every row of a file with a run's model."),
    "doctor": ("fedsieve.cli.doctor", "Versions, data and optional packages on this machine."),
}
"""Commands with the same options whatever is typed: their home, and their help."""
COMPLETION = """Print what makes a shell complete commands and options.

For bash: `fedsieve completion bash > ~/.local/share/bash-completion/completions/fedsieve`.

For zsh, write it to a file `_fedsieve` in a folder of `$fpath`; for fish to `~/.config/fish/completions/fedsieve.fish`.

Then open a new shell.
"""
DATA = "What data there is, how it falls on clients, where to get it."
FLOWER = "A Flower app of your own, and a federation to run it in."
SECTIONS = ("data", "federation", "gates", "failures", "privacy", "algorithm", "checkpoint")
DONE, FAILED, USAGE, INTERRUPTED, CLOSED = 0, 1, 2, 130, 141


class UsageError(ValueError):
    """What the user typed cannot be done; the message is all they will see."""


def main(argv: list[str] | None = None) -> int:
    """Parse, run, and turn every foreseen failure into one line and an exit code."""
    words = sys.argv[1:] if argv is None else argv
    errors = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        if not words:
            print(welcome())
            return DONE
        result = build(words)(words, exit_on_error=False, print_error=False)
    except KeyboardInterrupt as stopped:
        errors.print("; ".join(("interrupted; what was finished is kept", *stopped.args)), markup=False)
        return INTERRUPTED
    except BrokenPipeError:  # whoever read the output has gone, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLOSED
    except CycloptsError as problem:
        errors.print(f"fedsieve: {problem}", markup=False)
        return USAGE
    except ValueError as problem:
        errors.print(f"fedsieve: {problem}", markup=False)
        return USAGE
    except RuntimeError as problem:
        if not _foreseen(problem):
            raise
        errors.print(f"fedsieve: {problem}", markup=False)
        return FAILED
    return result if isinstance(result, int) else DONE


def _foreseen(problem: RuntimeError) -> bool:
    return type(problem).__module__.startswith("fedsieve.")


def build(words: list[str]) -> App:
    """The application, with the options of the method that `words` name."""
    app = App(
        name="fedsieve",
        help=ABOUT,
        version=__version__,
        help_format="rich",
        suppress_keyboard_interrupt=False,
        result_action="return_value",
    )
    asked = next((word for word in words if not word.startswith("-")), None)
    everything = asked == "completion"
    for name, text in COMMANDS.items():
        app.command(_command(name, words) if everything or name == asked else _later, name=name, help=text)
    for name, (home, text) in PLAIN.items():
        app.command(getattr(import_module(home), name) if everything or name == asked else _later, name=name, help=text)
    app.command(flower_app() if everything or asked == "flower" else App(name="flower", help=FLOWER))
    if asked not in COMMANDS:  # beside a command called data, a settings file's section [data] would be dropped
        app.command(data_app() if everything or asked == "data" else App(name="data", help=DATA))
    app.command(_completion(app), name="completion", help=COMPLETION)
    if asked in COMMANDS:
        app[asked].config = tuple(Toml(path, must_exist=True, use_commands_as_keys=False) for path in settings_files(words))
    return app


def _completion(app: App) -> Callable[..., None]:
    def completion(shell: Literal["bash", "zsh", "fish"]) -> None:
        """What `completion` does.

        Parameters
        ----------
        shell
            whose
        """
        print(app.generate_completion(shell=shell))

    return completion


def data_app() -> App:
    """`fedsieve data`, whose modules load only when asked for."""
    from fedsieve.cli import data

    return data.data_app()


def flower_app() -> App:
    """`fedsieve flower`, whose modules load only when asked for."""
    from fedsieve.cli import flower

    return flower.flower_app()


def _later() -> None:
    """Stands for a command that was not asked for."""


def _command(name: str, words: list[str]) -> Callable[..., int]:
    if name == "reproduce":
        from fedsieve.cli.reproduce import reproduce

        return reproduce
    from fedsieve.cli import train

    settings = dict(ChainMap(*settings_files(words).values()))
    top = [peek(words, f"--{key}") or settings.get(key) for key in ("task", "method", "model")]
    data = [peek(words, f"--data.{key}") or settings.get("data", {}).get(key) for key in ("path", "target", "client")]
    return getattr(train, f"{name}_command")(train.Named(*top, *data))


def peek(words: list[str], flag: str) -> str | None:
    """The value of a flag, before parsing: the last one given."""
    found = None
    for i, word in enumerate(words):
        if word == flag and i + 1 < len(words):
            found = words[i + 1]
        elif word.startswith(flag + "="):
            found = word.removeprefix(flag + "=")
    return found


def settings_files(words: list[str]) -> dict[str, dict]:
    """What the settings files say, by their paths, the first one winning: --config, and that of the run to resume."""
    found = {}
    if (path := peek(words, "--config")) is not None:
        found[path] = read_toml(path, f"--config {path}")
    if words[0] == "train" and (folder := peek(words, "--resume")) is not None:
        path = str(Path(folder) / "config.toml")
        stored = read_toml(path, f"--resume {folder}, which needs the config.toml of a run,")
        for key in ("task", "method", "model"):  # they decide which options there are
            asked = peek(words, f"--{key}") or next((file[key] for file in found.values() if key in file), None)
            if asked not in (None, stored.get(key)):
                raise UsageError(f"--resume {folder}: a resumed run keeps its settings: {key} was {stored.get(key)}, is {asked}")
        found[path] = stored
    return found


def read_toml(path: str, said: str) -> dict:
    """The settings in a file, or one line about what is wrong with it."""
    try:
        settings = tomllib.loads(Path(path).read_text())
    except OSError as problem:
        raise UsageError(f"{said} cannot be read: {problem.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as problem:
        raise UsageError(f"{said} is not TOML: {problem}") from None
    for key, value in settings.items():
        if isinstance(value, dict) != (key in SECTIONS):
            raise UsageError(f"{said}: {key} must be {'a section' if key in SECTIONS else 'a plain value'}; got {value!r}")
        if isinstance(value, list):
            raise UsageError(f"{said}: {key} takes one value; got {value!r}")
    return settings
