"""Load a function that builds a module, by its name PACKAGE.MODULE:FACTORY. Imports torch only when it builds one."""

import sys
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

OWN_FACTORIES = frozenset({"fedsieve.objectives.lenet:lenet"})
"""Factories of this package, which run no code of others."""


def require_trust(name: str | None, source: str, *, trust: bool) -> None:
    """Raise ValueError if a file names a factory, which is code that would run, and the user does not trust the file."""
    if name is None or ":" not in name or name in OWN_FACTORIES or trust:
        return
    raise ValueError(
        f"{source} names {name}, which would be imported and called on this machine; add --trust if you know this code and who wrote it"
    )


def load_factory(name: str) -> "Callable[[], nn.Module]":
    """Return the function PACKAGE.MODULE:FACTORY after checking that it builds a module.

    The working directory is searched last, so that a file there cannot take the place of an installed package.
    """
    from torch import nn

    module_name, _, attribute = name.partition(":")
    sys.path.append("")
    try:
        factory = getattr(import_module(module_name), attribute)
        module = factory()
    except (Exception, SystemExit) as error:  # user code may raise anything; the user gets it in one line
        raise ValueError(f"--model {name} cannot be loaded: {type(error).__name__}: {error}") from None
    finally:
        del sys.path[len(sys.path) - 1 - sys.path[::-1].index("")]
    if not isinstance(module, nn.Module):
        raise ValueError(f"--model {name} must build a torch.nn.Module; it built {type(module).__name__}")
    return factory
