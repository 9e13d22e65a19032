"""Turn dataclass fields into command-line options. Their docstrings become the help text."""

import ast
import inspect
import textwrap
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, Field, field, fields, make_dataclass
from typing import Annotated, Any, get_type_hints

from cyclopts import Group, Parameter


def parse_integer(_: Any, tokens: Sequence[Any]) -> int:
    """Convert text to an integer, or raise ValueError."""
    text = tokens[0].value
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{tokens[0].keyword or 'a setting'} takes a whole number; got {text}") from None


Integer = Annotated[int, Parameter(converter=parse_integer)]
Switch = Annotated[bool, Parameter(negative="", show_default=False)]
"""A flag without a negative form."""


def field_help(cls: type) -> dict[str, str]:
    """Return the docstring of each field; a subclass overrides its bases."""
    texts: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        if base.__module__ == "builtins" or not hasattr(base, "__dataclass_fields__"):
            continue
        definition = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        assert isinstance(definition, ast.ClassDef)
        body = definition.body
        for here, below in zip(body, body[1:], strict=False):
            if isinstance(here, ast.AnnAssign) and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
                assert isinstance(here.target, ast.Name)
                texts[here.target.id] = str(below.value.value)
    return texts


def user_fields(cls: type) -> list[Field]:
    """Return the fields a user sets in the section of this class."""
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
    shown: Collection[str] | None = None,
) -> type:
    """Return a dataclass for the parser with the fields of `cls` that a user can set.

    `optional` makes every default None, `defaults` and `type_overrides` replace some defaults and types, `group` is the panel in the
    help text, and `shown` are the fields in the help text (None: all).
    """
    hints, texts = get_type_hints(cls) | dict(type_overrides or {}), field_help(cls)
    options: list[tuple[str, Any, Any]] = []
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
        is_shown = shown is None or f.name in shown
        parameter = Parameter(help=texts.get(f.name, ""), converter=converter, show=is_shown, **extra)
        options.append((f.name, Annotated[kind, parameter], field(default=default)))
    # The parser only looks inside classes that have a module.
    return make_dataclass(name, options, kw_only=True, frozen=True, namespace={"__module__": __name__})


def to_kwargs(parsed: Any, *, optional: bool = False) -> dict[str, Any]:
    """Return a parsed section as keyword arguments; in an optional section None means not set by the user."""
    values = {f.name: getattr(parsed, f.name) for f in fields(parsed)}
    return {name: value for name, value in values.items() if value is not None} if optional else values
