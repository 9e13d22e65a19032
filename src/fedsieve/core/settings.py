"""Convert plain values of TOML, JSON and Flower's run config to the types of settings."""

from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin


def parse_value(type_hint: Any, value: Any, name: str) -> Any:
    """Return a plain value as the type of the setting `name`, or raise ValueError."""
    for option in get_args(type_hint) if get_origin(type_hint) in (Union, UnionType) else (type_hint,):
        if get_origin(option) is Literal and value in get_args(option):
            return value
        if isinstance(option, type) and issubclass(option, Enum) and value in [member.value for member in option]:
            return option(value)
        if option is float and isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        if option is Path and isinstance(value, str):
            return Path(value)
        if isinstance(option, type) and type(value) is option:
            return value
    raise ValueError(f"{name} takes {type_name(type_hint)}; got {value!r}")


def type_name(type_hint: Any) -> str:
    """Describe a type for an error message."""
    if get_origin(type_hint) in (Union, UnionType):
        return " or ".join(type_name(option) for option in get_args(type_hint) if option is not type(None))
    if get_origin(type_hint) is Literal:
        return " or ".join(map(str, get_args(type_hint)))
    if isinstance(type_hint, type) and issubclass(type_hint, Enum):
        return ", ".join(str(member.value) for member in type_hint)
    return {int: "a whole number", float: "a number", str: "a word", bool: "true or false"}.get(type_hint, str(type_hint))
