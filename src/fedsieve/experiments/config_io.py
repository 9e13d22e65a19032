"""Read a run from the config.toml of its directory."""

import tomllib
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from fedsieve.algorithms import algorithm_class
from fedsieve.core.settings import parse_value
from fedsieve.experiments.config import FederationConfig, RunConfig
from fedsieve.experiments.resolve import ResolvedRun, resolve
from fedsieve.experiments.tasks import TASKS
from fedsieve.runtime.failures import Failures
from fedsieve.runtime.privacy import Privacy
from fedsieve.storage import run_directory

Settings = TypeVar("Settings")


def load_run(folder: Path) -> ResolvedRun:
    """Return the run of a run directory."""
    path = folder / run_directory.CONFIG
    try:
        return resolve(from_settings_dict(tomllib.loads(path.read_text())))
    except OSError as error:
        raise run_directory.RunDirectoryError(f"{folder} holds no run: {path.name} cannot be read ({error.strerror})") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise run_directory.RunDirectoryError(f"{path} is not what a run leaves: {type(error).__name__}: {error}") from None


def from_settings_dict(settings: Mapping[str, Any]) -> RunConfig:
    """Return the config of plain settings: resolve(from_settings_dict(run.settings_dict)) == run."""
    sections = {
        "data": TASKS[settings["task"]].data_options,
        "federation": FederationConfig,
        "failures": Failures,
        "privacy": Privacy,
    }
    sections_by_name = {name: _build_settings(cls, settings.get(name, {})) for name, cls in sections.items()}
    options = dict(settings["algorithm"])
    algorithm_name = options.pop("name")
    sections_by_name["algorithm"] = _build_settings(algorithm_class(algorithm_name), options)
    top = _parse_values(RunConfig, {name: value for name, value in settings.items() if name not in sections_by_name})
    return RunConfig(**top, **sections_by_name, algorithm_name=algorithm_name)


def _build_settings(cls: type[Settings], values: Mapping[str, Any]) -> Settings:
    """Return a settings class built from plain values."""
    return cls(**_parse_values(cls, values))


def _parse_values(cls: type, values: Mapping[str, Any]) -> dict[str, Any]:
    hints, known = get_type_hints(cls), {field.name for field in fields(cls)}
    named = {name.replace("-", "_"): value for name, value in values.items() if value is not None}
    if unknown := named.keys() - known:
        raise KeyError(f"{sorted(unknown)[0]} is not a setting of {cls.__name__}")
    return {name: parse_value(hints[name], value, name.replace("_", "-")) for name, value in named.items()}
