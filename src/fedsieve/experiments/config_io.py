"""A run from the settings it left: config.toml as values, and back to the `Run` that wrote it."""

import tomllib
from collections.abc import Mapping
from dataclasses import fields
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

from fedsieve.algorithms import algorithm_class
from fedsieve.experiments.config import FederationConfig, RunConfig
from fedsieve.experiments.resolve import ResolvedRun, resolve
from fedsieve.experiments.tasks import TASKS
from fedsieve.runtime.failures import Failures
from fedsieve.runtime.privacy import Privacy
from fedsieve.storage import run_directory

Settings = TypeVar("Settings")


def load_run(folder: Path) -> ResolvedRun:
    """The run whose folder this is."""
    path = folder / run_directory.CONFIG
    try:
        return resolve(from_settings_dict(tomllib.loads(path.read_text())))
    except OSError as problem:
        raise run_directory.RunDirectoryError(f"{folder} holds no run: {path.name} cannot be read ({problem.strerror})") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, KeyError, TypeError) as problem:
        raise run_directory.RunDirectoryError(f"{path} is not what a run leaves: {type(problem).__name__}: {problem}") from None


def from_settings_dict(settings: Mapping[str, Any]) -> RunConfig:
    """The inverse of `Run.config`: from_config(run.config).config == run.config."""
    sections = {
        "data": TASKS[settings["task"]].data_options,
        "federation": FederationConfig,
        "failures": Failures,
        "privacy": Privacy,
    }
    made = {name: _build_settings(cls, settings.get(name, {})) for name, cls in sections.items()}
    options = dict(settings["algorithm"])
    algorithm_name = options.pop("name")
    made["algorithm"] = _build_settings(algorithm_class(algorithm_name), options)
    top = _parse_values(RunConfig, {name: value for name, value in settings.items() if name not in made})
    return RunConfig(**top, **made, algorithm_name=algorithm_name)


def _build_settings(cls: type[Settings], values: Mapping[str, Any]) -> Settings:
    """A settings class from plain values; what lives in another section is filled in by the run."""
    return cls(**_parse_values(cls, values))


def _parse_values(cls: type, values: Mapping[str, Any]) -> dict[str, Any]:
    hints, known = get_type_hints(cls), {field.name for field in fields(cls)}
    named = {name.replace("-", "_"): value for name, value in values.items() if value is not None}
    if strange := named.keys() - known:
        raise KeyError(f"{sorted(strange)[0]} is no setting of {cls.__name__}")
    return {name: _parse_value(hints[name], value) for name, value in named.items()}


def _parse_value(hint: Any, value: Any) -> Any:
    """Text as the choice or path it stands for."""
    for kind in get_args(hint) or (hint,):
        if isinstance(value, str) and isinstance(kind, type) and issubclass(kind, StrEnum | Path):
            return kind(value)
    return value
