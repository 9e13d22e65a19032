"""Measurements that are not tests: their own commands, ratios side by side."""
