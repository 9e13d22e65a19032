"""Losses over flat parameter vectors: linear models in closed form, and any module."""
