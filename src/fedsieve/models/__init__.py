"""Trained models as files: store, load, predict, export."""
