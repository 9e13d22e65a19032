"""The command line. torch is imported only if a command needs it."""

import os
import signal
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any, Literal

from cyclopts import App, CycloptsError, Parameter

from fedsieve import __version__
from fedsieve.cli.options import convert_tokens, merge_config_files, parse_words
from fedsieve.cli.torchrun import is_rank, run_rank
from fedsieve.cli.welcome import welcome_text
from fedsieve.formatting import PlainConsole

DESCRIPTION = """Federated learning that keeps only the weights that matter.

You choose the density, the fraction of weights that may be non-zero. The trained model has exactly that many.

Start with `fedsieve train`, which needs no options, then `fedsieve train --help`.
"""
COMMANDS = {
    "train": ("fedsieve.cli.train", "Train one model with one algorithm; writes a run directory."),
    "compare": ("fedsieve.cli.compare", "Train several algorithms on the same data and seeds; prints one table."),
}
"""Commands whose options depend on the task and the algorithm: their module and their help text."""
SIMPLE_COMMANDS = {
    "demo": ("fedsieve.cli.demo", "Compare four algorithms on one generated task, in under half a minute."),
    "reproduce": ("fedsieve.cli.reproduce", "Compute a table or figure of the paper and compare it with the paper's numbers and claims."),
    "report": ("fedsieve.cli.report", "Write one HTML page about one or several runs."),
    "watch": ("fedsieve.cli.report", "Serve a run's page on this machine while it trains."),
    "inspect": ("fedsieve.cli.model", "Show what a model kept: density per layer, bytes on disk, strongest features, a picture."),
    "export": ("fedsieve.cli.model", "Write a run's model as a file that other programs read."),
    "predict": ("fedsieve.cli.model", "Predict every row of a file with a run's model."),
    "doctor": ("fedsieve.cli.doctor", "Show versions, data and optional packages on this machine."),
}
"""Commands with fixed options: their module and their help text."""
GROUPS = {
    "flower": ("fedsieve.cli.flower", "Write a Flower app, and run it on this machine."),
    "data": ("fedsieve.cli.data", "List, show, fetch and check the data sets."),
}
"""Groups of commands: their module and their help text."""
COMPLETION_HELP = """Print the script with which a shell completes commands and options.

For bash: `fedsieve completion bash > ~/.local/share/bash-completion/completions/fedsieve`.

For zsh, write it to a file `_fedsieve` in a folder of `$fpath`; for fish to `~/.config/fish/completions/fedsieve.fish`.

Then open a new shell.
"""
HELP_WORDS, SHOW_ALL = ("--help", "-h"), "--help-all"
"""--help-all is like --help, with the options that --help leaves out."""
EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED, EXIT_BROKEN_PIPE = 0, 1, 2, 130, 141


def main(argv: list[str] | None = None) -> int:
    """Parse the command line and run the command; print expected errors as one line and return the exit code."""
    words = sys.argv[1:] if argv is None else argv
    errors = PlainConsole(stderr=True, soft_wrap=True)
    try:
        if not words:
            print(welcome_text())
            return EXIT_OK
        result = run_rank(run_command, words) if is_rank() else run_command(words)
    except KeyboardInterrupt as stopped:
        if argv is None:  # the process ends here: another Ctrl-C would only interrupt the message
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        errors.print("; ".join(("interrupted; what was finished is kept", *stopped.args)))
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # whoever read the output has gone, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except (CycloptsError, ValueError) as error:
        errors.print(f"fedsieve: {error}")
        return EXIT_USAGE
    except RuntimeError as error:
        if not _is_expected(error):
            raise
        errors.print(f"fedsieve: {error}")
        return EXIT_FAILED
    return result if isinstance(result, int) else EXIT_OK


def _is_expected(error: RuntimeError) -> bool:
    return type(error).__module__.startswith("fedsieve.")


def run_command(words: list[str], *cluster: Any) -> Any:
    """Parse the words once and run the command, on a cluster with the connections of this process."""
    name = next((word for word in words if not word.startswith("-")), "")
    if cluster and name != "train":
        raise ValueError(f"a cluster runs fedsieve train, and not fedsieve {name}; start it without torchrun")
    asked = [word for word in words if word in (*HELP_WORDS, SHOW_ALL)]
    if name not in COMMANDS:
        return build_app(name, {})(["--help" if word == SHOW_ALL else word for word in words], exit_on_error=False, print_error=False)
    rest = [word for word in words if word not in asked]
    rest.remove(name)
    values = merge_config_files(parse_words(rest), may_resume=name == "train")
    if not asked:
        return getattr(import_module(COMMANDS[name][0]), name)(values, *cluster)
    return build_app(name, values, show_all=SHOW_ALL in asked)([name, "--help"])


def build_app(asked: str, values: dict[str, Any], *, show_all: bool = True) -> App:
    """Return the application; of its commands only `asked` is imported, or all for completion."""
    app = App(
        name="fedsieve",
        help=DESCRIPTION,
        version=__version__,
        help_format="rich",
        suppress_keyboard_interrupt=False,
        result_action="return_value",
        default_parameter=Parameter(converter=convert_tokens),
    )

    def load(name: str, module: str, member: str, placeholder: Any) -> Any:
        return getattr(import_module(module), member) if asked in (name, "completion") else placeholder

    for name, (module, text) in COMMANDS.items():
        document = load(name, module, "document", lambda *_, **__: _placeholder)
        app.command(
            document(values, show_all=show_all), name=name, help=text, help_epilogue=None if show_all else f"{SHOW_ALL} shows every option."
        )
    for name, (module, text) in SIMPLE_COMMANDS.items():
        app.command(load(name, module, name, _placeholder), name=name, help=text)
    for name, (module, text) in GROUPS.items():
        app.command(load(name, module, f"{name}_app", lambda name=name, text=text: App(name=name, help=text))())
    app.command(_completion_command(app), name="completion", help=COMPLETION_HELP)
    return app


def _placeholder() -> None:
    """Take the place of a command that is not called."""


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
