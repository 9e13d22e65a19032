"""Sparse messages for an existing Flower app: a strategy wrapper and a client mod (docs/flower.md)."""

from fedsieve.flower.mod import sparse_mod
from fedsieve.flower.strategy import SparseStrategy

__all__ = ["SparseStrategy", "sparse_mod"]
