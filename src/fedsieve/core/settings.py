"""Convert text and plain values to settings: one converter for the command line, TOML, JSON and Flower's run config."""

import json
from collections.abc import Collection, Mapping
from dataclasses import fields
from difflib import get_close_matches
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

Settings = TypeVar("Settings")
ALGORITHM_KEY = "algorithm"
"""The key of the algorithm's name, which is `name` in the section of its options."""
TOPOLOGY_KEY = "topology.name"
"""The key of --topology NAME."""
TYPE_NAMES = {int: "a whole number", float: "a number", str: "a word", bool: "true or false", Path: "a path"}


def normalize_key(key: str) -> str:
    """Return the key of a setting that is written with hyphens, or of the name of the algorithm or the topology."""
    name = key.replace("-", "_")
    if name == "topology":
        return TOPOLOGY_KEY
    return ALGORITHM_KEY if name in ("algorithm_name", "algorithm.name") else name


def field_types(cls: type, names: Collection[str] | None = None, section: str = "") -> dict[str, Any]:
    """Return the types of the fields of a dataclass (with these names, or all) by key: `density`, or `data.path` in a section."""
    hints, prefix = get_type_hints(cls), f"{section}." if section else ""
    return {prefix + f.name: hints[f.name] for f in fields(cls) if f.init and (names is None or f.name in names)}


def flatten(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested settings by key, without those that are None: {"data": {"path": "x.csv"}} is {"data.path": "x.csv"}."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        inner = {f"{name}.{key}": entry for key, entry in flatten(value).items()} if isinstance(value, Mapping) else {name: value}
        flat |= {key: entry for key, entry in inner.items() if entry is not None}
    return flat


def parse_settings(types: Mapping[str, Any], values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return values by key as the types of their settings, or raise ValueError; error messages name a setting by `prefix` and key."""
    for key in values:
        if key not in types:
            raise ValueError(f"{_display(prefix, key)} is unknown; {_suggest(key, types, prefix.rpartition(' ')[2])}")
    return {key: parse_value(types[key], value, _display(prefix, key)) for key, value in values.items()}


def build_settings(cls: type[Settings], parsed: Mapping[str, Any], section: str = "") -> Settings:
    """Return an instance of a dataclass with those of the parsed settings that belong to its section."""
    names = {key: key.rpartition(".")[2] for key in field_types(cls, section=section)}
    return cls(**{name: parsed[key] for key, name in names.items() if key in parsed})


def parse_value(type_hint: Any, value: Any, name: str) -> Any:
    """Return a text or a plain value as the type of the setting `name`, or raise ValueError."""
    text = value if isinstance(value, str) else "none" if value is None else json.dumps(value, default=str)
    options = get_args(type_hint) if get_origin(type_hint) in (Union, UnionType) else (type_hint,)
    for option in options if isinstance(value, str | int | float | None) else ():
        try:
            return _convert(option, text)
        except (ValueError, KeyError):
            continue
    close = get_close_matches(text, [choice for option in options for choice in _choices(option)], 1, 0.7)
    hint = f"; did you mean {close[0]}?" if close else ""
    raise ValueError(f"{name} takes {_type_name(type_hint)}; got {text or 'no value'}{hint}")


def _convert(option: Any, text: str) -> Any:
    """Return text as one type; raise ValueError or KeyError. A flag without a value, which is empty text, is true."""
    if get_origin(option) is Literal:
        return {str(choice): choice for choice in get_args(option)}[text]
    if option is bool:
        return {"true": True, "": True, "false": False}[text.lower()]
    if option is NoneType:
        return {"none": None}[text.lower()]
    if not text:
        raise ValueError
    return option(text)


def _choices(option: Any) -> list[str]:
    if isinstance(option, type) and issubclass(option, Enum):
        return [str(member.value) for member in option]
    return list(map(str, get_args(option))) if get_origin(option) is Literal else []


def _type_name(type_hint: Any) -> str:
    if get_origin(type_hint) in (Union, UnionType):
        return " or ".join(_type_name(option) for option in get_args(type_hint) if option is not NoneType)
    return ", ".join(_choices(type_hint)) or TYPE_NAMES[type_hint]


def _display(prefix: str, key: str) -> str:
    return prefix + key.replace("_", "-")


def _suggest(key: str, types: Mapping[str, Any], prefix: str) -> str:
    """Return the setting of the same section, or else of any section, with a similar name.

    If there is none, return those of the section whose names contain the unknown one, or all.
    """
    section, _, name = key.rpartition(".")
    siblings = [known for known in types if known.rpartition(".")[0] == section]
    for keys, min_similarity in ((siblings, 0.7), (types, 0.9)):
        by_name = {known.rpartition(".")[2]: known for known in keys}
        if close := get_close_matches(name, by_name, 1, min_similarity):
            return f"did you mean {_display(prefix, by_name[close[0]])}?"
    containing = [known for known in siblings if name in known.rpartition(".")[2]]
    members = [known for known in types if known.startswith(f"{key}.")] or containing or siblings
    if not members:
        return f"the sections are {', '.join(dict.fromkeys(known.rpartition('.')[0] for known in types if '.' in known))}"
    return f"there are {', '.join(_display(prefix, known) for known in members)}"
