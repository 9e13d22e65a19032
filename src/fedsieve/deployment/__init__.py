"""Runs over Flower."""
