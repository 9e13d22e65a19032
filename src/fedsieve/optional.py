"""Optional dependencies, imported only if they are used."""

from importlib import import_module
from types import ModuleType


class MissingPackageError(ValueError):
    """An optional package is not installed; the message has the command that installs it."""


def require_package(module: str, requirement: str, needed_by: str) -> ModuleType:
    """Import a module; raises MissingPackageError if its package is not installed."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != module.split(".")[0]:
            raise
        raise MissingPackageError(
            f"{needed_by} needs the package {error.name}, which is not installed; pip install {requirement}"
        ) from None
