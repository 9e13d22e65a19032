"""Runs as data: what to do, doing it, and rows on disk."""
