"""Runs: their settings, training, results and comparisons."""
