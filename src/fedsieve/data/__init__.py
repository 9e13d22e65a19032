"""Data sets and how their examples are distributed over clients."""
