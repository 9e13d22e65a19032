"""Fixtures of all tests of the drop-in."""

from helpers.flower_app import task_identity  # noqa: F401
