"""From the words of a command line to the text of its options. Does not import torch."""

import tomllib
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

from cyclopts import Parameter

from fedsieve.core.settings import ALGORITHM_KEY, flatten, normalize_key, parse_value
from fedsieve.models.factory import require_trust
from fedsieve.storage.run_directory import CONFIG

Switch = Annotated[bool, Parameter(negative="", show_default=False)]
"""A flag without a negative form."""


class UsageError(ValueError):
    """Invalid usage; the message is printed without a traceback."""


def convert_tokens(type_hint: Any, tokens: Sequence[Any]) -> Any:
    """Convert the values of an option or argument of a command with fixed options."""
    inner = get_args(type_hint)[0] if get_origin(type_hint) in (tuple, list) else type_hint
    values = [parse_value(inner, token.value, token.keyword or "the argument") for token in tokens]
    return values[0] if inner is type_hint else tuple(values)


def parse_words(words: Sequence[str]) -> dict[str, str]:
    """Return the text of each option by key: --seed 3, --seed=3, --quiet (empty text), --no-centralized (false)."""
    found: dict[str, str] = {}
    rest = deque(words)
    while rest:
        word = rest.popleft()
        if not word.startswith("--"):
            raise UsageError(f"{word} is no option; options start with --, and --help lists them")
        name, equals, text = word[2:].partition("=")
        if not equals and rest and not rest[0].startswith("--"):
            text = rest.popleft()
        section, dot, last = name.rpartition(".")
        if last.startswith("no-") and not text:
            name, text = section + dot + last.removeprefix("no-"), "false"
        if (key := normalize_key(name)) in found:
            raise UsageError(f"--{name} is given twice; give it once")
        found[key] = text
    return found


def merge_config_files(options: dict[str, str], *, may_resume: bool) -> dict[str, Any]:
    """Return the options over the settings in the files of --config and --resume; the command line takes precedence."""
    values: dict[str, Any] = dict(options)
    if path := options.get("config"):
        values = read_settings(Path(path), f"--config {path}") | values
    if may_resume and (folder := options.get("resume")):
        stored = read_settings(Path(folder) / CONFIG, f"--resume {folder}, which needs the {CONFIG} of a run,")
        for key in ("task", ALGORITHM_KEY, "model"):  # they determine which options there are
            if key in values and values[key] != stored.get(key):
                raise UsageError(f"--resume {folder}: a resumed run keeps its settings: {key} was {stored.get(key)}, is {values[key]}")
        values = stored | values
    if "model" not in options:
        source = f"--config {options['config']}" if "config" in options else f"--resume {options.get('resume')}"
        require_trust(values.get("model"), source, trust=options.get("trust") in ("", "true"))
    return values


def read_settings(path: Path, description: str) -> dict[str, Any]:
    """Return the settings in a TOML file by key."""
    try:
        return {normalize_key(key): value for key, value in flatten(tomllib.loads(path.read_text())).items()}
    except OSError as error:
        raise UsageError(f"{description} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{description} is not TOML: {error}") from None
