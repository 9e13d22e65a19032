"""The command line. torch is imported only if a command needs it."""

import os
import sys
import tomllib
from collections import ChainMap
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Literal

from cyclopts import App, CycloptsError
from rich.console import Console

from fedsieve import __version__
from fedsieve.cli.welcome import welcome_text

DESCRIPTION = """Federated learning that keeps only the weights that matter.

Name the density, the fraction of weights that may be non-zero; the model handed back has exactly that many.

Begin with `fedsieve train`, which needs no option at all, then `fedsieve train --help`.
"""
COMMANDS = {
    "train": "Train one model with one algorithm; writes a run directory.",
    "compare": "Train several algorithms on the same data and seeds; prints one table.",
    "reproduce": "Compute a table or figure of the paper and hold it against the paper's numbers and claims.",
}
SIMPLE_COMMANDS = {
    "report": ("fedsieve.cli.report", "Write one HTML page about one or several runs."),
    "watch": ("fedsieve.cli.report", "Serve a run's page on this machine while it trains."),
    "inspect": ("fedsieve.cli.model", "What a model kept: density per layer, bytes on disk, strongest features, a picture."),
    "export": ("fedsieve.cli.model", "Write a run's model as a file that other programs read."),
    "predict": ("fedsieve.cli.model", "Predict every row of a file with a run's model."),
    "doctor": ("fedsieve.cli.doctor", "Versions, data and optional packages on this machine."),
}
"""Commands with fixed options: their module and their help text."""
COMPLETION_HELP = """Print what makes a shell complete commands and options.

For bash: `fedsieve completion bash > ~/.local/share/bash-completion/completions/fedsieve`.

For zsh, write it to a file `_fedsieve` in a folder of `$fpath`; for fish to `~/.config/fish/completions/fedsieve.fish`.

Then open a new shell.
"""
DATA_HELP = "What data there is, how it falls on clients, where to get it."
FLOWER_HELP = "A Flower app of your own, and a federation to run it in."
SECTIONS = ("data", "federation", "failures", "privacy", "algorithm", "checkpoint")
SHOW_ALL = "--help-all"
"""Like --help, with the options that --help leaves out."""
EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED, EXIT_BROKEN_PIPE = 0, 1, 2, 130, 141


class UsageError(ValueError):
    """Invalid usage; the message is printed without a traceback."""


def main(argv: list[str] | None = None) -> int:
    """Parse the command line and run the command; print expected errors as one line and return the exit code."""
    words = sys.argv[1:] if argv is None else argv
    errors = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        if not words:
            print(welcome_text())
            return EXIT_OK
        arguments = ["--help" if word == SHOW_ALL else word for word in words]
        result = build_app(words)(arguments + config_flags(words), exit_on_error=False, print_error=False)
    except KeyboardInterrupt as stopped:
        errors.print("; ".join(("interrupted; what was finished is kept", *stopped.args)), markup=False)
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # whoever read the output has gone, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except CycloptsError as error:
        errors.print(f"fedsieve: {error}", markup=False)
        return EXIT_USAGE
    except ValueError as error:
        errors.print(f"fedsieve: {error}", markup=False)
        return EXIT_USAGE
    except RuntimeError as error:
        if not _is_expected(error):
            raise
        errors.print(f"fedsieve: {error}", markup=False)
        return EXIT_FAILED
    return result if isinstance(result, int) else EXIT_OK


def _is_expected(error: RuntimeError) -> bool:
    return type(error).__module__.startswith("fedsieve.")


def build_app(argv: list[str]) -> App:
    """Return the application, with the options of the task and the algorithm in `argv`."""
    app = App(
        name="fedsieve",
        help=DESCRIPTION,
        version=__version__,
        help_format="rich",
        suppress_keyboard_interrupt=False,
        result_action="return_value",
    )
    asked = next((word for word in argv if not word.startswith("-")), None)
    everything = asked == "completion"
    for name, text in COMMANDS.items():
        app.command(_build_command(name, argv) if everything or name == asked else _placeholder, name=name, help=text)
    for name, (home, text) in SIMPLE_COMMANDS.items():
        app.command(getattr(import_module(home), name) if everything or name == asked else _placeholder, name=name, help=text)
    app.command(flower_app() if everything or asked == "flower" else App(name="flower", help=FLOWER_HELP))
    if asked not in COMMANDS:  # beside a command called data, a settings file's section [data] would be dropped
        app.command(data_app() if everything or asked == "data" else App(name="data", help=DATA_HELP))
    app.command(_completion_command(app), name="completion", help=COMPLETION_HELP)
    return app


