"""Settings as options of a command, for its help text and for shell completion."""

import ast
import inspect
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from typing import Annotated, Any

from cyclopts import Group, Parameter

from fedsieve.core.settings import TOPOLOGY_KEY, normalize_key

PANEL_TITLES = {
    "data": "Data of the task",
    "federation": "Clients and aggregation",
    "topology": "Who talks to whom",
    "algorithm": "Options of the algorithm",
    "failures": "Failing and malicious clients",
    "privacy": "Differential privacy",
    "checkpoint": "Checkpoints",
}
PANELS = {name: Group(f"{title}: --{name}.*", sort_key=position) for position, (name, title) in enumerate(PANEL_TITLES.items())}
"""The panels of the help text. Options outside a section come first."""
COMMON_OPTIONS = {
    "data": ("num_examples", "num_features", "true_density", "path", "target", "client", "source"),
    "federation": ("clients", "participation", "partition", "alpha", "aggregator"),
    "topology": ("name",),
    "algorithm": ("recipe", "batch_size", "local_steps", "learning_rate", "bits"),
}
"""The options of sections that --help shows; --help-all shows all."""
RARE_OPTIONS = (
    "engine",
    "precision",
    "workers",
    "byte_counting",
    "refit",
    "evaluate_on",
    "centralized",
    "centralized_steps",
    "trust",
    "secret_file",
)
"""The options outside sections that --help does not show."""
SWITCH = {"negative": "", "show_default": False}


def documented_command(
    types: Mapping[str, Any], classes: Mapping[type, str], defaults: Mapping[str, Any], *, show_all: bool
) -> Callable[..., None]:
    """Return a function whose parameters are the settings of these types; `classes` are their dataclasses with the section of each."""
    texts: dict[str, str] = {}
    values = dict(defaults)
    for cls, section in classes.items():
        documented = field_help(cls)
        for f in fields(cls):  # the first of a name: `algorithm` is the algorithm's name, not its options
            if f.default is MISSING:  # a section
                continue
            key = normalize_key(f"{section}.{f.name}" if section else f.name)
            texts.setdefault(key, documented.get(f.name, ""))
            values.setdefault(key, f.default)
    parameters = []
    for key, kind in types.items():
        section, _, name = key.rpartition(".")
        is_common = name in COMMON_OPTIONS.get(section, ()) if section else name not in RARE_OPTIONS
        extra: dict[str, Any] = ({"group": PANELS[section]} if section else {}) | (SWITCH if name in ("quiet", "json", "trust") else {})
        flag = "--topology" if key == TOPOLOGY_KEY else f"--{key.replace('_', '-')}"
        option = Parameter(name=flag, help=texts[key], show=show_all or is_common, **extra)
        parameters.append(
            inspect.Parameter(
                key.replace(".", "__"), inspect.Parameter.KEYWORD_ONLY, default=values[key], annotation=Annotated[kind, option]
            )
        )

    def command(**_: Any) -> None:
        """Take the place of the command, which parses its options itself."""

    command.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess]  # functions may have one
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


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
