"""Losses over flat parameter vectors: generalised linear models in closed form, and any module."""
