"""Packages that only some commands need: imported when asked for, and named with the command that installs them when missing."""

from importlib import import_module
from types import ModuleType


class MissingPackageError(ValueError):
    """A package that is not installed; the message has the command that installs it."""


def require_package(module: str, requirement: str, needed_by: str) -> ModuleType:
    """The module, or one line that says how to get it."""
    try:
        return import_module(module)
    except ModuleNotFoundError as problem:
        if problem.name is None or problem.name.split(".")[0] != module.split(".")[0]:
            raise
        raise MissingPackageError(
            f"{needed_by} needs the package {problem.name}, which is not installed; pip install {requirement}"
        ) from None
