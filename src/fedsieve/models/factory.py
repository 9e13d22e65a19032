"""Load a function that builds a module, by its name PACKAGE.MODULE:FACTORY."""

import sys
from collections.abc import Callable
from importlib import import_module

from torch import nn


def load_factory(name: str) -> Callable[[], nn.Module]:
    """Return the function PACKAGE.MODULE:FACTORY after checking that it builds a module."""
    module_name, _, attribute = name.partition(":")
    sys.path.insert(0, "")
    try:
        factory = getattr(import_module(module_name), attribute)
        module = factory()
    except Exception as error:  # user code may raise anything; the user gets it in one line
        raise ValueError(f"--model {name} cannot be loaded: {type(error).__name__}: {error}") from None
    finally:
        sys.path.remove("")
    if not isinstance(module, nn.Module):
        raise ValueError(f"--model {name} must build a torch.nn.Module; it built {type(module).__name__}")
    return factory
