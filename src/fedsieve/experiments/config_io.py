"""From text and plain values to the config of a run."""

import tomllib
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal

from fedsieve.algorithms import ALGORITHMS, algorithm_class
from fedsieve.algorithms.base import BaseAlgorithm
from fedsieve.core.settings import ALGORITHM_KEY, build_settings, field_types, flatten, normalize_key, parse_settings
from fedsieve.experiments.config import SECTIONS, FederationConfig, RunConfig
from fedsieve.experiments.resolve import ResolvedRun, resolve
from fedsieve.experiments.tasks import TASKS
from fedsieve.experiments.topology_config import TopologyConfig
from fedsieve.models.factory import require_trust
from fedsieve.runtime.failures import Failures
from fedsieve.runtime.privacy import Privacy
from fedsieve.storage import run_directory

NAME_TYPES = {"task": Literal[tuple(TASKS)], ALGORITHM_KEY: Literal[tuple(ALGORITHMS)]}


def section_classes(task: str) -> dict[str, type]:
    """Return the dataclass of each section of a run, without that of its algorithm."""
    return {
        "data": TASKS[task].data_options,
        "federation": FederationConfig,
        "topology": TopologyConfig,
        "failures": Failures,
        "privacy": Privacy,
    }


def setting_types(task: str, algorithm_type: type[BaseAlgorithm]) -> dict[str, Any]:
    """Return the type of every setting of a run by key."""
    types = {normalize_key(name): kind for name, kind in field_types(RunConfig).items() if name not in SECTIONS} | NAME_TYPES
    for section, cls in section_classes(task).items():
        types |= field_types(cls, section=section)
    return types | field_types(algorithm_type, algorithm_type.option_names(), "algorithm")


def parse_names(values: Mapping[str, Any], prefix: str = "") -> tuple[str, str]:
    """Return the names of task and algorithm, which determine the other settings."""
    names = parse_settings(NAME_TYPES, {key: values[key] for key in NAME_TYPES if key in values}, prefix)
    return names.get("task", RunConfig.task), names.get(ALGORITHM_KEY, RunConfig.algorithm_name)


def build_config(parsed: Mapping[str, Any]) -> RunConfig:
    """Return the config of parsed settings by key; settings that do not belong to a run are ignored."""
    top = {f.name: parsed[normalize_key(f.name)] for f in fields(RunConfig) if f.name not in SECTIONS and normalize_key(f.name) in parsed}
    sections = {name: build_settings(cls, parsed, name) for name, cls in section_classes(top.get("task", RunConfig.task)).items()}
    options = {key.removeprefix("algorithm."): value for key, value in parsed.items() if key.startswith("algorithm.")}
    return RunConfig(**top, **sections, algorithm=options)


def from_settings_dict(settings: Mapping[str, Any]) -> RunConfig:
    """Return the config of the complete settings of a run: resolve(from_settings_dict(run.settings_dict)) == run."""
    values = {normalize_key(key): value for key, value in flatten(settings).items()}
    if missing := NAME_TYPES.keys() - values.keys():
        raise ValueError(f"{' and '.join(sorted(missing))} is missing")
    task, algorithm_name = parse_names(values)
    algorithm_type = algorithm_class(algorithm_name)
    config = build_config(parse_settings(setting_types(task, algorithm_type), values))
    assert isinstance(config.algorithm, Mapping)
    return replace(config, algorithm=algorithm_type(**config.algorithm))


def load_run(folder: Path, *, trust: bool | str | None = False) -> ResolvedRun:
    """Return the run of a run directory.

    A factory that its settings name is imported only with `trust`: any factory (True), or the one with this name.
    """
    path = folder / run_directory.CONFIG
    try:
        config = from_settings_dict(tomllib.loads(path.read_text()))
    except OSError as error:
        raise run_directory.RunDirectoryError(f"{folder} holds no run: {path.name} cannot be read ({error.strerror})") from None
    except ValueError as error:  # also TOMLDecodeError and UnicodeDecodeError
        raise run_directory.RunDirectoryError(f"{path} is not what a run leaves: {error}") from None
    require_trust(config.model, f"{folder}", trust=trust is True or trust == config.model)
    return resolve(config)
