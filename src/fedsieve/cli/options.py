"""Dataclass fields as command-line options: their docstrings become help, fields that live in another section are left out."""

import ast
import inspect
import textwrap
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, Field, field, fields, make_dataclass
from typing import Annotated, Any, get_type_hints

from cyclopts import Group, Parameter


def parse_integer(_: Any, tokens: Sequence[Any]) -> int:
    """A whole number, refused rather than rounded."""
    text = tokens[0].value
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{tokens[0].keyword or 'a setting'} takes a whole number; got {text}") from None


Integer = Annotated[int, Parameter(converter=parse_integer)]
Switch = Annotated[bool, Parameter(negative="", show_default=False)]
"""Given or not given; without a form that takes it back."""


def field_help(cls: type) -> dict[str, str]:
    """What is written below each field, nearest class first."""
    texts: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        if base.__module__ == "builtins" or not hasattr(base, "__dataclass_fields__"):
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0].body
        for here, below in zip(body, body[1:], strict=False):
            if isinstance(here, ast.AnnAssign) and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
                texts[here.target.id] = str(below.value.value)
    return texts


def user_fields(cls: type) -> list[Field]:
    """The fields a user sets in this class's own section."""
    return [f for f in fields(cls) if f.init and "section" not in f.metadata and f.name not in getattr(cls, "unsupported_options", ())]


def option_class(
    cls: type,
    name: str,
    *,
    optional: bool = False,
    defaults: Mapping[str, Any] | None = None,
    type_overrides: Mapping[str, Any] | None = None,
    exclude: Collection[str] = (),
    group: Group | None = None,
    prefix: str | None = None,
    flags: Mapping[str, tuple[str, ...]] | None = None,
) -> type:
    """A dataclass for the parser with the visible fields of `cls`, some left out.

    `optional` makes every default None, `defaults` replaces some, `kinds` replaces what some may hold; `group` is their panel in the help.
    """
    hints, texts = get_type_hints(cls) | dict(type_overrides or {}), field_help(cls)
    made: list[tuple[str, Any, Any]] = []
    for f in user_fields(cls):
        if f.name in exclude:
            continue
        kind = hints[f.name] | None if optional else hints[f.name]
        default = None if optional else (defaults or {}).get(f.name, f.default)
        assert default is not MISSING, f"{cls.__name__}.{f.name} needs a default that works"
        converter = parse_integer if hints[f.name] in (int, int | None) else None
        extra: dict[str, Any] = {} if group is None else {"group": group}
        if prefix is not None:
            extra["name"] = f"--{prefix}.{f.name.replace('_', '-')}"
        elif f.name in (flags or {}):
            extra["name"] = (flags or {})[f.name]
        parameter = Parameter(help=texts.get(f.name, ""), converter=converter, **extra)
        made.append((f.name, Annotated[kind, parameter], field(default=default)))
    # Without a module of its own the parser takes the class for one of Python's and does not look inside.
    return make_dataclass(name, made, kw_only=True, frozen=True, namespace={"__module__": __name__})


def to_kwargs(parsed: Any, *, optional: bool = False) -> dict[str, Any]:
    """The parsed section as keyword arguments; None stands for "not typed" in an optional one."""
    values = {f.name: getattr(parsed, f.name) for f in fields(parsed)}
    return {name: value for name, value in values.items() if value is not None} if optional else values