def _completion_command(app: App) -> Callable[..., None]:
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
    """Return `fedsieve data`; its modules are imported on use."""
    from fedsieve.cli import data

    return data.data_app()


def flower_app() -> App:
    """Return `fedsieve flower`; its modules are imported on use."""
    from fedsieve.cli import flower

    return flower.flower_app()


def _placeholder() -> None:
    """Take the place of a command that is not called."""


def _build_command(name: str, argv: list[str]) -> Callable[..., int]:
    if name == "reproduce":
        from fedsieve.cli.reproduce import reproduce

        return reproduce
    from fedsieve.cli import compare, train

    settings = dict(ChainMap(*read_config_files(argv).values()))
    top = [early_value(argv, f"--{key}") or _setting(settings, key) for key in ("task", "algorithm", "model")]
    data = [early_value(argv, f"--data.{key}") or settings.get("data", {}).get(key) for key in ("path", "target", "client")]
    build = train.train_command if name == "train" else compare.compare_command
    return build(train.EarlyArguments(*top, *data, show_all=SHOW_ALL in argv))


def early_value(argv: list[str], flag: str) -> str | None:
    """Return the last value of a flag, before parsing."""
    found = None
    for i, word in enumerate(argv):
        if word == flag and i + 1 < len(argv):
            found = argv[i + 1]
        elif word.startswith(flag + "="):
            found = word.removeprefix(flag + "=")
    return found


def read_config_files(argv: list[str]) -> dict[str, dict]:
    """Return the settings files by path, in order of precedence: --config, and that of the run to resume."""
    found = {}
    if (path := early_value(argv, "--config")) is not None:
        found[path] = read_toml(path, f"--config {path}")
    if argv[0] == "train" and (folder := early_value(argv, "--resume")) is not None:
        path = str(Path(folder) / "config.toml")
        stored = read_toml(path, f"--resume {folder}, which needs the config.toml of a run,")
        for key in ("task", "algorithm", "model"):  # they decide which options there are
            asked = early_value(argv, f"--{key}") or next(
                (_setting(file, key) for file in found.values() if _setting(file, key) is not None), None
            )
            if asked not in (None, _setting(stored, key)):
                raise UsageError(f"--resume {folder}: a resumed run keeps its settings: {key} was {_setting(stored, key)}, is {asked}")
        found[path] = stored
    return found


def config_flags(argv: list[str]) -> list[str]:
    """Return the settings of the config files as flags, without those on the command line, which take precedence."""
    if argv[0] not in COMMANDS:
        return []
    given = {word.partition("=")[0] for word in argv}
    flags: dict[str, str] = {}
    for settings in read_config_files(argv).values():
        for key, value in settings.items():
            nested = value.items() if isinstance(value, dict) else ((None, value),)
            for option, content in nested:
                flag = f"--{key}" if option is None else "--algorithm" if (key, option) == ("algorithm", "name") else f"--{key}.{option}"
                if flag not in given and content is not False:
                    flags.setdefault(flag, flag if content is True else f"{flag}={content}")
    return list(flags.values())


def _setting(settings: dict, key: str) -> str | None:
    """Return a top-level setting; the name of the algorithm is in its section."""
    return settings.get("algorithm", {}).get("name") if key == "algorithm" else settings.get(key)


def read_toml(path: str, description: str) -> dict:
    """Return the settings in a file; raise UsageError if it is not valid."""
    try:
        settings = tomllib.loads(Path(path).read_text())
    except OSError as error:
        raise UsageError(f"{description} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{description} is not TOML: {error}") from None
    for key, value in settings.items():
        if isinstance(value, dict) != (key in SECTIONS):
            raise UsageError(f"{description}: {key} must be {'a section' if key in SECTIONS else 'a plain value'}; got {value!r}")
        if isinstance(value, list):
            raise UsageError(f"{description}: {key} takes one value; got {value!r}")
    return settings
